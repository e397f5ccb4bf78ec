"""Forecasts of every strategy by prompt length and number of ranks, as in the paper's figures 8 to 11."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.equations import ttft_star
from benchmarks.options import plot_option, printed_json_option
from benchmarks.plots import plot_forecast
from benchmarks.published import ring_seconds, tsp_seconds
from benchmarks.tables import write
from kvr_mpi.cli.environment import is_offline
from kvr_mpi.cli.options import command, parse_numbers
from kvr_mpi.costs.costmodel import best_split, chain_seconds, equal_time_lengths, single_seconds
from kvr_mpi.costs.hardware import Hardware
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.costs.workload import Workload
from kvr_mpi.schedule.simulate import check_lengths, costs_on

# Strategies of a forecast; kvr-e has even slices, and kvr-s the best that were found.
NAMES = ("single", "tsp-dense", "tsp-causal", "ring", "kvr-e", "kvr-s")


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """The forecast for one prompt length and one number of ranks.

    ttft_s : seconds to the first token by strategy; other methods as published (``single`` uses one rank).
    slices : slice bounds of kvr-s in tokens.
    efficiency : parallel efficiency of kvr-s; 1 if p ranks are p times as fast as one.
    bound_s : TTFT(p), kvr-s without communication; star_s : TTFT*(p), eq. 3.
    """

    context_tokens: int
    ranks: int
    ttft_s: dict[str, float]
    slices: tuple[int, ...]
    efficiency: float
    bound_s: float
    star_s: float

    @property
    def winner(self) -> str:
        """The fastest strategy; of equally fast ones, the simplest."""
        return min(self.ttft_s, key=lambda name: self.ttft_s[name])

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"winner": self.winner}


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
    chunk_tokens: int | None,
    json_file: str | None,
    plot: Path | None,
) -> None:
    """Forecast the time to first token for any model, hardware, number of ranks, prompt length and link.

    \b
    python -m benchmarks forecast --model "Llama 3.1 8B 1M" --hardware h100-80gb --ranks 1,8,1024 --contexts 64k,1m
    """  # noqa: D301
    work, profile, costs = costs_on(model, hardware, link_gigabytes_per_s, is_offline)
    lengths, sizes = parse_numbers("--contexts", contexts), parse_numbers("--ranks", ranks)
    check_lengths(work, lengths, sizes)
    rows = [_row(costs, tokens, size, chunk_tokens) for tokens in lengths for size in sizes]
    if plot is not None:
        title = f"{work.name} on {profile.name}, {costs.link_bytes_per_s / 1e9:g} GB/s"
        plot_forecast([row.as_json() for row in rows], title, plot)
    if json_file is None:
        _print_rows(rows, work, profile, costs)
        return
    about = {"model": work.name, "hardware": profile.name, "link_bytes_per_s": costs.link_bytes_per_s}
    write(json_file, {**about, "rows": [row.as_json() for row in rows]})


def _row(costs: Costs, tokens: int, ranks: int, chunk_tokens: int | None) -> ForecastRow:
    chunks = 1 if chunk_tokens is None else -(-tokens // (ranks * chunk_tokens))  # for the mean slice
    of_chain = costs.in_chunks(chunks)
    partition, searched_s = best_split(of_chain, tokens, ranks)
    single_s = single_seconds(costs, tokens)
    times_s = (
        single_s,
        tsp_seconds(costs, tokens, ranks),
        tsp_seconds(costs, tokens, ranks, dense=False),
        ring_seconds(costs, tokens, ranks),
        chain_seconds(of_chain, _evenly(tokens, ranks)),
        searched_s,
    )
    ttft_s = dict(zip(NAMES, times_s, strict=True)) if ranks > 1 else {"single": single_s}
    return ForecastRow(
        context_tokens=tokens,
        ranks=ranks,
        ttft_s=ttft_s,
        slices=partition.bounds,
        efficiency=single_s / ranks / searched_s,
        bound_s=lower_bound_seconds(costs, tokens, ranks),
        star_s=ttft_star(single_s, ranks),
    )


def lower_bound_seconds(costs: Costs, tokens: float, ranks: int) -> float:
    """Lower bound for any split: computation is divided equally, and no rank waits.

    The paper's TTFT(p) (section 5, Fig. 8 d): KV-Runahead without any communication. In a chain the last layer does not
    count, since ranks before the last compute only keys and values there.
    """
    first = equal_time_lengths(costs, tokens, ranks)[0]
    layer_s = first * (costs.token_s + first * costs.pair_s / 2) / (costs.speeds or (1.0,))[0]
    layers = costs.layers - (ranks > 1)
    return max(layers * layer_s, costs.layers * costs.launch_floor_s)


def _evenly(tokens: int, slices: int) -> Sequence[float]:
    return [tokens / slices] * slices


def _print_rows(rows: list[ForecastRow], work: Workload, profile: Hardware, costs: Costs) -> None:
    click.echo(f"{work.name} on {profile.name} ({profile.source})")
    click.echo(f"links of {costs.link_bytes_per_s / 1e9:g} GB/s")
    click.echo("time to first token in seconds; efficiency: of kvr-s, 1 if p ranks are p times as fast as one\n")
    widths = {name: max(8, len(name)) for name in NAMES}
    names = "  ".join(f"{name:>{width}}" for name, width in widths.items())
    click.echo(f"   tokens  ranks  {names}  efficiency  winner")
    for row in rows:
        times = "  ".join(
            f"{f'{row.ttft_s[name]:.4g}' if name in row.ttft_s else '-':>{width}}" for name, width in widths.items()
        )
        click.echo(f"{row.context_tokens:>9}  {row.ranks:>5}  {times}  {row.efficiency:>10.2f}  {row.winner}")
