"""A child process that may crash or hang, whose findings are kept.

MPI_Init may end the process (MPICH does under Open MPI's mpirun), and a driver call may never return. Therefore the
examination runs in a child process, which calls MPI_Init instead of its parent, like a program started by a wrapper
script. The child writes JSON lines, which its parent converts to an `Outcome`, however the child ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from kvr_mpi.doctor.findings import Finding

END = "end"
# Importing on many ranks from one network file system is slow.
START_TIMEOUT_S = 600.0
LEAVE_TIMEOUT_S = 20.0
# A process that is blocked in the kernel may survive SIGKILL; it is abandoned after this time.
KILL_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Outcome:
    """The output of a process, and how it ended.

    findings : the findings that it wrote.
    step : the last step that it began.
    problem : how the process ended or hung in that step; empty if it finished all steps.
    lost : whether ranks were lost, so that all ranks must be ended.
    """

    findings: tuple[Finding, ...] = ()
    step: str = "start"
    problem: str = ""
    lost: bool = False


class Reporter:
    """The child's side: reports steps, findings and the end.

    It uses standard output, and redirects the output of libraries to standard error.
    """

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._released = threading.Event()
        threading.Thread(target=self._follow_parent, daemon=True).start()

    def step(self, check: str, timeout_s: float) -> None:
        """Report the start of a step, and its time limit."""
        # Works even if the parent is gone, or if a call never returns.
        faulthandler.dump_traceback_later(timeout_s + LEAVE_TIMEOUT_S, exit=True)
        self._write({"step": check, "timeout_s": timeout_s})

    def findings(self, findings: Sequence[Finding]) -> None:
        """Report findings."""
        self._write({"findings": [asdict(finding) for finding in findings]})

    def end(self, lost: bool) -> None:
        """Report the end; if ranks were lost, wait for the parent."""
        faulthandler.cancel_dump_traceback_later()
        self._write({"step": END, "timeout_s": LEAVE_TIMEOUT_S, "lost": lost})
        if lost:
            self._released.wait()

    def _write(self, message: object) -> None:
        self._lines.write(json.dumps(message) + "\n")

    def _follow_parent(self) -> None:
        """End this process if the parent is gone; continue when the parent releases it."""
        if not os.read(0, 1):
            os._exit(1)
        self._released.set()


class Child:
    """The parent's side: starts the process, which inherits open files that MPI may need, and reads its output."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # skips a line that was cut off when the process ended
                    self._lines.put(line)
        self._lines.put(b"")

    def outcome(self, limit_s: float = START_TIMEOUT_S) -> Outcome:
        """Collect output until the process reports its end, dies, or exceeds the time limit of a step."""
        outcome = Outcome()
        while outcome.step != END:
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                self.end(0.0)
                outcome.problem = f"hangs, killed after {limit_s:.0f} s"
                break
            if not line:
                outcome.problem = f"ends the process ({_how(self.end(LEAVE_TIMEOUT_S))})"
                break
            message = json.loads(line)
            outcome.findings += tuple(Finding(**finding) for finding in message.get("findings", ()))
            outcome.step, limit_s = message.get("step", outcome.step), message.get("timeout_s", limit_s)
            outcome.lost = message.get("lost", False)
        return outcome

    def release(self) -> None:
        """Allow the process to end all ranks."""
        assert self._process.stdin is not None
        self._process.stdin.write(b".")
        self._process.stdin.flush()

    def end(self, limit_s: float = LEAVE_TIMEOUT_S) -> int | None:
        """Wait for the process, kill it after a time limit, and return its exit code; None if it cannot be killed."""
        code = self._wait(limit_s)
        if code is None:
            self._process.kill()
            code = self._wait(KILL_TIMEOUT_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        return code

    def _wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


def _how(code: int | None) -> str:
    if code is None:
        return "its output ended, but it cannot be killed"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
