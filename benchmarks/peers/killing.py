"""One life of a program: started, watched by what it prints, and killed or let end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOOKS_S = 0.05
TOLD_CHARS = 1500  # of a failure


class PeerError(RuntimeError):
    """A program did not do what it was started for."""


@dataclass(frozen=True, slots=True)
class Life:
    """What became of a program.

    answered : how many answers it had computed, by what it printed.
    seconds : from its start to its end.
    """

    answered: int
    seconds: float


def live(
    command: Sequence[str],
    environment: Mapping[str, str],
    answered: Callable[[str], int],
    log: Path,
    *,
    timeout_s: float,
    kill_at: int | None = None,
) -> Life:
    """Run a program; kill it, with all that it has started, as soon as it has computed `kill_at` answers.

    Parameters
    ----------
    environment : mapping
        Variables beside those of this process.
    answered : callable
        From all that was printed to how many answers were computed.
    log : Path
        What it prints goes there.

    Raises
    ------
    PeerError
        If it fails, takes too long, or ends before it can be killed.
    """
    began = time.monotonic()
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        while (code := process.poll()) is None:
            if kill_at is not None and answered(_read(log)) >= kill_at:
                break
            if time.monotonic() - began > timeout_s:
                raise PeerError(f"{command[0]} took more than {timeout_s:.0f} s:\n{_read(log)[-TOLD_CHARS:]}")
            time.sleep(LOOKS_S)
        seconds = time.monotonic() - began
    finally:
        kill_all(process)
    if code is not None and (code != 0 or kill_at is not None):
        when = "" if kill_at is None else f" before it could be killed at {kill_at} answers"
        raise PeerError(f"{command[0]} ended with {code}{when}:\n{_read(log)[-TOLD_CHARS:]}")
    return Life(answered(_read(log)), seconds)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and what it has started, at once; return when none of them is left.

    All are stopped before the first is killed, so that none can act on another's end, as none can on a node's.
    """
    pids = _descendants(process.pid) if process.poll() is None else set()
    while True:
        for pid in pids:
            _send(pid, signal.SIGSTOP)
        if (found := set().union(pids, *map(_descendants, pids))) == pids:
            break
        pids = found
    for pid in pids:
        _send(pid, signal.SIGKILL)
    process.wait()
    while any(is_alive(pid) for pid in pids):
        time.sleep(LOOKS_S)


def _descendants(pid: int) -> set[int]:
    """List the process itself, and all below it."""
    found, waiting = {pid}, [pid]
    while waiting:
        parent = waiting.pop()
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                below = {int(word) for word in children.read_text().split()} - found
            except OSError:  # it has ended meanwhile
                continue
            found |= below
            waiting += below
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, and that nobody has asked for its exit code, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _read(log: Path) -> str:
    return log.read_text(errors="replace").replace("\r", "\n")
