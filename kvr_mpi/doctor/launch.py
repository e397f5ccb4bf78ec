"""Runs the examination in a child process, and reports its result, however the process ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvr_mpi.doctor.findings import Finding, exit_code, fail
from kvr_mpi.doctor.process import Child, Outcome
from kvr_mpi.errors import EXIT_NO_TRANSPORT, EXIT_OK
from kvr_mpi.transport.links import Effort
from kvr_mpi.transport.mpi import launched_rank

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


def diagnose(
    request: DoctorOptions,
    environ: Mapping[str, str],
    show: Callable[[Sequence[Finding]], None],
    pause_s: float = PAUSE_S,
    program: Sequence[str] = (sys.executable, "-m", "kvr_mpi.doctor.steps"),
) -> int:
    """Examine this machine, print the findings on the first rank, and return the exit code.

    Parameters
    ----------
    pause_s : float
        Time for which other ranks stay alive after a failure, so that rank 0 can report: their exit may end all ranks.
    program : sequence of str
        The command that runs the examination, without its arguments.
    """
    rank = launched_rank(environ)

    def start(launch: Finding | None) -> tuple[Child, Outcome]:
        given = asdict(request) | {"output_dir": str(request.output_dir)}
        child = Child([*program, json.dumps(given), json.dumps(launch and asdict(launch))], environ)
        return child, child.outcome()

    child, outcome = start(None)
    if outcome.problem and outcome.step == "launcher":
        # MPI_Init failed. Only the first rank reports: an exit with an error elsewhere might end it.
        if rank:
            return EXIT_OK
        text = f"joining {_library(environ) or 'MPI'} {outcome.problem}: the launcher does not match it"
        child, outcome = start(fail("launcher", text, MISMATCH_REMEDY))
    bad = f"the step '{outcome.step}' {outcome.problem}" if outcome.problem else ""
    code = EXIT_NO_TRANSPORT if bad or outcome.lost else EXIT_OK
    if rank == 0:
        # Whatever the step checks, no job would survive such a crash.
        crash = [fail("ranks", bad, "the checks after it did not run; try again without the feature it examines")]
        findings = (*outcome.findings, *(crash if bad else []))
        show(findings)
        code = exit_code(findings)
    elif code != EXIT_OK:
        if bad:
            print(f"kvr doctor: rank {rank}: {bad}", file=sys.stderr, flush=True)
        time.sleep(pause_s)
    if outcome.lost:
        child.release()  # only after the report: the launcher may then end this process, too
    child.end()
    return code


def _library(environ: Mapping[str, str]) -> str:
    """Return the name of the MPI library, which is asked in a process without MPI_Init; empty if it does not answer."""
    command = [sys.executable, "-m", "kvr_mpi.transport.mpi_query"]
    try:
        asked = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=LIBRARY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip()
