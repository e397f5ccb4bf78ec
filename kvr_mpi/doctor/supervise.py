"""The examination runs in a child process, and its parent prints what the child told before it ended, crashed or hung.

An MPI may end the process that joins it (MPICH does under Open MPI's mpirun), and a driver may never return: neither
leaves time for a message. The child is forked before anything is imported, and joins MPI in the parent's stead, as a
program started by a wrapper script does.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from kvr_mpi.doctor.findings import Finding

T = TypeVar("T")
END = "end"

# Who am I? Asked of the launcher where MPI cannot be asked.
RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "SLURM_PROCID",
)
# Many ranks that import from one network file system take their time.
START_TIMEOUT_S = 600.0
LEAVE_TIMEOUT_S = 20.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a child told, and how it ended: `problem` is empty if it went through, `lost` if other ranks are not."""

    findings: tuple[Finding, ...] = ()
    step: str = "start"
    problem: str = ""
    lost: bool = False


class Tell:
    """The child's end: says which step begins, what was found, and that it is done."""

    def __init__(self, handle: int) -> None:
        self._handle = handle  # closed by the end of the process only, which is what its parent waits for

    def step(self, check: str, timeout_s: float) -> None:
        """Say that a step begins, and within which time it ends."""
        self._write({"step": check, "timeout_s": timeout_s})

    def findings(self, findings: Sequence[Finding]) -> None:
        """Hand over what was found."""
        self._write({"findings": [asdict(finding) for finding in findings]})

    def end(self, lost: bool) -> None:
        """Say that all is told, and whether other ranks were lost."""
        self._write({"step": END, "timeout_s": LEAVE_TIMEOUT_S, "lost": lost})

    def _write(self, message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._handle, data) :]


Work = Callable[[Tell], Callable[[], None] | None]


def launcher_rank(environ: Mapping[str, str]) -> int:
    """Return this process's rank as its launcher sees it; 0 if nobody says."""
    return next((int(environ[name]) for name in RANK_VARIABLES if environ.get(name, "").isdigit()), 0)


def supervised(work: Work, report: Callable[[Outcome], T]) -> T:
    """Run `work` in a child, which ends here; report, in the parent, what it told.

    `work` returns None if MPI can be left in good order, else a function that ends all ranks; it is called after the
    report, because a launcher may then end this process too.
    """
    parent = os.getpid()
    reading, writing = os.pipe()
    waiting, letting = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(letting)
        _die_with(parent)
        tell = Tell(writing)
        end_all = work(tell)
        tell.end(lost=end_all is not None)
        if end_all is not None:
            os.read(waiting, 1)
            end_all()
        raise SystemExit(0)
    os.close(writing)
    try:
        outcome = _listen(reading, child, START_TIMEOUT_S)
        result = report(outcome)
        if outcome.lost:
            os.write(letting, b".")
            _wait(reading, child, LEAVE_TIMEOUT_S)
        return result
    finally:
        for handle in (reading, waiting, letting):
            os.close(handle)


def _listen(reading: int, child: int, limit_s: float) -> Outcome:
    """Collect what a child tells until it ends, is lost, or takes too long."""
    outcome, rest, ends = Outcome(), b"", time.monotonic() + limit_s
    while not outcome.lost:
        if not select.select([reading], [], [], max(0.0, ends - time.monotonic()))[0]:
            _wait(reading, child, 0.0)
            # At the end all is told, and nothing is lost with it.
            return replace(outcome, problem="" if outcome.step == END else f"hangs, killed after {limit_s:.0f} s")
        data = os.read(reading, 1 << 16)
        if not data:
            code = _wait(reading, child, 0.0)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return replace(outcome, problem="" if outcome.step == END else f"ends the process ({how})")
        *lines, rest = (rest + data).split(b"\n")
        for message in map(json.loads, lines):
            told = tuple(Finding(**finding) for finding in message.pop("findings", ()))
            limit_s = message.pop("timeout_s", limit_s)
            ends = time.monotonic() + limit_s
            outcome = replace(outcome, findings=(*outcome.findings, *told), **message)
    return outcome


def _wait(reading: int, child: int, limit_s: float) -> int:
    """Wait for the child's end, which closes its pipe; kill it if that takes too long. Returns its exit code."""
    if not select.select([reading], [], [], limit_s)[0]:
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _die_with(parent: int) -> None:
    """Let no child outlive a parent that its launcher kills."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
