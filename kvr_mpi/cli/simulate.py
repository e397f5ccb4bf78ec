"""``kvr simulate``: forecast times to the first token, and hold the forecasts to the paper's measurements."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvr_mpi.cli.options import command, parse_numbers, plot_option
from kvr_mpi.cli.writing import check_writable, writing

if TYPE_CHECKING:
    from kvr_mpi.costs.costmodel import RelayKind
    from kvr_mpi.costs.hardware import Hardware
    from kvr_mpi.costs.layer_costs import Costs
    from kvr_mpi.costs.workload import Workload
    from kvr_mpi.schedule.simulate import ForecastRow, Outlook

# An option that prints, or writes where a file is named.
PRINT = "-"


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Arguments of ``kvr simulate``, as described in its help."""

    model: str
    hardware: str | None
    ranks: str
    contexts: str
    link_gigabytes_per_s: float | None
    relay: RelayKind | None
    chunk_tokens: int | None
    ranks_per_stage: int
    paper: bool
    score: Path | None
    json_file: str | None
    csv_file: str | None
    plot: Path | None
    plot_kind: str
    fairkv: str | None
    copies: int
    budget: int


@command()
@click.option(
    "--model",
    default="Llama 3.1 8B",
    show_default=True,
    help="A shape known by name, or a model: folder, .gguf file or hub id.",
)
@click.option(
    "--hardware", metavar="NAME_OR_FILE", help="A hardware profile, such as h200, or a JSON file.  [default: h100-80gb]"
)
@click.option("--ranks", default="1,2,4,8", show_default=True, help="Numbers of ranks, separated by commas.")
@click.option(
    "--contexts", default="8k,32k,128k", show_default=True, help="Prompt lengths in tokens; 8k is 8192, 1m is 1048576."
)
@click.option(
    "--link-gigabytes-per-s", type=float, help="Bandwidth of each link in one direction.  [default: the profile's]"
)
@click.option(
    "--relay",
    type=click.Choice(["cut-through", "store-and-forward"]),
    help="How a chain passes the prefix on.  [default: cut-through; store-and-forward with eager attention, as in the "
    "paper]",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(1),
    help="Compute slices in chunks of this many tokens.  [default: whole slices]",
)
@click.option(
    "--ranks-per-stage",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Forecast chains of stages instead, each of this many ranks that share one model; compared with tensor "
    "parallelism alone and with rings.",
)
@click.option("--paper", is_flag=True, help="Instead, compare forecasts with the paper's measurements.")
@click.option("--score", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
              help="The same for measurements in a CSV file (table, model, gpus, context_tokens, ...).")  # fmt: skip
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=PRINT,
    metavar="[FILE]",
    help="Print JSON instead of a table, or write it to FILE.",
)
@click.option(
    "--csv",
    "csv_file",
    is_flag=False,
    flag_value=PRINT,
    metavar="[FILE]",
    help="Print CSV instead of a table, or write it to FILE.",
)
@plot_option
@click.option(
    "--plot-kind",
    type=click.Choice(["ttft", "slices"]),
    default="ttft",
    show_default=True,
    help="ttft: time to first token over ranks, with the lower bounds TTFT(p) and TTFT*(p); slices: as in the paper's "
    "Fig. 10.",
)
@click.option(
    "--fairkv",
    metavar="PROFILE",
    help="Instead, place the heads of a profile on --ranks: HeadKV's scores (.json), DuoAttention's gates (.tsv), "
    "token counts, or `paper` for synthetic profiles that match FairKV's Table 2.",
)
@click.option(
    "--copies",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    help="With --fairkv: number of copies of heads in each layer.",
)
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="With --fairkv: budget per head, in tokens.",
)
def simulate(**given: Any) -> None:
    """Forecast the time to first token for any model, hardware, number of ranks, prompt length and link.

    \b
    kvr simulate --model "Llama 3.1 8B 1M" --hardware h100-80gb --ranks 1,8,1024 --contexts 64k,1m
    kvr simulate --paper
    kvr simulate --fairkv profiles/heads.json --ranks 4,8
    """  # noqa: D301
    options = SimulateOptions(**given)
    check_writable(options.plot, *(file for file in (options.json_file, options.csv_file) if file != PRINT))
    if options.fairkv is not None:
        from kvr_mpi.cli.fairkv import simulate_fairkv

        ranks = parse_numbers("--ranks", options.ranks)
        simulate_fairkv(options.fairkv, ranks, options.copies, options.budget, options.json_file == PRINT)
        return
    if options.paper or options.score is not None:
        from kvr_mpi.costs.hardware import load_hardware
        from kvr_mpi.errors import ConfigError

        if options.plot is not None or (options.paper and options.score is not None):
            raise ConfigError("--paper, --score and --plot exclude each other: give only one")
        _score(options.score, load_hardware(options.hardware or "a100-80gb"), options.json_file, options.csv_file)
        return
    from kvr_mpi.schedule.simulate import look_out
    from kvr_mpi.schedule.simulate import simulate as forecast

    size, link = options.ranks_per_stage, options.link_gigabytes_per_s
    found = look_out(options.model, options.hardware, link, options.relay, _is_offline, size)
    work, profile, costs, relay = found.work, found.hardware, found.costs, found.relay
    contexts, ranks = parse_numbers("--contexts", options.contexts), parse_numbers("--ranks", options.ranks)
    if size > 1:
        _simulate_stages(options, found, contexts, ranks)
        return
    rows = forecast(work, costs, contexts, ranks, relay=relay, chunk_tokens=options.chunk_tokens)
    if options.plot is not None:
        from kvr_mpi.report.plots import plot_forecast, plot_slices

        title = f"{work.name} on {profile.name}, {costs.link_bytes_per_s / 1e9:g} GB/s"
        (plot_forecast if options.plot_kind == "ttft" else plot_slices)(
            [row.as_json() for row in rows], title, options.plot
        )
    if options.json_file is None and options.csv_file is None:
        _print_rows(rows, work, profile, costs, relay)
        return
    columns = [_columns(row) for row in rows]
    _write(options.json_file, options.csv_file, {"model": work.name, "hardware": profile.name, "relay": relay,
                                 "link_bytes_per_s": costs.link_bytes_per_s,
                                 "rows": [row.as_json() for row in rows]}, columns)  # fmt: skip


def _simulate_stages(options: SimulateOptions, found: Outlook, contexts: list[int], ranks: list[int]) -> None:
    """Print or write forecasts of chains of stages."""
    from dataclasses import asdict

    from kvr_mpi.errors import ConfigError
    from kvr_mpi.schedule.simulate import simulate_stages

    if options.plot is not None or options.chunk_tokens is not None:
        raise ConfigError("--ranks-per-stage cannot be combined with --plot or --chunk-tokens: leave one of them out")
    size = options.ranks_per_stage
    rows = simulate_stages(found, contexts, ranks, size)
    if options.json_file is not None or options.csv_file is not None:
        about = {"model": found.work.name, "hardware": found.hardware.name, "relay": found.relay}
        columns: list[dict[str, object]] = [asdict(row) for row in rows]
        _write(options.json_file, options.csv_file, about | {"rows": columns}, columns)
        return
    bytes_per_s, _ = found.hardware.stage_link(size)
    click.echo(f"{found.work.name} on {found.hardware.name} ({found.hardware.source})")
    click.echo(
        f"stages of {size} ranks, sums at {bytes_per_s / 1e9:g} GB/s; links between stages "
        f"{found.costs.link_bytes_per_s / 1e9:g} GB/s per rank; weights per rank {rows[0].weight_bytes / 1e9:.1f} GB"
    )
    click.echo("forecast time to first token in seconds: kvr-s and ring over stages; and, with as many ranks, tensor")
    click.echo("parallelism alone, and a ring of ranks that each hold the whole model\n")
    click.echo(
        f"{'tokens':>9}  {'ranks':>5}  {'stages':>8}  {'kvr-s':>8}  {'ring':>8}  {'tensor':>8}  {'ranks ring':>10}"
    )
    for row in rows:
        fits = row.whole_bytes <= row.memory_bytes
        times = "  ".join(f"{value:>8.4g}" for value in (row.kvr_s, row.ring_s, row.tensor_s))
        told = f"{row.ranks_ring_s:>10.4g}" + (
            "" if fits else f"  ({row.whole_bytes / 1e9:.0f} GB do not fit on one rank)"
        )
        click.echo(f"{row.context_tokens:>9}  {row.ranks:>5}  {f'{row.stages} x {size}':>8}  {times}  {told}")


def _is_offline() -> bool:
    from kvr_mpi.cli.environment import read_environment

    return read_environment().machine.offline


def _write(json_file: str | None, csv_file: str | None, found: Any, columns: list[dict[str, object]]) -> None:
    texts = []
    if json_file is not None:
        texts.append((json_file, json.dumps(found, indent=1) + "\n"))
    if csv_file is not None:
        file = io.StringIO()
        writer = csv.DictWriter(file, list(columns[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(columns)
        texts.append((csv_file, file.getvalue()))
    for name, text in texts:
        if name == PRINT:
            click.echo(text, nl=False)
            continue
        with writing(name):
            Path(name).write_text(text)


def _columns(row: ForecastRow) -> dict[str, object]:
    """Flatten a row."""
    from kvr_mpi.schedule.simulate import NAMES

    times = {f"{name.replace('-', '_')}_s": row.ttft_s.get(name) for name in NAMES}
    return {
        "context_tokens": row.context_tokens,
        "ranks": row.ranks,
        **times,
        "winner": row.winner,
        "auto": row.auto,
        "efficiency": row.efficiency,
        "bound_s": row.bound_s,
        "star_s": row.star_s,
        "slices": " ".join(map(str, row.slices)),
    }


def _print_rows(rows: list[ForecastRow], work: Workload, profile: Hardware, costs: Costs, relay: RelayKind) -> None:
    from kvr_mpi.schedule.simulate import NAMES

    click.echo(f"{work.name} on {profile.name} ({profile.source})")
    click.echo(f"links of {costs.link_bytes_per_s / 1e9:g} GB/s, {profile.attention} attention, chain by {relay}")
    click.echo("time to first token in seconds; efficiency: of kvr-s, 1 if p ranks are p times as fast as one;")
    click.echo('auto: the strategy that a job with parallel.strategy = "auto" uses\n')
    widths = {name: max(8, len(name)) for name in NAMES}
    auto = max(len("auto"), *(len(row.auto) for row in rows))
    names = "  ".join(f"{name:>{width}}" for name, width in widths.items())
    click.echo(f"   tokens  ranks  {names}  efficiency  {'auto':<{auto}}  winner")
    for row in rows:
        times = "  ".join(
            f"{f'{row.ttft_s[name]:.4g}' if name in row.ttft_s else '-':>{width}}" for name, width in widths.items()
        )
        click.echo(
            f"{row.context_tokens:>9}  {row.ranks:>5}  {times}  {row.efficiency:>10.2f}  {row.auto:<{auto}}  "
            f"{row.winner}"
        )


def _score(file: Path | None, hardware: Hardware, json_file: str | None, csv_file: str | None) -> None:
    from kvr_mpi.costs.paper import paper_cells, read_cells
    from kvr_mpi.costs.paper import score as score_cells

    found = score_cells(read_cells(file) if file is not None else paper_cells(), hardware)
    if json_file is not None or csv_file is not None:
        cells = found.as_json()
        _write(json_file, csv_file, cells, cells["cells"])
        return
    click.echo("table     model          GPUs  tokens  GB/s  method  measured  predicted   error")
    for cell, guess, error in zip(found.cells, found.predicted_s, found.errors, strict=True):
        click.echo(
            f"{cell.table:<9} {cell.model:<14} {cell.gpus:>4} {cell.context_tokens:>7} {cell.link_gb_per_s:>5g}  "
            f"{cell.method:<6} {cell.ttft_s:>7.3f} s  {guess:>7.3f} s  {100 * error:>+5.1f} %"
        )
    for name, spread, count in (
        ("time to first token", found.ttft, len(found.cells)),
        ("speed-up TSP / KVR-S", found.speedup, len(found.speedups)),
    ):
        figures = ", ".join(f"{key} {100 * value:.1f} %" for key, value in spread.figures()) or "nothing to compare"
        click.echo(f"\nrelative error of the {name} ({count}): {figures}", nl=False)
    click.echo()
