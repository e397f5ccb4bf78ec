"""The steps of an examination, in order: what each subject needs gathered, and who judges it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvr_mpi.doctor import clocks, devices, folder, hdf5, links, ranks, slurm, sums, trial, versions
from kvr_mpi.doctor.deadlines import gather_tried, meet, within
from kvr_mpi.doctor.facts import RankFacts, group_hosts
from kvr_mpi.doctor.findings import Finding, fail, warn
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.transport.choose import record_proof
from kvr_mpi.transport.mpi import launched_size
from kvr_mpi.transport.mpi_query import loaded_libraries

# Ranks come to a step together; rank 0 may have been busy with a step of its own (the trial) before.
PATIENCE_S = trial.TRIAL_TIMEOUT_S + 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for, and how long ranks wait for each other."""

    output_dir: Path = Path()
    share_gpu: bool = False
    try_transfers: str = "auto"  # or host, cuda, no
    effort: links.Effort = links.Effort()
    patience_s: float = PATIENCE_S
    cache_dir: Path | None = None  # where to note that this MPI moves GPU memory
    ranks_per_stage: int = 1


@dataclass(frozen=True, slots=True)
class Scene:
    """What a step works on; `facts` of all ranks are known on rank 0 only."""

    transport: Transport
    request: Request
    environ: Mapping[str, str]
    facts: Sequence[RankFacts]
    launch: Finding | None  # what was wrong already


@dataclass(frozen=True, slots=True)
class Step:
    """One step: a subject, what to do, whether all ranks take part, and its own time beyond their coming together."""

    check: str
    work: Callable[[Scene], list[Finding]]
    together: bool = False
    timeout_s: float = 60.0


def _launcher(scene: Scene) -> list[Finding]:
    return [scene.launch] if scene.launch else ranks.check_launcher(scene.facts, launched_size(scene.environ))


def _places(scene: Scene) -> list[Finding]:
    return [*ranks.check_hosts(scene.facts), *ranks.check_cores(scene.facts), *ranks.check_threads(scene.facts)]


def _devices(scene: Scene) -> list[Finding]:
    findings = devices.check_devices(scene.facts, scene.request.share_gpu)
    return [*findings, *devices.check_abilities(scene.facts), *devices.check_allocator(scene.facts)]


def _cuda_awareness(scene: Scene) -> list[Finding]:
    findings = [] if scene.launch else trial.check_cuda_awareness(scene.facts)
    kind = trial.wanted_trial(scene.request.try_transfers, scene.facts)
    if kind is None:
        return findings
    launcher = trial.find_launcher(loaded_libraries(), scene.environ.get("PATH", ""))
    if launcher is None:
        text = "neither mpirun nor srun found to start the test process"
        return [*findings, warn("transfers", text, "add the launcher of this MPI to PATH")]
    command = [*launcher, *trial.trial_program(kind, trial.TRIAL_TIMEOUT_S)]
    environ = trial.trial_environment(scene.environ, launcher[0])
    found = trial.try_transfers(command, environ, kind, trial.TRIAL_TIMEOUT_S)
    index = scene.facts[0].device.index
    if kind == "cuda" and found.status == "ok" and scene.request.cache_dir is not None and index is not None:
        record_proof(scene.request.cache_dir, torch.device("cuda", index))
    return [*findings, found]


def _links(scene: Scene) -> list[Finding]:
    transport, effort = scene.transport, scene.request.effort
    if transport.size == 1:
        return []
    meet(transport, scene.request.patience_s)
    shared = share_json(transport, [(one.host, one.device.index) for one in scene.facts])
    hosts, indices = [host for host, _ in shared], [index for _, index in shared]
    mine = indices[transport.rank]
    device = torch.device("cpu") if mine is None else torch.device("cuda", mine)
    tried = gather_tried(
        transport,
        lambda: links.measure_links(transport, device, effort),
        effort.timeout_s * (transport.size + 2),
    )
    measured = [
        {"source": at, "dest": at + 1, "source_host": hosts[at], "dest_host": hosts[at + 1]}
        | (one.get("value") or {"error": one.get("error", "not measured, because of the previous link")})
        for at, one in enumerate(tried[:-1])
    ]
    if tried and "error" in tried[-1]:  # the last rank has no link of its own to say it with
        measured[-1] = {**measured[-1], "error": measured[-1].get("error") or tried[-1]["error"]}
    return links.check_links(measured, "host" if mine is None else "GPU")


def _stages(scene: Scene) -> list[Finding]:
    transport, request = scene.transport, scene.request
    size = request.ranks_per_stage
    if size == 1:
        return []
    if scene.launch or (wrong := sums.check_layout(transport.size, size)):
        return [] if scene.launch else wrong
    meet(transport, request.patience_s)
    shared = share_json(transport, [(one.host, one.device.index) for one in scene.facts])
    mine = shared[transport.rank][1]
    device = torch.device("cpu") if mine is None else torch.device("cuda", mine)
    tried = gather_tried(
        transport,
        lambda: sums.measure_sums(transport, size, device, request.effort),
        request.effort.timeout_s * sums.LIMITS,
    )
    found = [one.get("value") or one for one in tried]
    return sums.check_sums(found, [host for host, _ in shared], size) if transport.rank == 0 else []


def _folder(scene: Scene) -> list[Finding]:
    path = scene.request.output_dir
    try:
        return within(folder.DISK_TIMEOUT_S, lambda: folder.check_folder(path), f"writing to {path.absolute()}")
    except TimeoutError as error:
        return [fail("folder", str(error), "choose a folder on another file system; this one does not respond")]


def _shared_folder(scene: Scene) -> list[Finding]:
    meet(scene.transport, scene.request.patience_s)
    return folder.check_shared(scene.transport, scene.request.output_dir, scene.facts)


def _clocks(scene: Scene) -> list[Finding]:
    meet(scene.transport, scene.request.patience_s)
    chosen: list[int] = share_json(scene.transport, clocks.first_on_each_host(scene.facts) if scene.facts else [])
    skews_s = clocks.measure_skews(scene.transport, chosen)
    return clocks.check_clocks(skews_s, scene.facts) if scene.transport.rank == 0 else []


def _slurm(scene: Scene) -> list[Finding]:
    # Where the ranks are not connected their number says nothing.
    size, hosts = (None, None) if scene.launch else (len(scene.facts), len(group_hosts(scene.facts)))
    return slurm.check_slurm(scene.environ, size, hosts, time.time())


def still_here(scene: Scene) -> list[Finding]:
    """See that nobody was lost meanwhile: MPI, left by all but one, waits for that one for ever."""
    meet(scene.transport, scene.request.patience_s)
    return []


def _versions(scene: Scene) -> list[Finding]:
    return versions.check_versions(scene.facts, versions.required_ranges())


STEPS = (
    Step("launcher", _launcher),
    Step("ranks", _places),
    Step("devices", _devices),
    Step("transfers", _cuda_awareness, timeout_s=trial.TRIAL_TIMEOUT_S + 30.0),
    Step("links", _links, together=True),
    Step("stages", _stages, together=True),
    Step("hdf5", lambda scene: hdf5.check_hdf5()),
    Step("folder", _folder),
    Step("shared folder", _shared_folder, together=True),
    Step("clocks", _clocks, together=True),
    Step("slurm", _slurm),
    Step("versions", _versions),
    Step("ranks", still_here, together=True),
)
