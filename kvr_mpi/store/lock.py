"""A lock for the output folder: one job at a time, across nodes, and on file systems without locks.

Every job that takes the folder creates a file ``.lock-N``, with N one higher than any before; the highest N counts.
Exclusive creation of a file is atomic on every file system, so only one of two contenders succeeds. The owner rewrites
its file with a growing number. Another job that wants the folder watches this number, so no clocks are compared.
The highest file is never removed, only marked as released, so that no N is used twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from kvr_mpi.disk import (
    LOCK_NAME,
    LOG_NAME,
    OTHER_FOLDER,
    WRONG_KIND,
    create,
    list_folder,
    read_regular,
    unavailable,
    writing,
)
from kvr_mpi.errors import OutputError, UnavailableError, printable
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.plain import Count, UnixTime, read_plain

BEAT_S = 2.0
# An owner whose number has not changed for this long counts as dead.
WATCH_S = 20.0
WHY_KILLED = "its launcher's output, sacct or dmesg may say why, such as out of memory"
LOCK_BYTES = 1024  # always rewritten in place at full length, which needs no space on a full disk


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a folder.

    host : name of the machine.
    space : namespace in which process ids are unique: one boot of one machine, one container.
    pid, started : process id, and its start in clock ticks since boot, since ids are reused.
    job, restart : the batch system's job id ("" without one), and how often the job was restarted.
    """

    host: str
    space: str
    pid: Count
    started: Count
    job: str = ""
    restart: Count = 0

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return printable(f"process {self.pid} on {self.host}{job}", "")


def this_process(job: str = "", restart: int = 0) -> Owner:
    """Describe the calling process."""
    pid = os.getpid()
    return Owner(socket.gethostname(), _space(), pid, _start(_stat(pid)), job, restart)


@dataclass(frozen=True, slots=True)
class LockState:
    """The contents of a lock file; `owner` is None if it is damaged."""

    owner: Owner | None = None
    number: Count = 0  # from its name
    beats: Count = 0
    released: bool = False
    since_s: UnixTime = 0.0  # Unix time at which it was taken, by the owner's clock


def read_lock(folder: Path) -> LockState | None:
    """Read the latest lock file of the folder; None if there is none.

    Raises `OutputError` or `UnavailableError` if it cannot be read.
    """
    while number := session_of(folder):
        try:
            state = read_plain(LockState, _read(folder, number))
        except ValueError:
            return LockState(number=number)
        except FileNotFoundError as error:  # the next job, which has taken the folder since, removes it
            if session_of(folder) == number:
                raise unavailable(_path(folder, number), error) from error
            continue
        return replace(state, number=number)
    return None


def session_of(folder: Path) -> int:
    """Return the number of the job that holds or last held the folder: 1 for the first, 0 for none."""
    return max(_numbers(folder), default=0)


def is_alive(
    folder: Path, watch_s: float = 2.5 * BEAT_S, asking: Owner | None = None, logger: RankLogger = SILENT
) -> bool:
    """Return whether a job is running in the folder.

    An owner on another machine, or whose process is hidden, is watched for `watch_s` seconds, after a log line by
    `logger`, unless it is an earlier start of the job that is `asking`. Raises as `read_lock` does.
    """
    state = read_lock(folder)
    if state is None or state.released:
        return False
    holder = state.owner
    if holder is not None and holder.space and holder.space == _space() and (runs := _runs(holder)) is not None:
        return runs
    if holder is not None and asking is not None and holder.job and holder.job == asking.job:
        if holder.restart < asking.restart:
            return False
    logger.info(
        f"{str(folder)!r} was in use by {_describe(state)}, which has not reported its end: watching it for "
        f"{watch_s:.0f} s"
    )
    return _beats(folder, state, watch_s)


def check_unused(folder: Path) -> None:
    """Raise `OutputError`, which names the other job, if a job is running in the folder (`is_alive`)."""
    with contextlib.suppress(OSError):  # the other checks report folders that cannot be read
        if folder.is_dir() and is_alive(folder):
            raise OutputError(_refusal(folder, read_lock(folder)))


class Lock:
    """A folder held by this process until `release`.

    Raises `OutputError` if another job holds the folder; the message names it.

    owner : this process.
    logger : told before another owner is watched.
    """

    def __init__(self, folder: Path, owner: Owner, logger: RankLogger = SILENT) -> None:
        self.owner, self._folder, self._since = owner, folder, time.time()
        self._beats, self._is_lost, self._ended = 0, False, threading.Event()
        before = session_of(folder)
        if is_alive(folder, WATCH_S, owner, logger):
            raise OutputError(_refusal(folder, read_lock(folder)))
        if (last := read_lock(folder)) is not None and not last.released:
            logger.info(f"the last job in {str(folder)!r} was killed or crashed ({_describe(last)}): {WHY_KILLED}")
        self.number = max([before, *_numbers(folder, LOG_NAME)]) + 1  # locks may be deleted
        self._handle = self._make()
        for number in _numbers(folder):
            if number < self.number:
                with contextlib.suppress(OSError):  # another user's, or not a file: only the highest counts
                    _path(folder, number).unlink()
        self._thread = threading.Thread(target=self._live, name="kvr-lock", daemon=True)
        self._thread.start()

    def check(self, *, anew: bool = False) -> None:
        """Raise `OutputError` if another job took the folder, or if it was replaced or removed.

        With `anew`, the lock file is checked now; otherwise the result of the last heartbeat counts.
        """
        if anew:
            with contextlib.suppress(OSError):
                self._look()
        if not self._is_lost:
            return
        if not self._folder.is_dir():
            raise OutputError(f"{str(self._folder)!r} is gone; restore it, and continue with --resume")
        state = read_lock(self._folder)
        if state is None or state.number <= self.number:
            raise OutputError(
                f"{str(self._folder)!r} was replaced by another folder while the job was running; restore the first "
                f"one, and continue with --resume"
            )
        raise OutputError(
            f"another job has taken over {str(self._folder)!r} while this one was suspended; this one ends, the other "
            f"continues: {_describe(state)}"
        )

    def release(self) -> None:
        """Release the folder."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            with contextlib.suppress(OSError):
                self._store(released=True)
            with contextlib.suppress(OSError):  # it is closed all the same
                os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _make(self) -> int:
        path = _path(self._folder, self.number)
        named = f"output.path {str(self._folder)!r}"
        with contextlib.ExitStack() as undo, writing(named, OTHER_FOLDER):
            try:
                handle = self._handle = create(path)
                undo.callback(path.unlink, missing_ok=True)
                undo.callback(os.close, handle)
                self._store()
            except FileExistsError:
                raise OutputError(_refusal(self._folder, read_lock(self._folder))) from None
            if session_of(self._folder) != self.number:  # another job took the folder after the check
                raise OutputError(_refusal(self._folder, read_lock(self._folder)))
            undo.pop_all()
        return handle

    def _store(self, *, released: bool = False) -> None:
        stored = {"owner": asdict(self.owner), "beats": self._beats, "released": released, "since_s": self._since}
        os.pwrite(self._handle, json.dumps(stored).encode().ljust(LOCK_BYTES - 1) + b"\n", 0)
        os.fsync(self._handle)

    def _live(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._beats += 1
            with contextlib.suppress(OSError):  # the disk may be full or unavailable for a while
                self._store()
                self._look()

    def _look(self) -> None:
        """Check that the lock file is the one this process wrote, and the latest."""
        try:
            is_mine = os.path.samestat(os.fstat(self._handle), os.lstat(_path(self._folder, self.number)))
        except FileNotFoundError:
            is_mine = False
        self._is_lost = not is_mine or _path(self._folder, self.number + 1).exists()


def _beats(folder: Path, state: LockState, seconds: float) -> bool:
    """Watch a lock file, and return whether it changed."""

    def content() -> bytes:
        try:
            return _read(folder, state.number)  # reopening refreshes a network file system's cache
        except FileNotFoundError:
            return b""

    before, deadline = content(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(0.25, seconds))
        if content() != before:
            return not (latest := read_lock(folder)) or not latest.released
    return False


def _read(folder: Path, number: int) -> bytes:
    """Read a lock file; raise `OutputError` or `UnavailableError` if that fails, since its owner may be alive."""
    path = _path(folder, number)
    try:
        return read_regular(path, LOCK_BYTES)
    except (FileNotFoundError, UnavailableError):
        raise
    except OSError as error:
        if error.errno in WRONG_KIND:  # no job made it
            return b""
        raise OutputError(
            f"{path} cannot be read: {error.strerror or error}; it says whether a job is running in {str(folder)!r}: "
            f"ask its owner for permission, or {OTHER_FOLDER}"
        ) from error


def _refusal(folder: Path, state: LockState | None) -> str:
    return f"output.path {str(folder)!r} is in use by {_describe(state)}; wait for it to end, end it, or {OTHER_FOLDER}"


def _describe(state: LockState | None) -> str:
    return "another job" if state is None or state.owner is None else str(state.owner)


def _numbers(folder: Path, names: re.Pattern[str] = LOCK_NAME) -> list[int]:
    try:
        entries = list_folder(folder)
    except FileNotFoundError:
        raise OutputError(f"{str(folder)!r} is gone; restore it, and continue with --resume") from None
    found = (names.fullmatch(entry.name) for entry in entries)
    return [int(match[1]) for match in found if match]


def _path(folder: Path, number: int) -> Path:
    return folder / f".lock-{number:06d}"


def _space() -> str:
    """Return the namespace in which process ids are unique; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _runs(holder: Owner) -> bool | None:
    """Whether a process of this machine still runs; None if it is hidden, as those of others are with ``hidepid``."""
    if (fields := _stat(holder.pid)) and holder.started:
        return _start(fields) == holder.started
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return None


def _stat(pid: int) -> list[str]:
    """Return what the system says of a process, from its state on; empty if it does not exist, or is hidden."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _start(fields: list[str]) -> int:
    """Return the start time of a process in ticks since boot; 0 if it has ended or is not known."""
    return 0 if not fields or fields[0] in "ZX" else int(fields[19])
