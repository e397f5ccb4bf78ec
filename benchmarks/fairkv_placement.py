"""What placing heads by their load gains, from profiles alone."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import placement as research
from benchmarks.paper_profiles import RANKS, TABLE_2, paper_profile
from kvr_mpi.cli.options import command, parse_numbers
from kvr_mpi.compress.head_profile import HeadProfile, read_profile
from kvr_mpi.fairkv import placement as place
from kvr_mpi.report.table import print_table

METHOD = (
    "E_sync: a step waits for the fullest rank in every layer (sum of means over sum of maxima); E: eq. 5, over all "
    "layers. Ratio: critical path of static placement (SHA) over that of this placement; of loads, not a speed-up."
)


@command("fairkv-placement")
@click.argument("profile")
@click.option("--ranks", default="1,2,4,8", show_default=True, help="Numbers of ranks, separated by commas.")
@click.option(
    "--copies",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    help="Number of copies of heads in each layer.",
)
@click.option("--budget", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens per head.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(profile: str, ranks: str, copies: int, budget: int, as_json: bool) -> None:
    """Place the heads of PROFILE on ranks in several ways, and print the efficiencies.

    PROFILE: HeadKV's scores (.json), DuoAttention's gates (.tsv), token counts (``kvr search --heads``), or ``paper``
    for synthetic profiles that match FairKV's Table 2.
    """
    sizes = parse_numbers("--ranks", ranks)
    if profile == "paper":
        _paper(copies, as_json)
        return
    found = read_profile(Path(profile), budget=budget)
    rows = [row for size in sizes for row in _rows(found, size, copies)]
    if as_json:
        click.echo(json.dumps({"source": found.source, "rows": rows}))
        return
    (layers, kv_heads), mean = found.counts.shape, found.counts.mean()
    click.echo(f"{found.source}; {layers} layers, {kv_heads} KV heads, {mean:.0f} tokens each on average")
    columns = ("ranks", "placement", "copies", "E_sync", "E", "ratio to SHA", "fullest / mean", "ms a layer")
    print_table(columns, [[_shown(row[name]) for name in row] for row in rows])
    click.echo(METHOD)


def _rows(profile: HeadProfile, ranks: int, copies: int) -> list[dict[str, Any]]:
    """Efficiencies of each placement, SHA first."""
    ways: dict[str, Any] = {
        "SHA": place.place_statically,
        "best effort": place.place_best_effort,
        "equal copies": partial(place.place_with_equal_copies, copies=copies),
        "in proportion": partial(research.place_with_copies, copies=copies),
        "in proportion, exact": partial(research.place_best_with_copies, copies=copies),
    }
    placed, took_ms = {}, {}
    for name, way in {**ways, "eq. 4 alone": None}.items():
        began = time.perf_counter()
        counts = profile.counts
        placed[name] = place.place_layers(counts, ranks, way) if way else research.place_by_total(counts, ranks)
        took_ms[name] = 1e3 * (time.perf_counter() - began) / len(counts)
    rows = []
    for name, layers in placed.items():
        totals = np.sum([layer.loads for layer in layers], axis=0)
        rows.append(
            {
                "ranks": ranks,
                "placement": name,
                "copies": max(layer.copies for layer in layers),
                "e_sync": place.sync_efficiency(layers),
                "e_total": research.total_efficiency(layers),
                "ratio": research.load_ratio(layers, placed["SHA"]),
                "memory": float(totals.max() / totals.mean()),
                "layer_ms": took_ms[name],
            }
        )
    return rows


def _paper(copies: int, as_json: bool) -> None:
    """Hold made-up profiles against Table 2, and say what copies in proportion gain on 8 ranks."""
    rows = []
    for model, (_, budgets) in TABLE_2.items():
        for budget in budgets:
            found = paper_profile(model, budget)
            best = {row["placement"]: row for row in _rows(found.profile, max(RANKS), copies)}
            rows.append(
                {
                    "model": model,
                    "budget": budget,
                    "table": [round(100 * each, 1) for each in found.target],
                    "made_up": [round(100 * each, 1) for each in found.utilization],
                    "equal": best["equal copies"]["e_sync"],
                    "proportion": best["in proportion"]["e_sync"],
                    "ratio": best["in proportion"]["ratio"],
                    "exact": best["in proportion, exact"]["e_sync"],
                    "exact_ratio": best["in proportion, exact"]["ratio"],
                }
            )
    if as_json:
        click.echo(json.dumps({"copies": copies, "rows": rows}))
        return
    columns = ("model", "budget", "Table 2, SHA on 2/4/8", "made up", "equal copies", "in proportion", "ratio", "exact")
    print_table([*columns, "ratio"], [[_shown(value) for value in row.values()] for row in rows])
    click.echo(
        f"{max(RANKS)} ranks, {copies} copies per layer. The profiles are synthetic, with the table's utilization."
    )
    click.echo(METHOD)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{each:.1f}" for each in value)
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
