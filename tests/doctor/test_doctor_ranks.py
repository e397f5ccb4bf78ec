"""What ranks are started on and what is tried between them: each check says what it saw and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_facts import GPU, MPI, VERSIONS, only, place, statuses

from kvr_mpi.doctor import devices, folder, links, ranks, steps
from kvr_mpi.doctor.deadlines import SilentError, gather_tried, wait_for_all
from kvr_mpi.doctor.facts import DeviceFacts, RankFacts
from kvr_mpi.doctor.findings import Finding, exit_code, fail, number_ranges, ok, to_lines, warn
from kvr_mpi.doctor.launch import DoctorOptions
from kvr_mpi.errors import counted
from kvr_mpi.transport.links import Effort
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.mpi import connect
from kvr_mpi.transport.mpi_query import cuda_support, describe_mpi, loaded_libraries


def test_launcher() -> None:
    two = [place(0), place(1)]
    found = only(ranks.check_launcher(two, ("mpirun", 2)))
    assert found.status == "ok"
    for word in ("2 ranks", "mpirun", "MPICH 5.0.2", "THREAD_MULTIPLE", "mpi4py 4.1.2"):
        assert word in found.found
    assert only(ranks.check_launcher(two, ("mpirun", 4))).status == "fail"
    other = place(1, "node2", mpi=replace(MPI, library="Open MPI v5.0.11"))
    assert "Open MPI v5.0.11 on rank 1" in only(ranks.check_launcher([place(0), other], None)).found
    serial = replace(MPI, thread_level="THREAD_FUNNELED")
    assert only(ranks.check_launcher([place(0, mpi=serial)], None)).status == "warn"
    assert only(ranks.check_launcher([place(0, mpi=None)], None)).status == "warn"


def test_cores() -> None:
    apart = [place(0), place(1), replace(place(2), host="node2", cores=(0, 1))]
    assert only(ranks.check_cores(apart)).status == "ok", "the same numbers on another host are other cores"
    found = only(ranks.check_cores([*apart, place(3, cores=(3, 4))]))
    assert found.status == "warn" and "ranks 1, 3 on node1 share cores 3" in found.found
    for flag in ("-bind-to core", "--bind-to core", "--cpu-bind=cores"):
        assert flag in found.remedy
    assert "3 ranks: 2 on node1 (2 cores per rank), 1 on node2" in only(ranks.check_hosts(apart)).found


@pytest.mark.parametrize(
    ("threads", "status", "words"),
    [
        (("", ""), "ok", "not set"),
        (("2", "2"), "ok", "OMP_NUM_THREADS=2"),
        (("2", "3"), "warn", "rank 1 would run 3 threads on 2 cores"),
        (("many", "2"), "warn", "'many'"),
        (("0", "2"), "warn", "'0'"),
    ],
)
def test_threads(threads: tuple[str, str], status: str, words: str) -> None:
    found = only(ranks.check_threads([place(rank, threads=value) for rank, value in enumerate(threads)]))
    assert found.status == status and words in found.found
    shared = [place(rank, cores=(0, 1), threads="2") for rank in range(2)]
    assert "2 ranks on node1 would run 4 threads on 2 cores" in only(ranks.check_threads(shared)).found


def test_a_cpu_quota_counts_as_fewer_cores() -> None:
    limited = [place(rank, threads="2", cpu_quota=2) for rank in range(2)]
    assert "2 ranks on node1 would run 4 threads on 2 cores" in only(ranks.check_threads(limited)).found
    assert "quota of 2 cores" in only(ranks.check_hosts(limited)).found


NOW_S = 1_800_000_000
JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_END_TIME": str(NOW_S + 3600)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"SLURM_JOB_END_TIME": None}, ["SLURM_JOB_END_TIME is not set"]),
        ({"SLURM_JOB_END_TIME": "soon"}, ["SLURM_JOB_END_TIME='soon' is not a number"]),
        ({"SLURM_JOB_END_TIME": str(NOW_S - 5)}, ["is in the past"]),
        ({"SLURM_NTASKS": "8"}, ["SLURM_NTASKS=8, but there are 4 ranks"]),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, []),
        ({"SLURM_RESTART_COUNT": "-1"}, ["SLURM_RESTART_COUNT='-1' is not a number"]),
        ({"SLURM_JOB_NUM_NODES": "3"}, ["3 nodes, the ranks are on 2"]),
    ],
)
def test_slurm(changes: dict[str, str | None], words: list[str]) -> None:
    environ = {name: value for name, value in {**JOB, **changes}.items() if value is not None}
    findings = ranks.check_slurm(environ, 4, 2, NOW_S)
    warnings = [one for one in findings if one.status == "warn"]
    assert len(warnings) == len(words) and all(one.remedy for one in warnings)
    for word, one in zip(words, warnings, strict=True):
        assert word in one.found
    assert "not in a batch system's job" in only(ranks.check_slurm({"SLURM_NTASKS": "8"}, 1, 1, NOW_S)).found
    pbs = {"PBS_JOBID": "12.server"}
    assert only(ranks.check_slurm(pbs, 4, 2, NOW_S)).status == "warn"
    assert "ends in" in only(ranks.check_slurm({**pbs, "KVR_END_TIME": str(NOW_S + 60)}, 4, 2, NOW_S)).found
    assert "restarted 2 times" in ranks.check_slurm({**JOB, "SLURM_RESTART_COUNT": "2"}, 4, 2, NOW_S)[0].found


def test_folder(tmp_path: Path) -> None:
    findings = folder.check_folder(tmp_path)
    assert [one.check for one in findings] == ["folder", "locking", "space"]
    assert findings[0].status == "ok"
    assert "does not exist yet" in folder.check_folder(tmp_path / "new" / "run")[0].found
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    found = only(folder.check_folder(Path("/proc")))
    assert found.status == "fail" and "/proc cannot be written" in found.found


def test_versions() -> None:
    ranges = ranks.required_ranges()
    assert ranges["transformers"], "the package's metadata name a range"
    assert "matplotlib" not in ranges, "extras are not asked for"
    wanted = {"transformers": "<5.24,>=5.23"}
    assert statuses(ranks.check_versions([place(0)], wanted)) == ["ok"]
    old = place(0, versions={**VERSIONS, "transformers": "4.57.1"})
    found = ranks.check_versions([old], wanted)[1]
    assert found.status == "warn" and "4.57.1 is outside <5.24,>=5.23" in found.found
    assert "pip install" in found.remedy
    assert "differs: 4.57.1 on rank 0, 5.23.0 on rank 1" in ranks.check_versions([old, place(1)], {})[1].found


def test_findings_become_an_exit_code_lines_for_a_terminal_and_json() -> None:
    assert exit_code([ok("links", ""), warn("links", "", "x")]) == 0
    assert exit_code([fail("folder", "", "x")]) == 78
    assert [exit_code([fail("folder", "", "x"), fail(check, "", "x")]) for check in ("launcher", "links")] == [69, 69]
    findings = [ok("clocks", "one"), fail("space", "none\x1b[2J left", "make room")]
    lines = to_lines(findings)
    assert lines[0].split() == ["ok", "clocks", "one"] and "remedy: make room" in lines[2]
    assert lines[-1] == "1 ok, 0 warnings, 1 failed" and all(line.isprintable() for line in lines)
    assert number_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


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
        (replace(ABLE, name="A100", total_bytes=40 << 30), "H200 (80 GiB): rank 0, A100 (40 GiB)"),
        (replace(ABLE, capability=(7, 0)), "rank 1: H200 is older than Ampere"),
        (replace(ABLE, free_bytes=20 << 30), "rank 1: other processes use the GPU, 20.0 of 80.0 GiB are free"),
        (replace(ABLE, has_nccl=False), "rank 1: this torch is built without NCCL"),
        (replace(ABLE, module_loading="lazy"), "rank 1: CUDA_MODULE_LOADING=LAZY"),
        (replace(ABLE, loads_directly=False), "rank 1: weights are loaded through host memory"),
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
    assert mpi.cuda is False and mpi.cuda_why.endswith("says no"), "the wheels' MPIs are built without CUDA"


# What is tried between ranks: links, clocks, a folder that all share


SMALL = Effort(rounds=2, repeats=2, first_bytes=4096, max_bytes=4096)
LONG = Effort(rounds=2, repeats=2, max_bytes=1 << 18)
GOOD: dict[str, Any] = {"value": {"latency_us": 10.0, "gigabytes_per_s": 4.0, "intact": True}}


class Noisy(LocalTransport):
    """A rank that changes a bit of every large message, and if it is in the last group a number of every long sum."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        if tensor.nbytes > 8 and tensor.dtype == torch.uint8:
            tensor = tensor.clone()
            tensor[77] ^= 1
        return super().isend(tensor, dest, tag)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        super().all_reduce(tensor)
        if tensor.nbytes > 1 << 16:  # not what they agree by
            tensor[-1] += 1

    def split(self, color: int) -> LocalTransport:
        group = super().split(color)
        return Noisy(group._hub, group.rank) if self.rank == 3 else group


class Mute(LocalTransport):
    """A rank whose messages go nowhere."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        return super().isend(tensor, dest, tag + 1_000_000)


def test_links_are_measured_and_changed_data_noticed() -> None:
    def work(world: LocalTransport) -> Any:
        mine = Noisy(world._hub, world.rank) if noisy else world
        return gather_tried(world, lambda: links.measure_chain(mine, torch.device("cpu"), SMALL, 20.0), 20.0)

    noisy = False
    first, second, last = run_local(3, work)[0]
    for link in (first["value"], second["value"]):
        assert link["intact"] and link["latency_us"] > 0 and link["gigabytes_per_s"] > 0
    assert last == {"value": None}
    noisy = True
    findings = links.check_links(run_local(2, work)[0], ["a", "b"], False)
    assert findings[-1].status == "fail" and "rank 0 (a) -> 1 (b)" in findings[-1].found
    assert exit_code(findings) == 69


def test_silence_ends() -> None:
    def heard(world: LocalTransport) -> list[str]:
        mine = Mute(world._hub, 1) if world.rank == 1 else world
        said = []
        for call, rest in ((links.measure_chain, (torch.device("cpu"), SMALL, 0.2)), (wait_for_all, (0.3,))):
            try:
                call(mine, *rest)
            except SilentError as error:
                said.append(str(error))
        return said

    of_links, of_meeting = run_local(2, heard)[0]
    assert of_links.startswith("an answer of rank 1 did not arrive") and "rank 1 did not answer" in of_meeting


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


def test_clocks() -> None:
    hosts = ["node1", "node1", "node2", "node1", "node2"]
    assert links.first_on_each_host(hosts) == [2]
    assert only(links.check_clocks({}, hosts[:2])).status == "ok"
    assert only(links.check_clocks({2: 0.2}, hosts)).status == "ok"
    found = only(links.check_clocks({2: -3.5}, hosts))
    assert found.status == "warn" and "node2 is 3.500 s behind node1" in found.found
    skews_s = run_local(3, lambda world: links.measure_clocks(world, [1, 2]))[0]
    assert set(skews_s) == {1, 2} and all(abs(skew_s) < 30 for skew_s in skews_s.values())


# Sums over groups


def examine(world: LocalTransport, size: int, hosts: str) -> Any:
    facts = [place(rank, host) for rank, host in enumerate(hosts)] if world.rank == 0 else []
    gpus = [None] * world.size
    request = DoctorOptions(effort=LONG, patience_s=20.0, tensor_parallel=size)
    (step,) = (step for step in steps.STEPS if step.check == "tensor-parallel")
    return step.work(steps.Scene(world, request, {}, facts, None, hosts, gpus))


@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (3, 3)])
def test_every_group_is_summed_and_timed(ranks: int, size: int) -> None:
    found = run_local(ranks, lambda world: examine(world, size, "a" * ranks))
    assert found[1:] == [[]] * (ranks - 1), "the first rank tells"
    finding = found[0][0]  # others, if any, say that a group is slow just now
    assert finding.status == "ok"
    assert f"{counted(ranks // size, 'tensor-parallel group')} of {size} ranks" in finding.found
    assert [one["ranks"] for one in finding.measured] == [[*range(at, at + size)] for at in range(0, ranks, size)]
    assert all(one["latency_us"] > 0 and one["gigabytes_per_s"] > 0 for one in finding.measured)


def test_a_wrong_sum_fails_and_names_the_group() -> None:
    def work(world: LocalTransport) -> Any:
        return {"value": links.measure_sums(Noisy(world._hub, world.rank), 2, torch.device("cpu"), LONG, 20.0)}

    findings = links.check_sums(run_local(4, work), ["a"] * 4, 2)
    assert [status for status in statuses(findings) if status != "warn"] == ["ok", "fail"]  # warn: slow just now
    assert any("group 1 (ranks 2-3 on a): data are corrupted" in finding.found for finding in findings)


@pytest.mark.parametrize(("ranks", "size"), [(3, 2), (1, 2)])
def test_ranks_that_groups_do_not_divide_fail(ranks: int, size: int) -> None:
    found = run_local(ranks, lambda world: examine(world, size, "a" * ranks))
    assert only(found[0]).status == "fail" and f"a multiple of {size} ranks" in found[0][0].remedy
    assert not any(run_local(ranks, lambda world: examine(world, 1, "a" * ranks))), "of no groups nothing is said"
