"""Forecasts of every strategy by prompt length and number of ranks, for tables and the paper's figures (8 to 11)."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.options import plot_option, printed_json_option
from benchmarks.plots import plot_forecast
from benchmarks.tables import write
from kvr_mpi.cli.environment import is_offline
from kvr_mpi.cli.options import command, parse_numbers
from kvr_mpi.costs.costmodel import RelayKind
from kvr_mpi.costs.hardware import Hardware
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.costs.workload import Workload
from kvr_mpi.schedule.simulate import NAMES, ForecastRow, look_out, simulate


@command("forecast")
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
@printed_json_option
@plot_option
def main(
    model: str,
    hardware: str | None,
    ranks: str,
    contexts: str,
    link_gigabytes_per_s: float | None,
    relay: RelayKind | None,
    chunk_tokens: int | None,
    json_file: str | None,
    plot: Path | None,
) -> None:
    """Forecast the time to first token for any model, hardware, number of ranks, prompt length and link.

    \b
    python -m benchmarks forecast --model "Llama 3.1 8B 1M" --hardware h100-80gb --ranks 1,8,1024 --contexts 64k,1m
    """  # noqa: D301
    found = look_out(model, hardware, link_gigabytes_per_s, relay, is_offline)
    work, profile, costs, chain = found.work, found.hardware, found.costs, found.relay
    lengths, sizes = parse_numbers("--contexts", contexts), parse_numbers("--ranks", ranks)
    rows = simulate(found, lengths, sizes, chunk_tokens)
    if plot is not None:
        title = f"{work.name} on {profile.name}, {costs.link_bytes_per_s / 1e9:g} GB/s"
        plot_forecast([row.as_json() for row in rows], title, plot)
    if json_file is None:
        _print_rows(rows, work, profile, costs, chain)
        return
    about = {"model": work.name, "hardware": profile.name, "relay": chain, "link_bytes_per_s": costs.link_bytes_per_s}
    write(json_file, {**about, "rows": [row.as_json() for row in rows]})


def _print_rows(rows: list[ForecastRow], work: Workload, profile: Hardware, costs: Costs, relay: RelayKind) -> None:
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
