"""Checks of GPUs: the GPU that each rank would use, and settings that disable fast paths of CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvr_mpi.doctor.facts import DeviceFacts, RankFacts, group_ranks
from kvr_mpi.doctor.findings import Finding, fail, ok, ranks_text, some, warn

GIB = 2**30
AMPERE = (8, 0)
# Below this fraction of free memory, other processes use the GPU; driver and context take only a few per cent.
FREE_SHARE = 0.9


def check_devices(facts: Sequence[RankFacts], share_gpu: bool = False) -> list[Finding]:
    """Check that every rank has its own GPU, or that none has one."""
    check = "devices"
    broken = [one for one in facts if one.device.error]
    if broken:
        text = f"rank {broken[0].rank} on {broken[0].host} could not query its GPU: {broken[0].device.error}"
        return [fail(check, text, "check `nvidia-smi` on that host, and the installation of torch")]
    seeing = [one for one in facts if one.device.count]
    if not seeing:
        return [_no_gpu(facts[0])]
    blind = [one for one in facts if not one.device.count]
    if blind:
        text = (
            f"{ranks_text([one.rank for one in blind])}: no GPU, although the others have one (first: {blind[0].host})"
        )
        return [fail(check, text, "request a GPU for every task (`--gpus-per-task=1`), or start fewer ranks per host")]
    taken = group_ranks(facts, lambda one: f"{one.host} {one.device.uuid or one.device.index}")
    shared = [ranks for ranks in taken.values() if len(ranks) > 1]
    shown = [
        f"rank {one.rank}: GPU {one.device.index} of {one.device.count} on {one.host} ({one.device.name}, "
        f"CUDA_VISIBLE_DEVICES={'not set' if one.device.visible is None else one.device.visible})"
        for one in facts
    ]
    if shared and not share_gpu:
        names = [f"{ranks_text([one.rank for one in ranks])} on {ranks[0].host}" for ranks in shared]
        remedy = (
            "start as many ranks per host as it has GPUs, or use `--gpus-per-task=1`; if this is intended, add "
            "--share-gpu"
        )
        return [fail(check, f"several ranks share one GPU: {some(names)}", remedy)]
    return [ok(check, some(shown, 8))]


def check_abilities(facts: Sequence[RankFacts]) -> list[Finding]:
    """Warn about GPUs with missing features, wrong settings or other users; the same warning once for all ranks."""
    found: dict[str, list[tuple[int, str]]] = {}
    for one in facts:
        for text, remedy in _lacks_of(one.device) if one.device.index is not None else ():
            found.setdefault(remedy, []).append((one.rank, text))
    return [
        warn("devices", f"{ranks_text([rank for rank, _ in lacking])}: {lacking[0][1]}", remedy)
        for remedy, lacking in found.items()
    ]


def _lacks_of(gpu: DeviceFacts) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a GPU, and what to do about it."""
    if (0, 0) < gpu.capability < AMPERE:
        yield (
            f"{gpu.name} is older than Ampere, so it has no flash attention and no bfloat16",
            'use newer GPUs, or model.dtype = "float16" or "float32"',
        )
    if gpu.free_bytes < FREE_SHARE * gpu.total_bytes:
        yield (
            f"other processes use the GPU, {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB are free",
            "check `nvidia-smi`; a job plans with the memory that is free when it begins",
        )
    if "expandable_segments:true" in gpu.allocator.lower().replace(" ", ""):
        yield (
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True",
            "unset it for parallel.transport = 'mpi': other processes cannot open such memory (CUDA IPC), and no error "
            "is raised; with the other transports, kvr-mpi sets it itself",
        )


def _no_gpu(one: RankFacts) -> Finding:
    device = one.device
    if device.driver and device.visible is not None and device.visible.strip() in ("", "-1"):
        text = f"{one.host} has an NVIDIA driver, but CUDA_VISIBLE_DEVICES={device.visible!r} hides its GPUs"
        return warn(
            "devices", text, "unset CUDA_VISIBLE_DEVICES, or request GPUs from the batch system (`--gpus-per-task=1`)"
        )
    if device.driver and not device.built:
        text = f"{one.host} has an NVIDIA driver, but torch {device.torch} is built without CUDA"
        return warn("devices", text, "install the torch build for your GPUs (pytorch.org, 'Get started')")
    if device.unusable:
        return fail("devices", f"{one.host}: {device.unusable}", device.remedy)
    return ok("devices", f"no GPU; torch {device.torch} computes on the CPU cores")
