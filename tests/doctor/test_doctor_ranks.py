"""What ranks are started on and what is tried between them: each check says what it saw and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_facts import GPU, MPI, only, place, statuses

from kvr_mpi.doctor import devices, folder, links, ranks
from kvr_mpi.doctor.facts import DeviceFacts, RankFacts
from kvr_mpi.doctor.findings import Finding, count_line, exit_code, fail, ok, ranks_text, to_text, warn
from kvr_mpi.errors import TransportError
from kvr_mpi.transport.links import Effort
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.mpi import connect
from kvr_mpi.transport.mpi_query import cuda_support, describe_mpi, loaded_libraries


def test_launcher() -> None:
    two = [place(0), place(1)]
    found = only(ranks.check_launcher(two, ("mpirun", 2)))
    assert found.status == "ok"
    for word in ("2 ranks", "mpirun", "2 on node1", "MPICH 5.0.2", "THREAD_MULTIPLE", "mpi4py 4.1.2"):
        assert word in found.found
    assert only(ranks.check_launcher(two, ("mpirun", 4))).status == "fail"
    other = place(1, "node2", mpi=replace(MPI, library="Open MPI v5.0.11"))
    assert "Open MPI v5.0.11 on rank 1" in only(ranks.check_launcher([place(0), other], None)).found
    serial = replace(MPI, thread_level="THREAD_FUNNELED")
    assert only(ranks.check_launcher([place(0, mpi=serial)], None)).status == "warn"
    assert only(ranks.check_launcher([place(0, mpi=None)], None)).status == "warn"


NOW_S = 1_800_000_000
JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_END_TIME": str(NOW_S + 3600)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"SLURM_JOB_END_TIME": None}, ["its end is not known"]),
        ({"SLURM_JOB_END_TIME": "soon"}, ["its end is not known"]),
        ({"SLURM_JOB_END_TIME": str(NOW_S - 5)}, ["is in the past"]),
        ({"SLURM_NTASKS": "8"}, ["SLURM_NTASKS=8, but there are 4 ranks"]),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, []),
        ({"SLURM_JOB_NUM_NODES": "3"}, ["SLURM_JOB_NUM_NODES=3, but the ranks are on 2 hosts"]),
    ],
)
def test_batch_systems(changes: dict[str, str | None], words: list[str]) -> None:
    environ = {name: value for name, value in {**JOB, **changes}.items() if value is not None}
    findings = ranks.check_scheduler(environ, 4, 2, NOW_S)
    warnings = [one for one in findings if one.status == "warn"]
    assert len(warnings) == len(words) and all(one.remedy for one in warnings)
    for word, one in zip(words, warnings, strict=True):
        assert word in one.found
    assert "not in a batch system's job" in only(ranks.check_scheduler({"SLURM_NTASKS": "8"}, 1, 1, NOW_S)).found
    pbs = {"PBS_JOBID": "12.server"}
    assert only(ranks.check_scheduler(pbs, 4, 2, NOW_S)).status == "warn"
    assert "in 60.0 s" in only(ranks.check_scheduler({**pbs, "KVR_END_TIME": str(NOW_S + 60)}, 4, 2, NOW_S)).found


def test_folder(tmp_path: Path) -> None:
    findings = folder.check_folder(tmp_path)
    assert [one.check for one in findings] == ["folder", "space"]
    assert findings[0].status == "ok"
    assert "does not exist yet" in folder.check_folder(tmp_path / "new" / "run")[0].found
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    found = only(folder.check_folder(Path("/proc")))
    assert found.status == "fail" and "/proc cannot be written" in found.found


def test_findings_become_an_exit_code_lines_for_a_terminal_and_json() -> None:
    assert exit_code([ok("links", ""), warn("links", "", "x")]) == 0
    assert exit_code([fail("folder", "", "x")]) == 78
    assert [exit_code([fail("folder", "", "x"), fail(check, "", "x")]) for check in ("launcher", "links")] == [69, 69]
    findings = [ok("clocks", "one"), fail("space", "none\x1b[2J left", "make room")]
    lines = "\n".join(map(to_text, findings)).splitlines()
    assert lines[0].split() == ["ok", "clocks", "one"] and "remedy: make room" in lines[2]
    assert all(line.isprintable() for line in lines) and count_line(findings) == "1 ok, 0 warnings, 1 failed"
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8" and ranks_text([1]) == "rank 1"


# GPUs, their allocator and an MPI that knows them


@pytest.mark.parametrize(
    ("second", "status", "words"),
    [
        (place(1, device=replace(GPU, index=1, uuid="b")), "ok", "rank 1: GPU 1 of 2 on node1"),
        # Each task sees its own GPU as number 0: other uuids are other GPUs, and the same number elsewhere is too.
        (place(1, device=replace(GPU, uuid="b")), "ok", "rank 1"),
        (place(1, "node2", device=GPU), "ok", "node2"),
        (place(1, device=GPU), "fail", "ranks 0-1 on node1"),
        (place(1), "fail", "rank 1: no GPU, although"),
        (place(1, device=DeviceFacts(error="TimeoutError: asking torch")), "fail", "TimeoutError: asking torch"),
    ],
)
def test_devices(second: RankFacts, status: str, words: str) -> None:
    facts = [place(0, device=GPU), second]
    found = only(devices.check_devices(facts))
    assert found.status == status and words in found.found
    if second.device == GPU:
        assert statuses(devices.check_devices(facts, share_gpu=True)) == ["ok"]


@pytest.mark.parametrize(
    ("device", "status", "words"),
    [
        (DeviceFacts(), "ok", "no GPU"),
        (DeviceFacts(driver=True), "warn", "built without CUDA"),
        (DeviceFacts(driver=True, built="13.0", visible=""), "warn", "hides"),
        (
            DeviceFacts(driver=True, built="13.0", unusable="the driver is too old", remedy="install another torch"),
            "fail",
            "the driver is too old",
        ),
    ],
)
def test_no_gpu(device: DeviceFacts, status: str, words: str) -> None:
    found = only(devices.check_devices([place(0, device=device)]))
    assert found.status == status and words in found.found


ABLE = replace(GPU, capability=(9, 0), total_bytes=80 << 30, free_bytes=79 << 30)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (replace(ABLE, capability=(7, 0)), "rank 1: H200 is older than Ampere"),
        (replace(ABLE, free_bytes=20 << 30), "rank 1: other processes use the GPU, 20.0 of 80.0 GiB are free"),
        (replace(ABLE, allocator="max_split_size_mb:64, expandable_segments: True"), "rank 1: PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_what_a_gpu_cannot_do(second: DeviceFacts, words: str) -> None:
    found = only(devices.check_abilities([place(0, device=ABLE), place(1, device=second)]))
    assert found.status == "warn" and words in found.found and found.remedy


def test_cuda_support() -> None:
    assert cuda_support([], {})[0] is None
    assert cuda_support(["/x/libmpi_cray.so"], {"MPICH_GPU_SUPPORT_ENABLED": "1"})[0] is False
    assert cuda_support(["/x/libmpi_gtl_cuda.so.0"], {"MPICH_GPU_SUPPORT_ENABLED": "1"})[0] is True
    assert cuda_support([], {"I_MPI_OFFLOAD": "1"})[0] is True
    assert cuda_support([], {"I_MPI_OFFLOAD": "0"})[0] is None
    connect({})
    assert loaded_libraries()
    mpi = describe_mpi({})
    assert mpi is not None and mpi.thread_level == "THREAD_MULTIPLE"
    assert mpi.cuda is False and mpi.cuda_why.endswith("returns no"), "the wheels' MPIs are built without CUDA"


# What is tried between ranks: links, a folder that all share


SMALL = Effort(rounds=2, repeats=2, first_bytes=4096, max_bytes=4096)
GOOD: dict[str, Any] = {"value": {"latency_us": 10.0, "gigabytes_per_s": 4.0, "intact": True}}


class Noisy(LocalTransport):
    """A rank that changes a bit of every large message."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        if tensor.nbytes > 8 and tensor.dtype == torch.uint8:
            tensor = tensor.clone()
            tensor[77] ^= 1
        return super().isend(tensor, dest, tag)


class Mute(LocalTransport):
    """A rank whose messages go nowhere."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        return super().isend(tensor, dest, tag + 1_000_000)


def test_links_are_measured_and_changed_data_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "EFFORT", SMALL)

    def work(world: LocalTransport) -> list[Finding]:
        mine = Noisy(world._hub, world.rank) if noisy else world
        return links.check_chain(mine, "abc"[: world.size], [None] * world.size)

    noisy = False
    found, *_ = run_local(3, work)[0]  # a link may be slow on a busy machine
    assert found.status == "ok" and len(found.measured) == 2
    assert all(link["intact"] and link["latency_us"] > 0 and link["gigabytes_per_s"] > 0 for link in found.measured)
    noisy = True
    findings = run_local(2, work)[0]
    assert findings[-1].status == "fail" and "rank 0 (a) -> 1 (b)" in findings[-1].found
    assert exit_code(findings) == 69


def test_silence_of_a_neighbor_ends_the_measurement() -> None:
    def heard(world: LocalTransport) -> str:
        mine = Mute(world._hub, 1) if world.rank == 1 else world
        with pytest.raises(TransportError) as raised:
            links.measure_chain(mine, torch.device("cpu"), SMALL, 0.2)
        return str(raised.value)

    assert run_local(2, heard)[0].startswith("an answer of rank 1 did not arrive")


def test_links_are_compared_with_their_kind() -> None:
    def link(speed: float, latency_us: float = 1.0) -> dict[str, Any]:
        return {"value": {**GOOD["value"], "gigabytes_per_s": speed, "latency_us": latency_us}}

    usual, last = [link(12.0), link(2.0), link(11.0)], {"value": None}
    (found,) = links.check_links([*usual, last], "aabb", False)
    assert found.status == "ok", "a network is slower than memory"
    assert {"latency_us", "gigabytes_per_s", "source", "dest"} <= set(found.measured[0])
    assert "slowest 2.00, rank 1 (a) -> 2 (b)" in found.found
    slow = links.check_links([*usual, link(1.0), last], "aabbb", False)[1:]
    assert [(one.status, "rank 3" in one.found) for one in slow] == [("warn", True)]
    late = links.check_links([*usual, link(12.0, 50.0), last], "aabbb", False)[1:]
    assert "50.0 us" in only(late).found
    lost = links.check_links([usual[0], {"error": "SilentError: no answer"}, last], "aaa", False)
    assert statuses(lost) == ["ok", "fail"]
    silent = links.check_links([usual[0], {"error": "SilentError: no answer"}], "aa", False)
    assert statuses(silent) == ["fail"], "the last rank has no link of its own to tell it with"


def test_shared_folder(tmp_path: Path) -> None:
    facts = [place(rank, f"node{rank}") for rank in range(3)]

    def work(world: LocalTransport) -> list[Finding]:
        path = tmp_path / "elsewhere" if world.rank == 2 and apart else tmp_path / "runs"
        return folder.check_shared(world, path, facts)

    apart = False
    (tmp_path / "runs").mkdir()
    assert "the same on all 3 hosts" in only(run_local(3, work)[0]).found
    (tmp_path / "elsewhere").mkdir()
    apart = True
    found = only(run_local(3, work)[0])
    assert found.status == "fail" and "rank 2 on node2" in found.found and "rank 1" not in found.found
    assert not list((tmp_path / "runs").iterdir())
