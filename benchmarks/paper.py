"""The cost model against the measurements of the KV-Runahead paper."""

from __future__ import annotations

from dataclasses import asdict

import click

from benchmarks.options import printed_json_option
from benchmarks.paper_cells import paper_cells, score
from benchmarks.paper_model import paper_hardware
from benchmarks.tables import write
from kvr_mpi.cli.options import command


@command("paper")
@printed_json_option
def main(json_file: str | None) -> None:
    """Compare forecasts of the time to the first token with measurements.

    \b
    python -m benchmarks paper
    python -m benchmarks paper --json
    """  # noqa: D301
    found = score(paper_cells(), paper_hardware())
    if json_file is not None:
        write(json_file, found.as_json())
        return
    click.echo("table     model          GPUs  tokens  GB/s  method  measured  predicted   error")
    for cell, guess, error in zip(found.cells, found.predicted_s, found.errors, strict=True):
        click.echo(
            f"{cell.table:<9} {cell.model:<14} {cell.gpus:>4} {cell.context_tokens:>7} {cell.link_gb_per_s:>5g}  "
            f"{cell.method:<6} {cell.ttft_s:>7.3f} s  {guess:>7.3f} s  {100 * error:>+5.1f}%"
        )
    for name, spread, count in (
        ("time to first token", found.ttft, len(found.cells)),
        ("speed-up TSP / KVR-S", found.speedup, len(found.speedups)),
    ):
        figures = ", ".join(f"{key} {100 * value:.1f}%" for key, value in asdict(spread).items())
        click.echo(f"\nrelative error of the {name} ({count}): {figures}", nl=False)
    click.echo()
