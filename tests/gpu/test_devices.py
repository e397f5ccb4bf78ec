"""Which GPU a rank takes, with how much memory, and what it is told of it."""

from __future__ import annotations

import re
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny
from mpi4py import MPI

from kvr_mpi.doctor.facts import look_at_device
from kvr_mpi.errors import ModelError
from kvr_mpi.job import JobSpec
from kvr_mpi.logs import RankLogger
from kvr_mpi.model import choose_device, devices
from kvr_mpi.model.checks import check_dtype
from kvr_mpi.runtime import loading
from kvr_mpi.runtime.host_memory import free_bytes, ranks_on_device
from kvr_mpi.runtime.job_ranks import JobRanks
from kvr_mpi.runtime.prepare import _room
from kvr_mpi.transport import choose, mpi
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.mpi_query import cuda_support

CPU, CUDA_0 = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("uuids", "numbers", "sharers"),
    [
        ("abcd", "0123", [1, 1, 1, 1]),  # every rank sees all GPUs of its host
        ("abcd", "0000", [1, 1, 1, 1]),  # --gpus-per-task=1: each sees one, the first
        ("abcd", "0101", [1, 1, 1, 1]),  # two hosts of two GPUs
        ("aabb", "0011", [2, 2, 2, 2]),  # two ranks a GPU
        ("aaab", "0001", [3, 3, 3, 1]),  # fewer GPUs than ranks on one host, one rank on the other
    ],
)
def test_memory_is_shared_by_the_ranks_of_one_gpu(
    monkeypatch: pytest.MonkeyPatch, uuids: str, numbers: str, sharers: list[int]
) -> None:
    """Whatever number a rank's GPU has for it, and however many ranks its host has."""
    gib = 1 << 30
    free = {"a": 60 * gib, "b": 12 * gib, "c": 60 * gib, "d": 7 * gib}  # others use b and d, too

    spec = JobSpec.model_validate({name: {"path": "any"} for name in ("model", "documents", "output")})

    def mine() -> int:
        return int(threading.current_thread().name.removeprefix("rank "))

    def room(rank: LocalTransport) -> tuple[int, int, int]:
        gpu = torch.device("cuda", int(numbers[mine()]))
        count, loaded = ranks_on_device(rank, gpu), replace(tiny("llama-gqa"), device=gpu)
        return count, free_bytes(gpu, count), _room(spec, loaded, JobRanks(rank, rank), None)[mine()]

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[mine()]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[uuids[mine()]], 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 * gib)
    for (count, free_here, planned), gpu, sharing in zip(run_local(4, room), uuids, sharers, strict=True):
        assert (count, free_here) == (sharing, (free[gpu] + 2 * gib) // sharing)
        assert 0.88 <= planned / free_here <= 0.9, "the rest is for libraries and fragmentation"
    assert run_local(4, lambda rank: ranks_on_device(rank, CPU)) == [4] * 4


def test_bfloat16_is_refused_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for dtype, capability in ((torch.bfloat16, (8, 0)), (torch.float16, (7, 0)), (torch.float32, (6, 1))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, at=capability: at)
        check_dtype(dtype, CUDA_0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    check_dtype(torch.bfloat16, CPU)
    with pytest.raises(ModelError, match=r"Tesla T4 has compute capability 7.5.*use 'float16' or 'float32'"):
        check_dtype(torch.bfloat16, CUDA_0)


@pytest.mark.parametrize(
    ("visible", "used"),
    [
        (["AB", "AB", "AB", "AB"], "ABAB"),  # all of a host's
        (["A", "B", "C", "D"], "ABCD"),  # --gpus-per-task: each its own, as number 0
        (["AB", "CD", "AB", "CD"], "ACBD"),  # --gpu-bind=closest, ranks in turn over the sockets
        (["AB", "AC", "A", "AC"], "ACAC"),
        (["", "A", "", "A"], "-A-A"),
    ],
)
def test_ranks_take_different_gpus_whatever_each_of_them_sees(
    visible: list[str], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[str]] = {}
    monkeypatch.setattr(loading, "visible_gpus", lambda: seen[threading.get_ident()])

    def work(rank: LocalTransport) -> str:
        mine = seen[threading.get_ident()] = [*visible[rank.rank]]
        index = loading.gpu_index(rank)
        return mine[index] if mine else "-"

    assert "".join(run_local(4, work)) == used
    assert run_local(2, lambda rank: loading.gpu_index(rank, "cpu")) == [0, 0]


def test_partitions_of_one_gpu_are_one_gpu_to_nccl_and_gpus_of_two_hosts_are_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slices of MIG have ids of their own, and one place on the bus, which NCCL asks for ("Duplicate GPU")."""

    def look(device: torch.device) -> SimpleNamespace:
        place = {"pci_domain_id": 0, "pci_bus_id": (0x1B, 0x1B, 0x5D)[device.index], "pci_device_id": 0}
        return SimpleNamespace(uuid=f"MIG-{device.index}", **place)

    def view_on(host: str, number: int) -> Any:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        return choose._look(LocalTransport(), torch.device("cuda", number), {})

    monkeypatch.setattr(torch.cuda, "get_device_properties", look)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    views = [view_on("one", number) for number in range(3)]
    for ranks in ([views[0], views[2]], [views[0], view_on("two", 0)]):
        assert choose.choose("auto", ranks, in_processes=True)[0] == "nccl"
    name, why = choose.choose("auto", views, in_processes=True)
    assert name == "staged" and "ranks [0, 1] share one GPU, or have partitions (MIG) of one" in why
    assert "0000:1b:00" in why


class Driver:
    """NVIDIA's, with four GPUs."""

    def __init__(self) -> None:
        self.current: list[int] = []

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 4
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> None:  # noqa: N802
        device._obj.value = number

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:  # noqa: N802
        context._obj.value = 100 + device.value

    def cuCtxSetCurrent(self, context: Any) -> None:  # noqa: N802
        self.current.append(context.value)

    def hipGetDeviceCount(self, count: Any) -> int:  # noqa: N802
        return self.cuDeviceGetCount(count)

    def hipSetDevice(self, number: int) -> None:  # noqa: N802
        self.current.append(number)


CRAY, GTL = "MPICH_GPU_SUPPORT_ENABLED", ["/opt/lib/libmpi_cray.so.12", "/opt/lib/libmpi_gtl_cuda.so.0"]
HIP = ["/opt/lib/libmpi_gtl_hsa.so.0", "/opt/rocm/lib/libamdhip64.so.6"]


@pytest.mark.parametrize(
    ("environ", "libraries", "opened"),
    [
        ({CRAY: "1", "SLURM_LOCALID": "6"}, GTL, [102]),
        ({"MV2_USE_CUDA": "1", "MV2_COMM_WORLD_LOCAL_RANK": "3"}, [], [103]),
        ({CRAY: "1"}, GTL, []),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, [], [101]),  # UCX takes the network cards that are near this GPU
        ({CRAY: "0", "SLURM_LOCALID": "2"}, GTL, [102]),
        ({"SLURM_LOCALID": "6"}, [], []),  # more ranks than GPUs: they may compute on the cores
        ({CRAY: "1", "SLURM_LOCALID": "6"}, HIP, [2]),
        ({"SLURM_LOCALID": "1"}, HIP, [1]),
    ],
)
def test_the_ranks_own_gpu_is_current_when_mpi_starts(
    environ: dict[str, str], libraries: list[str], opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()

    def load(name: str) -> Driver:
        if libraries is HIP and "amdhip" not in name:
            raise OSError("there is no NVIDIA driver")
        return driver

    with pytest.raises(RuntimeError, match=re.escape(f"MPI opens {opened}")):
        start_mpi(environ, libraries, driver, load, monkeypatch)


@pytest.mark.parametrize(("libraries", "enabled"), [(GTL[:1], "0"), (GTL, "1"), (HIP, "1")])
def test_mpi_is_started_without_gpus_where_its_gpu_layer_is_missing(
    libraries: list[str], enabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cray's module asks for it, but mpi4py may not be linked to it; MPI_Init would abort."""
    environ, driver = {CRAY: "1", "SLURM_LOCALID": "1"}, Driver()
    with pytest.raises(RuntimeError, match="MPI opens"):
        start_mpi(environ, libraries, driver, lambda name: driver, monkeypatch)
    assert environ[CRAY] == enabled
    claims, why = cuda_support(libraries, environ)
    assert claims == (enabled == "1") and f"{CRAY}={enabled}" in why


def start_mpi(environ: Any, libraries: list[str], driver: Driver, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect up to MPI_Init, which fails and says which GPUs were opened."""

    def initialise(level: int) -> None:
        raise RuntimeError(f"MPI opens {driver.current}")

    monkeypatch.setattr(mpi.ctypes, "CDLL", load)
    monkeypatch.setattr(mpi, "loaded_libraries", lambda: libraries)
    monkeypatch.setattr(MPI, "Is_initialized", lambda: False)
    monkeypatch.setattr(MPI, "Init_thread", initialise)
    mpi.connect(environ)


@pytest.mark.parametrize(
    ("name", "environ", "set_"),
    [("nccl", {}, 1), ("staged", {}, 1), ("mpi", {}, 0), ("nccl", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, 0)],
)
def test_segments_of_memory_grow_unless_other_processes_must_open_them(
    name: str, environ: dict[str, str], set_: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An MPI that does not take GPU memory crashes at the first message; what to do instead has been said before."""
    settings, said = list[str](), list[bool]()
    caplog.set_level("INFO", "kvr_mpi")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(choose, "_look", lambda *given: choose._View("cuda", "a", True, "", True))
    monkeypatch.setattr(choose, "choose", lambda *given, **options: (name, "as requested"))
    monkeypatch.setattr(choose, "open_nccl", lambda world, device: world)
    monkeypatch.setattr(choose, "warm_up", lambda *given: said.append("'nccl' or 'staged'" in caplog.text))
    choose.open_transport(LocalTransport(), "auto", CUDA_0, environ=environ, logger=RankLogger())
    assert settings == ["expandable_segments:True"] * set_ and said == [name == "mpi"]


def test_the_device_is_the_one_that_was_chosen_and_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert [choose_device("auto", index).index for index in (1, 0)] == [1, 0] == [device.index for device in taken]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 3) == CPU
    with pytest.raises(ModelError, match="this rank sees no GPU; use 'auto' or 'cpu', or request GPUs"):
        choose_device("cuda", 0)


def test_a_gpu_that_torch_cannot_use_stops_the_job_unless_none_is_expected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A driver is there, and torch is built for CUDA, but does not start it."""

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12040).")

    monkeypatch.setattr(devices, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("auto", "cuda"):
        with pytest.raises(ModelError, match=r"CUDA 13\.0.*too old \(found version 12040\).*--index-url"):
            choose_device(name, 0)
    facts = look_at_device(0, {})
    assert "--index-url" in facts.remedy
    assert "too old (found version 12040)" in facts.unusable and not facts.error
    assert choose_device("cpu", 0) == CPU
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert choose_device("auto", 0) == CPU
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose_device("auto", 0) == CPU
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "NVIDIA_DRIVER", tmp_path / "none")
    assert choose_device("auto", 0) == CPU


def a_card(folder: Path, vendor: str, kind: str) -> None:
    (card := folder / "card0" / "device").mkdir(parents=True)
    (card / "vendor").write_text(f"{vendor}\n")
    (card / "class").write_text(f"{kind}\n")


@pytest.mark.parametrize(
    ("simds", "card", "environ", "said"),
    [
        (440, None, {}, r"AMD GPU, and torch .* is not built for it.*whl/rocm"),
        (440, None, {"ROCR_VISIBLE_DEVICES": ""}, ""),
        (0, None, {}, ""),  # the driver is there, and only processors
        (40, None, {}, ""),  # a laptop
        (None, ("0x8086", "0x038000"), {}, "Intel GPU, on which kvr-mpi does not run"),
        (None, ("0x8086", "0x030000"), {}, ""),  # a screen's
        (None, ("0x10de", "0x038000"), {}, ""),
    ],
)
def test_gpus_of_other_makers_are_not_silently_left_out(
    simds: int | None,
    card: tuple[str, str] | None,
    environ: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A job on the cores would be about 100 times slower."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("NVIDIA_DRIVER", "AMD_DRIVER"):
        monkeypatch.setattr(devices, name, tmp_path / name)
    monkeypatch.setattr(devices, "AMD_NODES", tmp_path / "nodes")
    monkeypatch.setattr(devices, "INTEL_CARDS", tmp_path / "drm")
    if simds is not None:
        (tmp_path / "AMD_DRIVER").touch()
        for number, count in enumerate((0, simds)):
            (tmp_path / "nodes" / str(number)).mkdir(parents=True)
            (tmp_path / "nodes" / str(number) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {count}\n")
    if card is not None:
        a_card(tmp_path / "drm", *card)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if said:
        for name in ("auto", "cuda"):
            with pytest.raises(ModelError, match=said):
                choose_device(name, 0)
    else:
        assert choose_device("auto", 0) == CPU
    assert choose_device("cpu", 0) == CPU
