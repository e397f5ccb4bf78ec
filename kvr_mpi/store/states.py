"""The state of each rank of a running job, in one file per rank in the run's folder ``states``.

    SESSION-RANK.json     a JSON object (`RankState`) of constant length, rewritten in place

A thread of each rank writes the rank's own file every few seconds, without communication between ranks. A rank whose
process has died or hangs is recognised because its time stamp falls behind the others'. The files are deleted when a
job ends; the files of a killed job stay until the next job.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from kvr_mpi.disk import create_rank_file, rank_file, rank_files, read_regular
from kvr_mpi.events import STARTING, Events
from kvr_mpi.logs import RankLogger
from kvr_mpi.plain import Count, UnixTime, read_plain
from kvr_mpi.topology import place_in_group, rank_name

STATES = "states"
STATE_BYTES = 4096  # constant, so that rewriting needs no space on a full disk
NAME_CHARS = 200  # longest part of a document's name that is stored
# Interval between a rank's writes; longer with many ranks, to limit all writes per second on the file system.
EVERY_S = 5.0
WRITES_PER_S = 50
# A rank is silent if its stamp is this many writes and seconds behind the newest; the hosts' clocks may differ.
SILENT_WRITES, SILENT_S = 3, 20.0
ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank; times are Unix times of its own clock.

    doing, what, since_s : activity such as ``prefilling``, its document, and when it began.
    prompt_tokens, new_tokens : of the documents that the rank has answered since it started.
    prefilled : prompts whose answers the rank has begun since it started.
    ends_s, estimated_s : when all documents will be finished, by the rank's latest line in the log, and when it
        estimated that; None: not known.
    deadline_s : when the batch system ends the job; None: not known.
    every_s : interval between writes.
    tensor_parallel : of the job; see `topology.rank_name`.
    """

    rank: Count
    size: Annotated[int, Field(ge=1, le=1 << 20)]
    session: Count
    host: str
    began_s: UnixTime
    doing: str
    since_s: UnixTime
    deadline_s: UnixTime | None
    every_s: Annotated[float, Field(gt=0, lt=1e6)]
    written_at_s: UnixTime
    what: str = ""
    prompt_tokens: Count = 0
    new_tokens: Count = 0
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    prefilled: Count = 0
    ends_s: UnixTime | None = None
    estimated_s: UnixTime = 0.0

    @property
    def name(self) -> str:
        """Name of the rank."""
        return rank_name(self.rank, self.tensor_parallel)

    @property
    def is_first_of_group(self) -> bool:
        """Whether this rank's counts include those of its tensor-parallel group."""
        return place_in_group(self.rank, self.tensor_parallel)[1] == 0

    @property
    def for_s(self) -> float:
        """Seconds since the state changed."""
        return max(0.0, self.written_at_s - self.since_s)


class StateWriter:
    """Updates this rank's file with the activity and the totals of its events, from a thread until it is closed.

    A write error is logged once, and the job continues without the file. `session` is the number of this job in the
    folder, `deadline_s` the Unix time at which the batch system ends it.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        session: int,
        deadline_s: float | None,
        logger: RankLogger,
        tensor_parallel: int = 1,
        events: Events | None = None,
    ) -> None:
        self._logger, now = logger, time.time()
        self._events = Events() if events is None else events
        self._state = RankState(
            rank,
            size,
            session,
            socket.gethostname(),
            began_s=now,
            doing=STARTING,
            since_s=now,
            deadline_s=deadline_s,
            every_s=max(EVERY_S, size / WRITES_PER_S),
            written_at_s=now,
            tensor_parallel=tensor_parallel,
        )
        self._closed = threading.Event()
        self._handle: int | None = None
        try:
            self._handle = create_rank_file(folder / STATES, session, rank)
        except OSError as error:
            logger.warning(f"kvr status will not show this rank: {folder / STATES}: {error.strerror or error}")
            return
        self._write()
        self._thread = threading.Thread(target=self._run, daemon=True, name="state")
        self._thread.start()

    def estimate(self, ends_s: float | None) -> None:
        """Set when all documents will be finished."""
        self._state = replace(self._state, ends_s=ends_s, estimated_s=time.time())

    def close(self) -> None:
        """Record that the rank has ended; the file stays, so that the rank is not reported as silent."""
        if self._handle is None:
            return
        self._closed.set()
        self._thread.join()
        self._events.begin(ENDED)
        self._write()
        with contextlib.suppress(OSError):  # it is closed all the same
            os.close(self._handle)
        self._handle = None

    def _run(self) -> None:
        while not self._closed.wait(self._state.every_s):
            self._write()

    def _write(self) -> None:
        assert self._handle is not None
        events, totals = self._events, self._events.totals
        state = replace(
            self._state,
            doing=events.doing,
            what=events.what[:NAME_CHARS],
            since_s=events.since_s,
            prompt_tokens=totals.prompt_tokens,
            new_tokens=totals.new_tokens,
            prefilled=totals.prefilled,
            written_at_s=time.time(),
        )
        try:
            os.pwrite(self._handle, json.dumps(asdict(state)).encode().ljust(STATE_BYTES - 1) + b"\n", 0)
            os.fsync(self._handle)  # on a network file system other nodes see it only then
        except OSError as error:
            if not self._closed.is_set():
                self._closed.set()
                self._logger.warning(f"kvr status no longer shows this rank: {error.strerror or error}")


def read_states(folder: Path, session: int) -> tuple[RankState, ...]:
    """Read the states of a job's ranks; unreadable files are left out."""
    found = [_read_state(path, session) for of, path in rank_files(folder / STATES) if of == session]
    return tuple(state for state in found if state is not None)


def silent_ranks(states: Sequence[RankState]) -> tuple[int, ...]:
    """Return the ranks whose state is missing, or older than the newest one; the reader's clock does not count."""
    if not states:
        return ()
    newest = max(state.written_at_s for state in states)
    heard = {
        state.rank
        for state in states
        if state.doing == ENDED or newest - state.written_at_s <= max(SILENT_S, SILENT_WRITES * state.every_s)
    }
    # The files appear one after the other when a job starts.
    has_begun = newest - min(state.began_s for state in states) > SILENT_S
    known = {state.rank for state in states}
    return tuple(rank for rank in range(states[0].size) if rank not in heard and (has_begun or rank in known))


def _read_state(path: Path, session: int) -> RankState | None:
    """Read a rank's state if it belongs to this job; otherwise None."""
    try:
        state = read_plain(RankState, read_regular(path, STATE_BYTES))
    except (OSError, ValueError):
        return None
    is_its_own = state.session == session and path == rank_file(path.parent, session, state.rank)
    return state if is_its_own and state.rank < state.size and state.tensor_parallel <= state.size else None
