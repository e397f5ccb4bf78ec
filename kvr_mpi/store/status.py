"""How far a run is, told from its ledgers and lock alone, also while it runs."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvr_mpi.errors import DataError
from kvr_mpi.store.ledger import BeginLine, Ledger
from kvr_mpi.store.lock import BEAT_S, is_alive, read_lock
from kvr_mpi.store.run import wanted_documents
from kvr_mpi.store.survey import Survey, survey

# What "lately" means for the rate.
LATELY_S = 600.0


@dataclass(frozen=True, slots=True)
class Running:
    """A document that was begun by the job at work and is not durable yet."""

    id: str
    rank: str  # name of the writer
    since_s: float  # Unix time


@dataclass(frozen=True, slots=True)
class Status:
    """Where a run stands.

    total : documents of the corpus, or of the share that the latest job is to do; None if the folder does not say.
    left : documents neither done nor failed, those running included.
    owner : who has, or last had, the folder.
    rate_per_h, lately_per_h : documents an hour made durable, since this job began and in the last `LATELY_S`.
    eta_s : seconds until nothing is left, at the later rate; None if that is not known.
    damaged, missing, unrecorded : files that need `--resume`.
    """

    folder: str
    alive: bool
    owner: str
    session: int
    total: int | None
    done: int
    failed: int
    left: int | None
    running: tuple[Running, ...]
    rate_per_h: float | None
    lately_per_h: float | None
    eta_s: float | None
    size_bytes: int
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    unrecorded: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def read_status(folder: Path, now_s: float | None = None) -> Status:
    """Read how far a run is; nothing is changed, and no file of results is opened.

    Raises
    ------
    DataError
        If there is no run in the folder.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected the output folder of a run")
    found, lock, wanted = survey(folder), read_lock(folder), wanted_documents(folder)
    if not found.sizes_bytes and lock is None and wanted is None and not found.ledger.shards:
        raise DataError(f"{folder}: no run there; expected the output folder of one")
    now = time.time() if now_s is None else now_s
    alive = is_alive(folder, 2.5 * BEAT_S)
    done, failed = found.documents()
    session = lock.number if lock else 0
    running = _running(found.ledger, session, done | failed) if alive else ()
    since = lock.since_s if lock else 0.0
    overall = _rate(found, since, now if alive else _newest(found))
    lately = _rate(found, max(since, now - LATELY_S), now) if alive else None
    left = None if wanted is None else len(set(wanted) - done - failed)
    rate = lately or overall
    eta = 3600 * left / rate if alive and left is not None and rate else None
    return Status(
        folder=str(folder),
        alive=alive,
        owner=str(lock.owner) if lock and lock.owner else "",
        session=session,
        total=None if wanted is None else len(wanted),
        done=len(done),
        failed=len(failed),
        left=left,
        running=running,
        rate_per_h=overall,
        lately_per_h=lately,
        eta_s=eta,
        size_bytes=sum(found.sizes_bytes.values()),
        damaged=tuple(sorted(found.damaged)),
        missing=tuple(sorted(found.missing())),
        unrecorded=tuple(found.unrecorded),
    )


def _running(ledger: Ledger, session: int, finished: set[str]) -> tuple[Running, ...]:
    newest: dict[str, tuple[str, BeginLine]] = {}
    for writer, lines in ledger.begun.items():
        for line in lines:
            if line.session == session:
                newest.update((name, (writer, line)) for name in line.begun if name not in finished)
    found = [Running(name, writer, line.at_s) for name, (writer, line) in newest.items()]
    return tuple(sorted(found, key=lambda each: (each.since_s, each.id)))


def _rate(found: Survey, start_s: float, end_s: float) -> float | None:
    """Documents an hour that became durable in a span of time; None if there were none, or the clock jumped."""
    count = sum(
        len(line.done) + len(line.failed)
        for name, line in found.sound.items()
        if name.startswith("shard-") and start_s <= line.at_s <= end_s
    )
    return 3600 * count / (end_s - start_s) if count and end_s > start_s else None


def _newest(found: Survey) -> float:
    return max((line.at_s for line in found.sound.values()), default=0.0)
