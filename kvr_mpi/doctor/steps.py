"""The steps of the examination: each gathers facts or measurements, and passes them to its checks.

A step that fails or raises never prevents the next. ``python -m kvr_mpi.doctor.steps REQUEST LAUNCH`` runs them all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvr_mpi.doctor import devices, folder, links, ranks, trial
from kvr_mpi.doctor.deadlines import SilentError, gather_tried, wait_for_all, within
from kvr_mpi.doctor.facts import DEVICE_TIMEOUT_S, DeviceFacts, RankFacts, look_at_rank
from kvr_mpi.doctor.findings import Finding, fail, ok, warn
from kvr_mpi.doctor.launch import MISMATCH_REMEDY, TRIAL_TIMEOUT_S, DoctorOptions
from kvr_mpi.doctor.process import Tell, python_module
from kvr_mpi.errors import EXIT_NO_TRANSPORT, TransportError, counted
from kvr_mpi.model.devices import visible_gpus
from kvr_mpi.plain import from_plain
from kvr_mpi.store.hdf5 import hdf5_build
from kvr_mpi.topology import gpus_in_turn
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.transport.mpi import connect, launched_rank, launched_size
from kvr_mpi.transport.mpi_query import loaded_libraries

JOIN_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Scene:
    """The state of the examination; only rank 0 has the facts of all ranks.

    launch : why MPI could not be used.
    hosts, gpus : host and GPU of each rank.
    """

    transport: Transport
    request: DoctorOptions
    environ: Mapping[str, str]
    facts: Sequence[RankFacts]
    launch: Finding | None
    hosts: Sequence[str]
    gpus: Sequence[int | None]

    def measure(self, work: Callable[[torch.device], object]) -> list[dict[str, Any]]:
        """Run a measurement on every rank; return all results on rank 0."""
        wait_for_all(self.transport, self.request.patience_s)
        gpu = self.gpus[self.transport.rank]
        device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        return gather_tried(self.transport, lambda: work(device), self.request.timeout_s * links.LIMITS)


@dataclass(frozen=True, slots=True)
class CheckStep:
    """One step: its subject, function, whether all ranks take part, and its time limit."""

    check: str
    work: Callable[[Scene], list[Finding]]
    together: bool = False
    timeout_s: float = 60.0


def _launcher(scene: Scene) -> list[Finding]:
    return [scene.launch] if scene.launch else ranks.check_launcher(scene.facts, launched_size(scene.environ))


def _cuda_awareness(scene: Scene) -> list[Finding]:
    findings = [] if scene.launch else trial.check_cuda_awareness(scene.facts)
    if not trial.is_to_be_tried(scene.facts):
        return findings
    launcher = trial.find_launcher(loaded_libraries(), scene.environ.get("PATH", ""))
    if launcher is None:
        text = "neither mpirun nor srun found to start the test process"
        return [*findings, warn("transfers", text, "add the launcher of this MPI to PATH")]
    command = [*launcher, *python_module("kvr_mpi.doctor.trial", str(TRIAL_TIMEOUT_S))]
    environ = trial.trial_environment(scene.environ, launcher[0])
    return [*findings, trial.try_transfers(command, environ, TRIAL_TIMEOUT_S)]


def _links(scene: Scene) -> list[Finding]:
    transport, request = scene.transport, scene.request
    if transport.size == 1:
        return []
    tried = scene.measure(lambda device: links.measure_chain(transport, device, request.effort, request.timeout_s))
    return links.check_links(tried, scene.hosts, scene.gpus[0] is not None) if transport.rank == 0 else []


def _groups(scene: Scene) -> list[Finding]:
    transport, request = scene.transport, scene.request
    if scene.launch or request.tensor_parallel == 1:
        return []
    size = request.tensor_parallel
    if transport.size % size:
        text = f"{counted(transport.size, 'rank')} cannot be divided into tensor-parallel groups of {size}"
        remedy = f"start a multiple of {size} ranks, or choose another parallel.tensor_parallel"
        return [fail("tensor-parallel", text, remedy)]
    tried = scene.measure(lambda device: links.measure_sums(transport, size, device, request.effort, request.timeout_s))
    return links.check_sums(tried, scene.hosts, size) if transport.rank == 0 else []


def _folder(scene: Scene) -> list[Finding]:
    path = scene.request.output_dir
    try:
        return within(folder.DISK_TIMEOUT_S, lambda: folder.check_folder(path), f"writing to {path.absolute()}")
    except TimeoutError as error:
        return [fail("folder", str(error), "choose a folder on another file system; this one does not respond")]


def _shared_folder(scene: Scene) -> list[Finding]:
    wait_for_all(scene.transport, scene.request.patience_s)
    return folder.check_shared(scene.transport, scene.request.output_dir, scene.facts)


def _clocks(scene: Scene) -> list[Finding]:
    wait_for_all(scene.transport, scene.request.patience_s)
    skews_s = links.measure_clocks(scene.transport, links.first_on_each_host(scene.hosts))
    return links.check_clocks(skews_s, scene.hosts) if scene.transport.rank == 0 else []


def _slurm(scene: Scene) -> list[Finding]:
    # If the ranks are not connected, their number is unknown.
    size, hosts = (None, None) if scene.launch else (len(scene.facts), len(set(scene.hosts)))
    return ranks.check_slurm(scene.environ, size, hosts, time.time())


def still_here(scene: Scene) -> list[Finding]:
    """Check that no rank was lost, since MPI_Finalize would wait for it forever."""
    wait_for_all(scene.transport, scene.request.patience_s)
    return []


STEPS = (
    CheckStep("launcher", _launcher),
    CheckStep("ranks", lambda scene: ranks.check_hosts(scene.facts)),
    CheckStep("cores", lambda scene: ranks.check_cores(scene.facts)),
    CheckStep("threads", lambda scene: ranks.check_threads(scene.facts)),
    CheckStep("devices", lambda scene: devices.check_devices(scene.facts, scene.request.share_gpu)),
    CheckStep("devices", lambda scene: devices.check_abilities(scene.facts)),
    CheckStep("transfers", _cuda_awareness, timeout_s=TRIAL_TIMEOUT_S + 30.0),
    CheckStep("links", _links, together=True),
    CheckStep("tensor-parallel", _groups, together=True),
    CheckStep("hdf5", lambda scene: [ok("hdf5", hdf5_build())]),
    CheckStep("folder", _folder),
    CheckStep("shared folder", _shared_folder, together=True),
    CheckStep("clocks", _clocks, together=True),
    CheckStep("slurm", _slurm),
    CheckStep("versions", lambda scene: ranks.check_versions(scene.facts, ranks.required_ranges())),
    CheckStep("ranks", still_here, together=True),
)


def examine(
    transport: Transport, request: DoctorOptions, environ: Mapping[str, str], tell: Tell, launch: Finding | None = None
) -> bool:
    """Run all steps on this rank; rank 0 reports the findings.

    Parameters
    ----------
    launch : Finding or None
        Why the ranks could not be connected; this rank is then examined alone, without calling MPI.

    Returns
    -------
    bool
        Whether all ranks still respond, so that MPI_Finalize will not hang.
    """

    def report(findings: list[Finding]) -> None:
        if transport.rank == 0 and findings:
            tell.findings(findings)

    tell.step("ranks", 2 * request.patience_s)
    in_order = True
    try:
        facts = _gather_facts(transport, request, environ, launch is None)
        places = share_json(transport, [(one.host, one.device.index) for one in facts])
    except SilentError as error:
        in_order, facts = False, [look_at_rank(transport.rank, 0, environ, launch is None)]
        places = [(facts[0].host, facts[0].device.index)]
        report([_silent("ranks", error)])
    hosts, gpus = zip(*places, strict=True)
    scene = Scene(transport, request, environ, facts, launch, hosts, gpus)
    for step in STEPS:
        if not in_order and transport.rank:
            break
        if not in_order and step.together:
            if step.work is not still_here:
                text = "not checked, since not all ranks answered"
                report([warn(step.check, text, "resolve the failure above first")])
            continue
        tell.step(step.check, step.timeout_s + 2 * request.patience_s + links.LIMITS * request.timeout_s)
        try:
            found = step.work(scene) if step.together or transport.rank == 0 else []
        except SilentError as error:
            in_order, found = False, [_silent(step.check, error)]
        except Exception as error:
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found = [fail(step.check, text, "if this machine seems to be fine, report this as a bug in kvr-mpi")]
        report(found)
    return in_order


def _gather_facts(
    transport: Transport, request: DoctorOptions, environ: Mapping[str, str], with_mpi: bool
) -> list[RankFacts]:
    def see() -> list[str]:
        return within(DEVICE_TIMEOUT_S, visible_gpus, "asking torch for GPUs")

    seen = gather_tried(transport, see, request.patience_s)
    gpu = gpus_in_turn(share_json(transport, [one.get("value", []) for one in seen]))[transport.rank]

    def look() -> object:
        return asdict(look_at_rank(transport.rank, gpu, environ, with_mpi))

    return [
        from_plain(RankFacts, one["value"])
        if "value" in one
        else RankFacts(rank, "an unknown host", (), "", DeviceFacts(error=one["error"]), None, {})
        for rank, one in enumerate(gather_tried(transport, look, request.patience_s))
    ]


def _silent(check: str, error: SilentError) -> Finding:
    remedy = "check the hosts of these ranks and the network between them; start on fewer hosts to find the faulty one"
    return fail(check, str(error), remedy)


def main(request: DoctorOptions, launch: Finding | None, environ: Mapping[str, str]) -> None:
    """Connect the ranks and examine them; alone if they cannot be connected."""
    tell = Tell()
    tell.step("launcher", JOIN_TIMEOUT_S)
    world: Transport = LocalTransport()
    if launch is None:
        try:
            world = connect(environ)
        except TransportError as error:
            launch = fail("launcher", error.found, error.remedy or MISMATCH_REMEDY)
    if launch is not None and launched_rank(environ):  # the processes are not connected; only the first reports
        tell.end(lost=False)
        return
    in_order = examine(world, request, environ, tell, launch)
    tell.end(lost=not in_order)
    if not in_order:
        world.abort(EXIT_NO_TRANSPORT)


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    main(from_plain(DoctorOptions, json.loads(sys.argv[1])), given and Finding(**given), os.environ)
