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
from functools import partial

import torch

from kvr_mpi.doctor import devices, folder, links, ranks
from kvr_mpi.doctor.deadlines import SilentError, gather_tried, wait_for_all, within
from kvr_mpi.doctor.facts import DEVICE_TIMEOUT_S, DeviceFacts, RankFacts, look_at_rank
from kvr_mpi.doctor.findings import Finding, fail
from kvr_mpi.doctor.launch import MISMATCH_REMEDY, DoctorOptions, Reporter
from kvr_mpi.errors import EXIT_NO_TRANSPORT, TransportError
from kvr_mpi.model.devices import visible_gpus
from kvr_mpi.plain import from_plain
from kvr_mpi.topology import gpus_in_turn
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.transport.mpi import connect, launched_rank, launched_size

JOIN_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 60.0
SILENT_REMEDY = (
    "check the hosts of these ranks and the network between them; start on fewer hosts to find the faulty one. The "
    "checks after this one did not run"
)


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


def _launcher(scene: Scene) -> list[Finding]:
    return [scene.launch] if scene.launch else ranks.check_launcher(scene.facts, launched_size(scene.environ))


def _devices(scene: Scene) -> list[Finding]:
    return devices.check_devices(scene.facts, scene.request.share_gpu) + devices.check_abilities(scene.facts)


def _folder(scene: Scene) -> list[Finding]:
    path = scene.request.output_dir
    try:
        return within(folder.DISK_TIMEOUT_S, lambda: folder.check_folder(path), f"writing to {path.absolute()}")
    except TimeoutError as error:
        return [fail("folder", str(error), "choose a folder on another file system; this one does not respond")]


def _scheduler(scene: Scene) -> list[Finding]:
    # If the ranks are not connected, their number is unknown.
    size, hosts = (None, None) if scene.launch else (len(scene.facts), len(set(scene.hosts)))
    return ranks.check_scheduler(scene.environ, size, hosts, time.time())


def _shared_folder(scene: Scene) -> list[Finding]:
    return folder.check_shared(scene.transport, scene.request.output_dir, scene.facts)


def _links(scene: Scene) -> list[Finding]:
    transport, request = scene.transport, scene.request
    if transport.size == 1:
        return []
    gpu = scene.gpus[transport.rank]
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    tried = gather_tried(
        transport,
        lambda: links.measure_chain(transport, device, request.effort, request.timeout_s),
        request.timeout_s * links.LIMITS,
    )
    return links.check_links(tried, scene.hosts, scene.gpus[0] is not None) if transport.rank == 0 else []


# Rank 0 makes the first checks alone. None of the others follows once a rank is lost; the last one only notices that,
# since MPI_Finalize would wait for the rank forever.
ALONE = {"launcher": _launcher, "devices": _devices, "folder": _folder, "scheduler": _scheduler}
TOGETHER = {"shared folder": _shared_folder, "links": _links, "ranks": lambda scene: list[Finding]()}


def examine(
    transport: Transport,
    request: DoctorOptions,
    environ: Mapping[str, str],
    reporter: Reporter,
    launch: Finding | None = None,
) -> bool:
    """Run all checks on this rank; rank 0 reports the findings.

    launch : why the ranks could not be connected; this rank is then examined alone, without calling MPI.

    Returns whether all ranks still respond, so that MPI_Finalize will not hang.
    """
    in_order = True

    def attempt(check: str, work: Callable[[], list[Finding]]) -> None:
        """Run one check, and report what it finds, also if it fails itself."""
        nonlocal in_order
        reporter.step(check, STEP_TIMEOUT_S + 2 * request.patience_s + links.LIMITS * request.timeout_s)
        try:
            found = work()
        except SilentError as error:
            in_order, found = False, [fail(check, str(error), SILENT_REMEDY)]
        except Exception as error:
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found = [fail(check, text, "if this machine seems to be fine, report this as a bug in kvr-mpi")]
        if transport.rank == 0 and found:
            reporter.findings(found)

    facts, places = list[RankFacts](), list[tuple[str, int | None]]()

    def gather() -> list[Finding]:
        facts.extend(_gather_facts(transport, request, environ, launch is None))
        places.extend(share_json(transport, [(one.host, one.device.index) for one in facts]))
        return []

    attempt("ranks", gather)
    if not in_order:  # this rank is examined alone
        facts = [look_at_rank(transport.rank, 0, environ, launch is None)]
        places = [(facts[0].host, facts[0].device.index)]
    hosts, gpus = zip(*places, strict=True)
    scene = Scene(transport, request, environ, facts, launch, hosts, gpus)
    for check, work in ALONE.items() if transport.rank == 0 else ():
        attempt(check, partial(work, scene))
    for check, work in TOGETHER.items():
        if in_order:
            attempt(check, partial(_meet, scene, work))
    return in_order


def _meet(scene: Scene, work: Callable[[Scene], list[Finding]]) -> list[Finding]:
    """Run a check in which all ranks take part."""
    wait_for_all(scene.transport, scene.request.patience_s)
    return work(scene)


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
        else RankFacts(rank, "an unknown host", DeviceFacts(error=one["error"]), None)
        for rank, one in enumerate(gather_tried(transport, look, request.patience_s))
    ]


def main(request: DoctorOptions, launch: Finding | None, environ: Mapping[str, str]) -> None:
    """Connect the ranks and examine them; alone if they cannot be connected."""
    reporter = Reporter()
    reporter.step("launcher", JOIN_TIMEOUT_S)
    world: Transport = LocalTransport()
    if launch is None:
        try:
            world = connect(environ)
        except TransportError as error:
            launch = fail("launcher", error.found, error.remedy or MISMATCH_REMEDY)
    if launch is not None and launched_rank(environ):  # the processes are not connected; only the first reports
        reporter.end(lost=False)
        return
    in_order = examine(world, request, environ, reporter, launch)
    reporter.end(lost=not in_order)
    if not in_order:
        world.abort(EXIT_NO_TRANSPORT)


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    main(from_plain(DoctorOptions, json.loads(sys.argv[1])), given and Finding(**given), os.environ)
