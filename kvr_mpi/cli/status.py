"""``kvr status DIR``: how far a run is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvr_mpi.store.status import Status

SHOWN = 8  # running documents that are named


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all that is running.")
def status(folder: Path, as_json: bool) -> None:
    """Show what is done, failed, running and left in DIR, the output folder of a run, also while it runs.

    Reads the ledgers only; changes nothing.
    """
    from kvr_mpi.store.status import read_status

    found = read_status(folder)
    if as_json:
        click.echo(json.dumps(found.as_json()))
        return
    for name, text in _lines(found):
        click.echo(f"{name:9} {text}")


def _lines(found: Status) -> list[tuple[str, str]]:
    from datetime import datetime

    from kvr_mpi.report.table import printable

    total = "an unknown number of" if found.total is None else found.total
    state = "at work" if found.alive else "not at work"
    rows = [
        ("job", f"{state}: {found.owner or 'nobody known'} (number {found.session} in this folder)"),
        ("documents", f"{total}: {found.done} done, {found.failed} failed, {_or_unknown(found.left)} left"),
    ]
    for each in found.running[:SHOWN]:
        since = datetime.fromtimestamp(each.since_s).isoformat(" ", "seconds")
        rows.append(("running", f"{printable(each.id)} since {since} by rank {each.rank}"))
    if len(found.running) > SHOWN:
        rows.append(("", f"and {len(found.running) - SHOWN} more; --json has all"))
    if found.rate_per_h is not None:
        lately = "" if found.lately_per_h is None else f", lately {found.lately_per_h:.0f}"
        rows.append(("rate", f"{found.rate_per_h:.0f} documents/hour{lately}"))
    if found.eta_s is not None:
        end = datetime.fromtimestamp(datetime.now().timestamp() + found.eta_s).isoformat(" ", "minutes")
        rows.append(("ends", f"in about {found.eta_s / 3600:.1f} h, at {end}"))
    rows.append(("size", f"{found.size_bytes / 1e6:.1f} MB"))
    for what, names in (("damaged", found.damaged), ("missing", found.missing), ("unknown", found.unrecorded)):
        if names and not (what == "unknown" and found.alive):
            rows.append((what, f"{', '.join(names[:SHOWN])}{' ...' if len(names) > SHOWN else ''}: needs --resume"))
    return rows


def _or_unknown(count: int | None) -> str:
    return "an unknown number" if count is None else str(count)
