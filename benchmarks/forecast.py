"""Forecasts of every strategy by prompt length and number of ranks, for tables and the paper's figures (8 to 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.options import plot_option, printed_options
from benchmarks.plots import plot_forecast, plot_slices
from benchmarks.tables import write
from kvr_mpi.cli.environment import is_offline
from kvr_mpi.cli.options import command, parse_numbers
from kvr_mpi.costs.costmodel import RelayKind, best_split, ring_seconds, single_seconds
from kvr_mpi.costs.hardware import Hardware
from kvr_mpi.costs.layer_costs import Costs, costs_of
from kvr_mpi.costs.workload import Workload, check_heads
from kvr_mpi.errors import ConfigError
from kvr_mpi.schedule.simulate import NAMES, ForecastRow, Outlook, check_contexts, look_out, simulate


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One prompt length on ranks in tensor-parallel groups of a chain, beside what else so many ranks could do.

    groups, tensor_parallel : of the chain.
    kvr_s : seconds to its first token, with the best slices.
    ring_s : of zigzag ring attention over the same groups.
    tensor_s : of tensor parallelism alone, over all ranks.
    ranks_ring_s : of zigzag ring attention over all ranks, each with the whole model.
    weight_bytes, whole_bytes : of weights a rank of a group has, and of the whole model.
    memory_bytes : a rank's.
    """

    context_tokens: int
    groups: int
    tensor_parallel: int
    kvr_s: float
    ring_s: float
    tensor_s: float
    ranks_ring_s: float
    weight_bytes: float
    whole_bytes: float
    memory_bytes: float

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.groups * self.tensor_parallel


def simulate_groups(
    found: Outlook, contexts: Sequence[int], ranks: Sequence[int], tensor_parallel: int, *, quantum: int = 64
) -> list[GroupRow]:
    """Forecast chains of groups beside tensor parallelism alone and rings, on as many ranks.

    Parameters
    ----------
    found : Outlook
        Of the model on ranks that are one of these groups each.

    Raises
    ------
    ConfigError
        If groups do not divide the ranks, or the model's heads, or a context is beyond the model's.
    """
    work, hardware, link = found.work, found.hardware, found.costs.link_bytes_per_s
    check_heads(work, tensor_parallel)
    for count in ranks:
        if count % tensor_parallel:
            raise ConfigError(
                f"{count} ranks cannot be divided into tensor-parallel groups of {tensor_parallel}; choose a multiple"
            )
    check_contexts(work, contexts, max(ranks))
    whole = costs_of(work, hardware, link_bytes_per_s=link)
    rows = []
    for tokens in contexts:
        for count in ranks:
            groups = count // tensor_parallel
            together = costs_of(work, hardware, link_bytes_per_s=link, tensor_parallel=count)
            rows.append(
                GroupRow(
                    context_tokens=tokens,
                    groups=groups,
                    tensor_parallel=tensor_parallel,
                    kvr_s=best_split(found.costs, tokens, groups, found.relay, quantum)[1],
                    ring_s=ring_seconds(found.costs, tokens, groups),
                    tensor_s=single_seconds(together, tokens),
                    ranks_ring_s=ring_seconds(whole, tokens, count),
                    weight_bytes=work.of_group(tensor_parallel).weight_bytes,
                    whole_bytes=work.weight_bytes,
                    memory_bytes=hardware.memory_bytes,
                )
            )
    return rows


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
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Forecast chains of tensor-parallel groups instead, each of this many ranks; compared with tensor "
    "parallelism alone and with rings.",
)
@printed_options
@plot_option
@click.option(
    "--plot-kind",
    type=click.Choice(["ttft", "slices"]),
    default="ttft",
    show_default=True,
    help="ttft: time to first token over ranks, with the lower bounds TTFT(p) and TTFT*(p); slices: as in the paper's "
    "Fig. 10.",
)
def main(
    model: str,
    hardware: str | None,
    ranks: str,
    contexts: str,
    link_gigabytes_per_s: float | None,
    relay: RelayKind | None,
    chunk_tokens: int | None,
    tensor_parallel: int,
    json_file: str | None,
    csv_file: str | None,
    plot: Path | None,
    plot_kind: str,
) -> None:
    """Forecast the time to first token for any model, hardware, number of ranks, prompt length and link.

    \b
    python -m benchmarks forecast --model "Llama 3.1 8B 1M" --hardware h100-80gb --ranks 1,8,1024 --contexts 64k,1m
    """  # noqa: D301
    found = look_out(model, hardware, link_gigabytes_per_s, relay, is_offline, tensor_parallel)
    work, profile, costs, chain = found.work, found.hardware, found.costs, found.relay
    lengths, sizes = parse_numbers("--contexts", contexts), parse_numbers("--ranks", ranks)
    if tensor_parallel > 1:
        if plot is not None or chunk_tokens is not None:
            raise ConfigError(
                "--tensor-parallel cannot be combined with --plot or --chunk-tokens: leave one of them out"
            )
        _forecast_groups(found, lengths, sizes, tensor_parallel, json_file, csv_file)
        return
    rows = simulate(found, lengths, sizes, chunk_tokens)
    if plot is not None:
        title = f"{work.name} on {profile.name}, {costs.link_bytes_per_s / 1e9:g} GB/s"
        (plot_forecast if plot_kind == "ttft" else plot_slices)([row.as_json() for row in rows], title, plot)
    if json_file is None and csv_file is None:
        _print_rows(rows, work, profile, costs, chain)
        return
    about = {"model": work.name, "hardware": profile.name, "relay": chain, "link_bytes_per_s": costs.link_bytes_per_s}
    columns = [_columns(row) for row in rows]
    write(json_file, csv_file, {**about, "rows": [row.as_json() for row in rows]}, columns)


def _forecast_groups(
    found: Outlook, contexts: list[int], ranks: list[int], size: int, json_file: str | None, csv_file: str | None
) -> None:
    """Print or write forecasts of chains of groups."""
    rows = simulate_groups(found, contexts, ranks, size)
    if json_file is not None or csv_file is not None:
        about = {"model": found.work.name, "hardware": found.hardware.name, "relay": found.relay}
        columns: list[dict[str, object]] = [asdict(row) for row in rows]
        write(json_file, csv_file, about | {"rows": columns}, columns)
        return
    bytes_per_s, _ = found.hardware.group_link(size)
    click.echo(f"{found.work.name} on {found.hardware.name} ({found.hardware.source})")
    click.echo(
        f"tensor-parallel groups of {size} ranks, sums at {bytes_per_s / 1e9:g} GB/s; links between groups "
        f"{found.costs.link_bytes_per_s / 1e9:g} GB/s per rank; weights per rank {rows[0].weight_bytes / 1e9:.1f} GB"
    )
    click.echo("forecast time to first token in seconds: kvr-s and ring over groups; and, with as many ranks, tensor")
    click.echo("parallelism alone, and a ring of ranks that each hold the whole model\n")
    click.echo(
        f"{'tokens':>9}  {'ranks':>5}  {'groups':>8}  {'kvr-s':>8}  {'ring':>8}  {'tensor':>8}  {'ranks ring':>10}"
    )
    for row in rows:
        fits = row.whole_bytes <= row.memory_bytes
        times = "  ".join(f"{value:>8.4g}" for value in (row.kvr_s, row.ring_s, row.tensor_s))
        told = f"{row.ranks_ring_s:>10.4g}" + (
            "" if fits else f"  ({row.whole_bytes / 1e9:.0f} GB do not fit on one rank)"
        )
        click.echo(f"{row.context_tokens:>9}  {row.ranks:>5}  {f'{row.groups} x {size}':>8}  {times}  {told}")


def _columns(row: ForecastRow) -> dict[str, object]:
    """Flatten a row."""
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
