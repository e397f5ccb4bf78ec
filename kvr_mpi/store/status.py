"""The progress of a run from its logs, its lock and its ranks' states, even while it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvr_mpi.disk import VOLUME_NAME, final_name, is_folder, names_in
from kvr_mpi.errors import DataError, MissingError
from kvr_mpi.store.lock import BEAT_S, is_alive, read_lock
from kvr_mpi.store.results import Results, look
from kvr_mpi.store.run import read_run_file
from kvr_mpi.store.states import RankState, read_states, silent_ranks
from kvr_mpi.store.summary import count_reasons

T = TypeVar("T", int, float)

# Interval of the recent rate.
LATELY_S = 600.0
WATCHERS = 32


@dataclass(frozen=True, slots=True)
class Status:
    """The progress of a run.

    total : documents of the corpus, or of the latest job's share; None if not known.
    left : documents neither done nor failed.
    owner : process that holds, or last held, the folder.
    killed : whether that process ended without reporting it.
    rate_per_h, lately_per_h : documents answered per hour, since this job's ranks began, and in the last `LATELY_S`;
        if no job is running, `rate_per_h` covers all jobs of the run.
    eta_s : seconds until all documents are finished, as the job's log estimates them, or, if its ranks' states cannot
        be read, at the recent rate; None if not known yet.
    damaged, missing : files that need `--resume`.
    unfinished : volumes that the job is writing, or was writing when it ended.
    reasons : number of failed documents by reason, the most frequent first.
    ranks : states of the running job's ranks; empty for several runs.
    silent : ranks that have stopped updating their state.
    """

    folder: str
    alive: bool
    owner: str
    session: int
    total: int | None
    done: int
    failed: int
    left: int | None
    rate_per_h: float | None
    lately_per_h: float | None
    eta_s: float | None
    size_bytes: int
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    unfinished: tuple[str, ...]
    reasons: dict[str, int]
    ranks: tuple[RankState, ...] = ()
    silent: tuple[int, ...] = ()
    killed: bool = False


def read_status(folder: Path, now_s: float | None = None) -> Status:
    """Read the progress of a run, without changing anything; raises `DataError` if there is no run in the folder."""
    if not is_folder(folder):
        raise MissingError(f"{folder}: folder not found; expected the output folder of a run")
    found, lock, run = look(folder), read_lock(folder), read_run_file(folder)
    if not found.sizes_bytes and lock is None and run is None:
        if not names_in(folder):
            raise DataError(f"{folder} is empty; a job that has just begun loads its model first")
        raise DataError(f"{folder}: not a run; expected the output folder of a run")
    volumes = {name for name in names_in(folder) if VOLUME_NAME.fullmatch(final_name(name))}
    now = time.time() if now_s is None else now_s
    alive = is_alive(folder, 2.5 * BEAT_S)
    results, total = Results.of(found), None if run is None else run.documents
    answering_s = results.cost.answering_s
    left = None if run is None else run.left(results.places)
    if run is not None and run.gone:  # their results are kept
        results = replace(results, places=results.places.without(run.gone))
    summary, times = results.summary(), results.places.finished_s()
    session = lock.number if lock else 0
    ranks = read_states(folder, session) if alive else ()
    since = min((rank.began_s for rank in ranks), default=lock.since_s if lock else 0.0)
    overall = _rate(times, since, now) if alive else 3600 * len(times) / answering_s if answering_s else None
    lately = _rate(times, max(since, now - LATELY_S), now) if alive else None
    rate = lately or overall
    eta = 3600 * left / rate if alive and left is not None and rate else None
    if ranks and left:
        latest = max(ranks, key=lambda rank: rank.estimated_s)
        eta = None if latest.ends_s is None else max(0.0, latest.ends_s - now)
    return Status(
        folder=str(folder),
        alive=alive,
        owner=str(lock.owner) if lock and lock.owner else "",
        session=session,
        total=total,
        done=summary.done,
        failed=summary.failed,
        left=left,
        rate_per_h=overall,
        lately_per_h=lately,
        eta_s=eta,
        size_bytes=sum(found.sizes_bytes.values()),
        damaged=tuple(sorted(found.damaged)),
        missing=tuple(found.missing),
        unfinished=tuple(sorted(volumes - found.volumes.keys())),
        reasons=summary.reasons,
        ranks=ranks,
        silent=silent_ranks(ranks),
        killed=lock is not None and not (alive or lock.released),
    )


def read_all(folders: Sequence[Path]) -> list[Status]:
    """Read the progress of several runs; those running on other machines are watched in parallel."""
    with ThreadPoolExecutor(WATCHERS) as pool:
        return list(pool.map(read_status, folders))


def add_up(found: Sequence[Status]) -> Status:
    """Combine the status of the shares of a corpus; the ETA is the latest of the shares'."""
    etas = [one.eta_s for one in found if one.left]
    return Status(
        folder=os.path.commonpath([os.path.abspath(one.folder) for one in found]),
        alive=any(one.alive for one in found),
        owner="",
        session=0,
        total=_sum(one.total for one in found),
        done=sum(one.done for one in found),
        failed=sum(one.failed for one in found),
        left=_sum(one.left for one in found),
        rate_per_h=_sum(one.rate_per_h for one in found if one.alive),
        lately_per_h=_sum(one.lately_per_h for one in found if one.alive),
        eta_s=None if None in etas else max((eta for eta in etas if eta is not None), default=None),
        size_bytes=sum(one.size_bytes for one in found),
        damaged=tuple(f"{one.folder}/{name}" for one in found for name in one.damaged),
        missing=tuple(f"{one.folder}/{name}" for one in found for name in one.missing),
        unfinished=tuple(f"{one.folder}/{name}" for one in found for name in one.unfinished),
        reasons=count_reasons(("", why, count) for one in found for why, count in one.reasons.items()),
    )


def _sum(values: Iterable[T | None]) -> T | None:
    """Return the sum of values; None if any is unknown, or if there are none."""
    known = list(values)
    return None if not known or None in known else cast("T", sum(filter(None, known)))


def _rate(times: npt.NDArray[np.float64], start_s: float, end_s: float) -> float | None:
    """Return documents per hour in an interval; None if there were none, or if the clock was set back."""
    count = int(((start_s <= times) & (times <= end_s)).sum())
    return 3600 * count / (end_s - start_s) if count and end_s > start_s else None
