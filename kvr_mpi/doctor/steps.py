"""The steps of the examination: facts and measurements of all ranks, which rank 0 checks.

A step that raises an error never prevents the next. If one hangs, such as with a driver or a file system that does not
respond, its rank names it and ends all ranks; what was found before has been shown.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from kvr_mpi.doctor import devices, folder, links, ranks
from kvr_mpi.doctor.facts import RankFacts, look_at_rank
from kvr_mpi.doctor.findings import Finding, exit_code, fail
from kvr_mpi.errors import EXIT_NO_TRANSPORT, EXIT_OK, TransportError
from kvr_mpi.model.devices import visible_gpus
from kvr_mpi.plain import from_plain
from kvr_mpi.topology import gpus_in_turn
from kvr_mpi.transport import Transport, gather_json, mpi, share_json
from kvr_mpi.transport.liveness import heartbeat
from kvr_mpi.transport.local import LocalTransport

# Importing and joining on many ranks from one network file system is slow.
STEP_TIMEOUT_S, LOST_S = 150.0, 60.0
KILL_AFTER_S = 10.0  # a step that keeps Python's threads from running is ended this much later
MISMATCH_REMEDY = (
    "use the launcher of this MPI: its own mpirun (`which mpirun` shows which one is found); under SLURM, `srun "
    "--mpi=pmi2` for MPICH, or `srun --mpi=pmix` for Open MPI"
)


def diagnose(
    output_dir: Path,
    environ: Mapping[str, str],
    show: Callable[[Finding], None],
    *,
    share_gpu: bool = False,
    limit_s: float = STEP_TIMEOUT_S,
) -> int:
    """Examine the machine on all ranks, and return the exit code.

    show : shows a finding; called on rank 0, as soon as it is known.
    share_gpu : accept several ranks on one GPU.
    limit_s : time limit of a step.
    """
    rank, launch, findings = mpi.launched_rank(environ), None, list[Finding]()
    world: Transport = LocalTransport()
    _tell(rank, f"joining MPI. If this hangs or ends with an error: {MISMATCH_REMEDY}")
    with _limited(rank, "launcher", limit_s):
        try:
            world = mpi.connect()
        except TransportError as error:
            launch = fail("launcher", error.found, error.remedy or MISMATCH_REMEDY)
    if launch is not None and rank:  # the processes are not connected; only the first reports
        return EXIT_OK

    def attempt(check: str, work: Callable[[], list[Finding]]) -> None:
        """Run one check, and show what it finds, also if it fails itself."""
        _tell(world.rank, check)
        with _limited(world.rank, check, limit_s):
            try:
                found = work()
            except Exception as error:
                text = f"the check itself failed: {type(error).__name__}: {error}"
                found = [fail(check, text, "if this machine seems to be fine, report this as a bug in kvr-mpi")]
        for finding in found if world.rank == 0 else ():
            findings.append(finding)
            show(finding)

    def end(error: TransportError) -> None:
        print(f"kvr doctor: {error}", file=sys.stderr, flush=True)
        world.abort(EXIT_NO_TRANSPORT)

    with heartbeat(world, end, limit_s=LOST_S):
        with _limited(world.rank, "GPUs of all ranks", limit_s):
            facts = _gather_facts(world, environ, launch is None)
        places = share_json(world, [(one.host, one.device.index) for one in facts])
        hosts, gpus = [host for host, _ in places], [index for _, index in places]
        if world.rank == 0:
            # If the ranks are not connected, their number is unknown.
            size, nodes = (None, None) if launch else (len(facts), len(set(hosts)))
            attempt("launcher", lambda: [launch] if launch else ranks.check_launcher(facts, mpi.launched_size(environ)))
            attempt("devices", lambda: devices.check_devices(facts, share_gpu) + devices.check_abilities(facts))
            attempt("folder", lambda: folder.check_folder(output_dir))
            attempt("scheduler", lambda: ranks.check_scheduler(environ, size, nodes, time.time()))
        world.barrier()  # the other ranks wait here
        attempt("shared folder", lambda: folder.check_shared(world, output_dir, facts))
        world.barrier()
        if world.size > 1:
            attempt("links", lambda: links.check_chain(world, hosts, gpus))
    return exit_code(findings)


def _tell(rank: int, what: str) -> None:
    """Name a step that begins, so that a crash in it is explained."""
    if rank == 0:
        print(f"kvr doctor: {what}", file=sys.stderr, flush=True)


@contextmanager
def _limited(rank: int, step: str, limit_s: float) -> Iterator[None]:
    """End this process if a step takes longer, and with it all ranks."""

    def end() -> None:
        print(f"kvr doctor: rank {rank}: the step {step!r} hangs: ended after {limit_s:.0f} s", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_NO_TRANSPORT)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(limit_s + KILL_AFTER_S, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _gather_facts(world: Transport, environ: Mapping[str, str], with_mpi: bool) -> list[RankFacts]:
    """Gather the facts of all ranks on rank 0; every rank calls this."""
    seen: list[str] = []
    try:
        seen = visible_gpus()
    except RuntimeError:
        pass  # `look_at_rank` has the reason
    gpu = gpus_in_turn(share_json(world, gather_json(world, seen)))[world.rank]
    mine = look_at_rank(world.rank, gpu, environ, with_mpi)
    return [from_plain(RankFacts, one) for one in gather_json(world, asdict(mine))]
