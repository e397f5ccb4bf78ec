"""From a launcher's process to findings: join MPI in a child, and turn every way in which that fails into a finding."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvr_mpi.doctor.findings import Finding, exit_code, fail
from kvr_mpi.doctor.supervise import Outcome, Tell, launcher_rank, supervised
from kvr_mpi.errors import EXIT_NO_TRANSPORT, EXIT_OK, TransportError

if TYPE_CHECKING:
    from kvr_mpi.doctor.steps import Request

# Nothing heavy may be imported above: the process is forked first.
MISMATCH_REMEDY = (
    "use the launcher of this MPI: its own mpirun (`which mpirun` shows which one is found); under SLURM, `srun "
    "--mpi=pmi2` for MPICH, or `srun --mpi=pmix` for Open MPI"
)
# Longer than rank 0 waits for a rank that is lost.
PAUSE_S = 300.0
JOIN_TIMEOUT_S = 120.0
LIBRARY_TIMEOUT_S = 60.0


def diagnose(
    prepare: Callable[[], Request],
    environ: Mapping[str, str],
    show: Callable[[Sequence[Finding]], None],
    pause_s: float = PAUSE_S,
) -> int:
    """Examine this machine, show the findings on the first rank, and return the exit code.

    Parameters
    ----------
    prepare : Callable
        Makes the request, in the child: what it imports may be heavy.
    pause_s : float
        How long a rank that is lost, or has lost others, leaves the first one to say so: its end may end all.
    """
    rank = launcher_rank(environ)

    def report(outcome: Outcome) -> int:
        if rank == 0:
            findings = (*outcome.findings, *_ended_badly(outcome))
            show(findings)
            return exit_code(findings)
        if not (outcome.problem or outcome.lost):
            return EXIT_OK
        if outcome.problem:
            print(f"kvr doctor: rank {rank}: the step '{outcome.step}' {outcome.problem}", file=sys.stderr, flush=True)
        time.sleep(pause_s)
        return EXIT_NO_TRANSPORT

    def report_joined(outcome: Outcome) -> int | Outcome:
        if outcome.problem and outcome.step == "launcher":
            # Not joined. The first rank speaks, if its launcher lets it: an error here might end that one too.
            return EXIT_OK if rank else outcome
        return report(outcome)

    done = supervised(lambda tell: _join(prepare, environ, tell, None), report_joined)
    if isinstance(done, int):
        return done
    launch = _not_joined(done)
    return supervised(lambda tell: _join(prepare, environ, tell, launch), report)


def _join(
    prepare: Callable[[], Request], environ: Mapping[str, str], tell: Tell, launch: Finding | None
) -> Callable[[], None] | None:
    """Join the others and examine; alone, if something keeps the ranks apart."""
    from kvr_mpi.doctor.examine import examine
    from kvr_mpi.transport import Transport
    from kvr_mpi.transport.local import LocalTransport
    from kvr_mpi.transport.mpi import connect

    request = prepare()
    tell.step("launcher", JOIN_TIMEOUT_S)
    world: Transport = LocalTransport()
    if launch is None:
        try:
            world = connect(environ)
        except TransportError as error:
            launch = launch_failure(error)
    if launch is not None and launcher_rank(environ):
        return None  # each process believes to be alone; only the first says what it sees
    in_order = examine(world, request, environ, tell, launch)
    return None if in_order else lambda: world.abort(EXIT_NO_TRANSPORT)


def launch_failure(error: TransportError) -> Finding:
    """Split the message into what was found and what to do."""
    text = str(error)
    for mark in ("). Under", "; load"):
        found, separator, remedy = text.partition(mark)
        if separator:
            cut = separator.index(" ")
            return fail("launcher", found + separator[:cut].rstrip(".;"), separator[cut:].strip() + remedy)
    return fail("launcher", text, MISMATCH_REMEDY)


def _not_joined(outcome: Outcome) -> Finding:
    """Describe an MPI that did not survive joining it."""
    try:
        command = [sys.executable, "-m", "kvr_mpi.transport.mpi_query"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=LIBRARY_TIMEOUT_S, check=False)
        library = asked.stdout.strip() or "MPI"
    except (OSError, subprocess.TimeoutExpired):
        library = "MPI"
    return fail("launcher", f"joining {library} {outcome.problem}: the launcher does not match it", MISMATCH_REMEDY)


def _ended_badly(outcome: Outcome) -> list[Finding]:
    if not outcome.problem:
        return []
    remedy = "the checks after it did not run; try again without the feature it examines, or report it"
    # Whatever the step was about, an end like this is one that no job survives.
    return [fail("ranks", f"the step '{outcome.step}' {outcome.problem}", remedy)]
