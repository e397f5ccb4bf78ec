"""``kvr status DIR``: the progress of a run."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvr_mpi.cli.options import command
from kvr_mpi.duration import duration_text, parse_duration
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK, counted

if TYPE_CHECKING:
    from kvr_mpi.store.status import Status

SHOWN = 8  # maximum number of ranks or files to list


@command()
@click.argument("folders", type=click.Path(path_type=Path), metavar="DIR...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all details.")
@click.option(
    "--watch",
    "every",
    is_flag=False,
    flag_value="5s",
    metavar="[TIME]",
    help="Refresh every TIME (default: 5s) until the job ends; with --json, print one line each time.",
)
def status(folders: tuple[Path, ...], as_json: bool, every: str | None) -> int:
    """Show the finished, failed and remaining documents in DIR, the output folder of a run.

    While a job is running, the command also shows what each rank is doing and for how long, and marks ranks that have
    stopped reporting as SILENT. Several folders, or a folder of such folders (the shares of an array), get one line
    each and a total; missing shares are listed. The exit code is 65 if no job is running and files are damaged or
    missing.
    """
    every_s = None if every is None else max(1.0, parse_duration(every, plain="s"))
    found = _show_status(folders, as_json)
    while every_s is not None and found.alive:
        time.sleep(every_s)
        if not as_json:  # a terminal is cleared, a file gets a blank line
            click.clear() if sys.stdout.isatty() else click.echo()
        found = _show_status(folders, as_json)
    return EXIT_BAD_DATA if not found.alive and (found.damaged or found.missing) else EXIT_OK


def _show_status(folders: tuple[Path, ...], as_json: bool) -> Status:
    """Print and return the progress of runs."""
    from kvr_mpi.store.parts import find_runs
    from kvr_mpi.store.status import add_up, read_all

    runs, missing = find_runs(folders)
    found = read_all(runs)
    if runs == folders[:1]:
        click.echo(json.dumps(asdict(found[0]))) if as_json else _show(_lines(found[0]))
        return found[0]
    whole = add_up(found)
    if as_json:
        click.echo(json.dumps({**asdict(whole), "missing": missing, "folders": list(map(asdict, found))}))
        return whole
    for one in found:
        silent = f", {counted(len(one.silent), 'rank')} SILENT" if one.silent else ""
        click.echo(f"{one.folder}: {'running' if one.alive else 'not running'}, {_documents(one)}{silent}")
    _show(
        [
            ("\nall", f"{len(found)} folders, {sum(one.alive for one in found)} with a running job"),
            *_counts(whole),
            *(("missing", line) for line in missing),
        ]
    )
    return whole


def _show(rows: list[tuple[str, str]]) -> None:
    for name, text in rows:
        click.echo(f"{name:9} {text}")


def _lines(found: Status) -> list[tuple[str, str]]:
    from datetime import datetime

    from kvr_mpi.errors import printable
    from kvr_mpi.report.style import bytes_text
    from kvr_mpi.store.lock import WHY_KILLED

    work = "running" if found.alive else "killed or crashed" if found.killed else "not running"
    why = f": {WHY_KILLED}" if found.killed else ""
    rows = [
        ("state", _state(found)),
        ("job", f"{work}: {found.owner or 'owner unknown'} (job {found.session} in this folder){why}"),
        *_counts(found),
    ]
    rows += _rank_lines(found)
    if found.rate_per_h is not None:
        lately = "" if found.lately_per_h is None else f", recently {found.lately_per_h:,.0f}"
        rows.append(("rate", f"{found.rate_per_h:,.0f} documents per hour{lately}"))
    if found.eta_s is not None:
        end = datetime.fromtimestamp(datetime.now().timestamp() + found.eta_s).isoformat(" ", "minutes")
        rows.append(("ETA", f"in about {duration_text(found.eta_s)}, at {end}"))
    rows.append(("size", bytes_text(found.size_bytes)))
    for what, names in (("damaged", found.damaged), ("missing", found.missing)):
        if names:
            some = printable(", ".join(names[:SHOWN]))
            rows.append((what, f"{some}{' ...' if len(names) > SHOWN else ''}; resume the job to recompute them"))
    return rows


def _rank_lines(found: Status) -> list[tuple[str, str]]:
    """Describe the ranks' states, silent ones first, then tokens per second and the time left."""
    if not found.ranks:
        return []
    from collections import Counter

    from kvr_mpi.errors import printable
    from kvr_mpi.topology import rank_name

    newest, states = max(each.written_at_s for each in found.ranks), {each.rank: each for each in found.ranks}
    doing = Counter(each.doing for each in found.ranks if each.rank not in found.silent)
    counts = [f"{count} {printable(name)}" for name, count in doing.most_common()]
    rows = [("ranks", ", ".join([*counts, *([f"{len(found.silent)} SILENT"] if found.silent else [])]))]
    order = sorted({*states, *found.silent}, key=lambda rank: (rank not in found.silent, rank))
    for rank in order[:SHOWN]:
        state = states.get(rank)
        if state is None:
            what = "SILENT: no report since the job started"
        else:
            what = f"{state.doing} {state.what}".strip() + f", {duration_text(state.for_s)}, on {state.host}"
            if rank in found.silent:
                gone = duration_text(newest - state.written_at_s)
                what = f"SILENT for {gone}: its process has died or hangs; last seen {what}"
        rows.append((rank_name(rank, found.ranks[0].tensor_parallel), printable(what)))
    if len(order) > SHOWN:
        rows.append(("", f"and {len(order) - SHOWN} more; --json lists all"))
    seconds = newest - min(each.began_s for each in found.ranks)
    counting = [one for one in found.ranks if one.is_first_of_group]
    prompt, new = sum(one.prompt_tokens for one in counting), sum(one.new_tokens for one in counting)
    if prefilled := sum(one.prefilled for one in counting):
        rows.append(("prefilled", f"{counted(prefilled, 'prompt')} since this job started; answers follow in waves"))
    if seconds > 0 and prompt:
        rows.append(
            (
                "tokens",
                f"{prompt / seconds:,.0f} prompt and {new / seconds:,.1f} answer tokens/s (finished documents)",
            )
        )
    deadlines = [each.deadline_s for each in found.ranks if each.deadline_s is not None]
    if deadlines:
        rows.append(("time", f"{duration_text(min(deadlines) - newest)} left until the end of the batch job"))
    return rows


def _state(found: Status) -> str:
    """Describe the state of the run, and what the user can do."""
    failures = f", {found.failed:,} failed (retry them with --retry-failed)" if found.failed else ""
    if found.damaged or found.missing:
        return "files are damaged or missing; kvr-run --resume processes their documents again"
    if found.alive:
        return "running"
    if found.left == 0:
        return f"finished{failures}"
    if found.left is None:
        return "not running, remaining work unknown; kvr-run --resume continues"
    return f"incomplete, not running; the same kvr-run command with --resume continues{failures}"


def _documents(found: Status) -> str:
    is_known = found.total is not None and found.left is not None
    total = f"{found.left:,} of {found.total:,} remaining" if is_known else "total unknown"
    return f"{found.done:,} done, {found.failed:,} failed, {total}"


def _counts(found: Status) -> list[tuple[str, str]]:
    from kvr_mpi.report.table import reason_lines

    return [("documents", _documents(found)), *(("failed", line) for line in reason_lines(found.reasons))]
