"""How ranks were started, and on what: each check on invented facts says what it saw and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_facts import GPU, MPI, VERSIONS, only, place, statuses

from kvr_mpi.doctor import devices, folder, ranks
from kvr_mpi.doctor.facts import DeviceFacts, RankFacts
from kvr_mpi.doctor.findings import exit_code, fail, number_ranges, ok, to_lines, warn
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
    assert "not in a SLURM job" in only(ranks.check_slurm({"SLURM_NTASKS": "8"}, 1, 1, NOW_S)).found
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
        (DeviceFacts(driver=True, built="13.0", unusable="the driver is too old"), "fail", "the driver is too old"),
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
