"""Runs the examination in a child process, which may crash or hang, and reports its result however it ends.

MPI_Init may end the process (MPICH does under Open MPI's mpirun), and a driver call may never return. Therefore the
child calls MPI_Init instead of its parent, like a program started by a wrapper script. It writes JSON lines: the steps
that it begins, with their time limits, and its findings.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvr_mpi.doctor.findings import Finding, exit_code, fail
from kvr_mpi.errors import EXIT_NO_TRANSPORT, EXIT_OK
from kvr_mpi.transport.links import Effort
from kvr_mpi.transport.mpi import launched_rank

END = "end"
# Importing on many ranks from one network file system is slow.
START_TIMEOUT_S = 600.0
LEAVE_TIMEOUT_S = 20.0
# A process that is blocked in the kernel may survive SIGKILL; it is abandoned after this time.
KILL_TIMEOUT_S = 5.0
# Time for which ranks without a report wait for that of rank 0.
PAUSE_S = 120.0
LIBRARY_TIMEOUT_S = 60.0
MISMATCH_REMEDY = (
    "use the launcher of this MPI: its own mpirun (`which mpirun` shows which one is found); under SLURM, `srun "
    "--mpi=pmi2` for MPICH, or `srun --mpi=pmix` for Open MPI"
)


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of the doctor, and time limits.

    effort : amount of data sent to measure links.
    timeout_s : limit for a message to arrive.
    patience_s : limit for ranks to meet; longer, since rank 0 may be busy with its own step before.
    """

    output_dir: Path = Path()
    share_gpu: bool = False
    effort: Effort = Effort(rounds=200)
    timeout_s: float = 20.0
    patience_s: float = 150.0


class Reporter:
    """The child's side: writes to standard output, and redirects the output of libraries to standard error."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._has_ended, self._is_released = False, threading.Event()
        threading.Thread(target=self._follow_parent, daemon=True).start()

    def step(self, check: str, timeout_s: float) -> None:
        """Report the start of a step, and its time limit."""
        self._write({"step": check, "timeout_s": timeout_s})

    def findings(self, findings: Sequence[Finding]) -> None:
        self._write({"findings": [asdict(finding) for finding in findings]})

    def end(self, lost: bool) -> None:
        """Report the end; if ranks were lost, wait until the parent has shown the report."""
        self._has_ended = True
        self._write({"step": END, "lost": lost})
        if lost:
            self._is_released.wait()

    def _write(self, message: object) -> None:
        self._lines.write(json.dumps(message) + "\n")

    def _follow_parent(self) -> None:
        """Wait until the parent closes the pipe, or is gone, which ends this process before its own end."""
        os.read(0, 1)
        if not self._has_ended:
            os._exit(1)
        self._is_released.set()


class Child:
    """The parent's side: the process, which inherits open files that MPI may need, once it has ended or hangs.

    findings, step : the findings that it wrote, and the last step that it began.
    problem : how it ended or hung in that step; empty if it finished all steps.
    lost : whether ranks were lost; the process then ends all ranks at its `end`.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], limit_s: float = START_TIMEOUT_S) -> None:
        self.findings, self.step, self.problem, self.lost = list[Finding](), "start", "", False
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, close_fds=False
        )
        lines = self._process.stdout
        assert lines is not None
        while self.step != END and not self.problem:
            if not select.select([lines], [], [], limit_s)[0]:
                self.end(0.0)
                self.problem = f"hangs, killed after {limit_s:.0f} s"
            elif (line := lines.readline()).endswith(b"\n"):  # otherwise cut off when the process ended
                message = json.loads(line)
                self.findings += (Finding(**finding) for finding in message.get("findings", ()))
                self.step, limit_s = message.get("step", self.step), message.get("timeout_s", limit_s)
                self.lost = message.get("lost", False)
            else:
                self.problem = f"ends the process ({_how(self.end(LEAVE_TIMEOUT_S))})"

    def end(self, limit_s: float = LEAVE_TIMEOUT_S) -> int | None:
        """Let the process end, or kill it after a time limit; return its exit code, None if it cannot be killed."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            for seconds in (limit_s, KILL_TIMEOUT_S):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(seconds)
                process.kill()
        finally:
            process.stdout.close()
        return None


def diagnose(
    request: DoctorOptions,
    environ: Mapping[str, str],
    show: Callable[[Sequence[Finding]], None],
    pause_s: float = PAUSE_S,
    program: Sequence[str] = (sys.executable, "-m", "kvr_mpi.doctor.steps"),
) -> int:
    """Examine this machine, print the findings on the first rank, and return the exit code.

    pause_s : time for which other ranks stay alive after a failure, so that rank 0 can report: their exit may end all
        ranks.
    program : the command that runs the examination, without its arguments.
    """
    rank = launched_rank(environ)

    def start(launch: Finding | None) -> Child:
        given = asdict(request) | {"output_dir": str(request.output_dir)}
        return Child([*program, json.dumps(given), json.dumps(launch and asdict(launch))], environ)

    child = start(None)
    if child.problem and child.step == "launcher":
        # MPI_Init failed. Only the first rank reports: an exit with an error elsewhere might end it.
        if rank:
            return EXIT_OK
        text = f"joining {_library(environ) or 'MPI'} {child.problem}: the launcher does not match it"
        child = start(fail("launcher", text, MISMATCH_REMEDY))
    bad = f"the step '{child.step}' {child.problem}" if child.problem else ""
    code = EXIT_NO_TRANSPORT if bad or child.lost else EXIT_OK
    if rank == 0:
        if bad:  # whatever the step checks, no job would survive such a crash
            remedy = "the checks after it did not run; try again without the feature it examines"
            child.findings.append(fail("ranks", bad, remedy))
        show(child.findings)
        code = exit_code(child.findings)
    elif code != EXIT_OK:
        if bad:
            print(f"kvr doctor: rank {rank}: {bad}", file=sys.stderr, flush=True)
        time.sleep(pause_s)
    child.end()  # only after the report: if ranks were lost, the launcher may then end this process, too
    return code


def _how(code: int | None) -> str:
    if code is None:
        return "its output ended, but it cannot be killed"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _library(environ: Mapping[str, str]) -> str:
    """Return the name of the MPI library, which is asked in a process without MPI_Init; empty if it does not answer."""
    command = [sys.executable, "-m", "kvr_mpi.transport.mpi_query"]
    try:
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=LIBRARY_TIMEOUT_S, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
