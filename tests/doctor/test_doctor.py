"""The doctor: each check on injected facts, each way to be lost for real, and whole runs under mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from constants import TESTS

from kvr_mpi.doctor import clocks, devices, folder, links, ranks, slurm, trial, versions
from kvr_mpi.doctor.deadlines import SilentError, gather_tried, meet, within
from kvr_mpi.doctor.facts import DeviceFacts, RankFacts, look_at_rank
from kvr_mpi.doctor.findings import Finding, exit_code, fail, number_ranges, ok, to_json, to_lines, warn
from kvr_mpi.doctor.launch import launch_failure
from kvr_mpi.doctor.supervise import launcher_rank
from kvr_mpi.errors import TransportError
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.mpi import connect
from kvr_mpi.transport.mpi_query import MpiFacts, cuda_support, describe_mpi, loaded_libraries

PROGRAMS = TESTS / "programs"
MPI = MpiFacts("MPICH 5.0.2", "5.0", "THREAD_MULTIPLE", False, "MPIX_GPU_query_support says no")
GPU = DeviceFacts(built="13.0", driver=True, count=2, index=0, name="H200", uuid="a")
VERSIONS = {"python": "3.12.1", "torch": "2.13.0", "transformers": "5.23.0", "mpi4py": "4.1.2"}
SMALL = links.Effort(rounds=2, batches=1, link_bytes=4096, repeats=2, timeout_s=20.0)


def place(rank: int, host: str = "node1", **more: Any) -> RankFacts:
    base = RankFacts(rank, host, (2 * rank, 2 * rank + 1), "", DeviceFacts(), MPI, VERSIONS)
    return replace(base, **more)


def statuses(findings: list[Finding]) -> list[str]:
    return [finding.status for finding in findings]


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    assert (finding.status == "ok") == (not finding.remedy), "who complains says what to do, and nobody else"
    return finding


def test_exit_codes() -> None:
    assert exit_code([ok("links", ""), warn("links", "", "x")]) == 0
    assert exit_code([fail("folder", "", "x")]) == 78
    assert exit_code([fail("folder", "", "x"), fail("launcher", "", "x")]) == 69


def test_reports() -> None:
    findings = [ok("clocks", "one"), fail("space", "none\x1b[2J left", "make room")]
    assert to_json(findings) == {
        "ok": False,
        "findings": [
            {"check": "clocks", "status": "ok", "found": "one", "remedy": ""},
            {"check": "space", "status": "fail", "found": "none\x1b[2J left", "remedy": "make room"},
        ],
    }
    lines = to_lines(findings)
    assert lines[0].split() == ["ok", "clocks", "one"]
    assert "what to do: make room" in lines[2]
    assert lines[-1] == "1 ok, 0 to look at, 1 failed"
    assert all(line.isprintable() for line in lines)


def test_number_ranges() -> None:
    assert number_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert number_ranges([]) == ""


def test_launcher() -> None:
    two = [place(0), place(1)]
    found = only(ranks.check_launcher(two, ("mpirun", 2)))
    assert found.status == "ok"
    for word in ("2 rank(s)", "mpirun", "MPICH 5.0.2", "THREAD_MULTIPLE", "mpi4py 4.1.2"):
        assert word in found.found
    assert only(ranks.check_launcher(two, ("mpirun", 4))).status == "fail"
    other = place(1, "node2", mpi=replace(MPI, library="Open MPI v5.0.11"))
    assert "Open MPI v5.0.11 on rank(s) 1" in only(ranks.check_launcher([place(0), other], None)).found
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
    assert "3 rank(s): 2 on node1 (2 cores per rank), 1 on node2" in only(ranks.check_hosts(apart)).found


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


def test_more_threads_than_the_cores_of_a_host() -> None:
    shared = [place(rank, cores=(0, 1), threads="2") for rank in range(2)]
    assert "2 ranks on node1 would run 4 threads on 2 cores" in only(ranks.check_threads(shared)).found


def test_devices() -> None:
    apart = [place(0, device=GPU), place(1, device=replace(GPU, index=1, uuid="b"))]
    assert "rank 1: GPU 1 of 2 on node1" in only(devices.check_devices(apart)).found
    # Each task sees its own GPU as number 0: other uuids are other GPUs, and the same number elsewhere is too.
    assert statuses(devices.check_devices([place(0, device=GPU), place(1, device=replace(GPU, uuid="b"))])) == ["ok"]
    assert statuses(devices.check_devices([place(0, device=GPU), place(1, "node2", device=GPU)])) == ["ok"]
    same = [place(0, device=GPU), place(1, device=GPU)]
    assert "ranks 0-1 on node1" in only(devices.check_devices(same)).found
    assert statuses(devices.check_devices(same)) == ["fail"]
    assert statuses(devices.check_devices(same, share_gpu=True)) == ["ok"]
    assert "rank(s) 1 see no GPU" in only(devices.check_devices([place(0, device=GPU), place(1)])).found
    broken = place(1, device=DeviceFacts(error="TimeoutError: asking torch"))
    assert only(devices.check_devices([place(0, device=GPU), broken])).status == "fail"


@pytest.mark.parametrize(
    ("device", "status", "words"),
    [
        (DeviceFacts(), "ok", "no GPU"),
        (DeviceFacts(driver=True), "warn", "built without CUDA"),
        (DeviceFacts(driver=True, built="13.0", visible=""), "warn", "hides"),
        (DeviceFacts(driver=True, built="13.0"), "warn", "sees no GPU"),
    ],
)
def test_no_gpu(device: DeviceFacts, status: str, words: str) -> None:
    found = only(devices.check_devices([place(0, device=device)]))
    assert found.status == status and words in found.found


def test_allocator() -> None:
    assert devices.check_allocator([place(0)]) == []
    setting = replace(GPU, allocator="max_split_size_mb:64, expandable_segments: True")
    assert only(devices.check_allocator([place(0), place(1, device=setting)])).status == "warn"


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


def test_what_is_tried() -> None:
    claiming = place(0, device=GPU, mpi=replace(MPI, cuda=True))
    assert trial.wanted_trial("auto", [claiming]) == "cuda"
    assert trial.wanted_trial("auto", [place(0, device=GPU)]) is None
    assert trial.wanted_trial("auto", [place(0, mpi=replace(MPI, cuda=True))]) is None
    assert trial.wanted_trial("no", [claiming]) is None
    assert trial.wanted_trial("host", [place(0)]) == "host"
    assert "tried" in only(trial.check_cuda_awareness([claiming])).found
    assert "staged" in only(trial.check_cuda_awareness([place(0, device=GPU)])).found


READY = '{"ready": 0}{"ready": 1}'
RIGHT = "".join(
    json.dumps({"rank": rank, "bytes": size, "sent": rank + size, "received": 1 - rank + size})
    for rank in (0, 1)
    for size in trial.SIZES
)


@pytest.mark.parametrize(
    ("said", "then", "status", "words"),
    [
        (READY + RIGHT, "", "ok", "checksums right"),
        (READY + "[1] { noise" + RIGHT, "", "ok", "checksums right"),
        (READY, "os.abort()", "fail", "crashes (killed by SIGABRT)"),
        (READY + RIGHT, "sys.exit(3)", "fail", "crashes (exit code 3)"),
        (READY, "", "fail", "crashes (exit code 0)"),
        (READY, "threading.Event().wait()", "fail", "hangs, killed after 2 s"),
        (READY + RIGHT.replace('"received": 4096', '"received": 7'), "", "fail", "checksum of 4096 bytes is wrong"),
        ('{"ready": 0}', "sys.exit('no slots')", "warn", "did not start (exit code 1); it said: no slots"),
        ("", "threading.Event().wait()", "warn", "did not start (nothing within 2 s)"),
    ],
)
def test_how_a_trial_ends(said: str, then: str, status: str, words: str) -> None:
    program = f"import os, sys, threading; print({said!r}, flush=True); {then}"
    found = trial.try_transfers([sys.executable, "-c", program], dict(os.environ), "cuda", 2.0)
    assert found.status == status and words in found.found
    assert (found.status == "ok") == (not found.remedy)


def test_a_trial_without_its_launcher() -> None:
    assert "did not start" in trial.try_transfers(["/no/such/mpirun"], {}, "host", 1.0).found


def test_a_trial_starts_as_if_by_hand() -> None:
    environ = {"PMI_FD": "9", "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_JOB_ID": "1", "PRTE_LAUNCHED": "1"}
    kept = {"PATH": "/bin", "OMPI_MCA_pml": "ob1", "PRTE_ALLOW_RUN_AS_ROOT": "1", "CUDA_VISIBLE_DEVICES": "1"}
    assert kept.items() <= trial.trial_environment({**environ, **kept}, "/x/mpirun").items()
    assert not environ.keys() & trial.trial_environment(environ, "/x/mpirun").keys()
    assert "SLURM_JOB_ID" in trial.trial_environment(environ, "/usr/bin/srun")


def test_links_are_measured() -> None:
    cpu = torch.device("cpu")
    found = run_local(3, lambda world: links.measure_links(world, cpu, SMALL))
    assert found[2] is None
    for link in found[:2]:
        assert link is not None
        assert link["intact"] and link["latency_us"] > 0 and link["gigabytes_per_s"] > 0


class Noisy(LocalTransport):
    """A link that changes a bit of every large message."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        if tensor.nbytes > 8:
            tensor = tensor.clone()
            tensor[77] ^= 1
        return super().isend(tensor, dest, tag)


class Mute(LocalTransport):
    """A rank whose messages go nowhere."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        return super().isend(tensor, dest, tag + 1_000_000)


def test_changed_data_are_noticed() -> None:
    def work(world: LocalTransport) -> Any:
        return links.measure_links(Noisy(world._hub, world.rank), torch.device("cpu"), SMALL)

    link = run_local(2, work)[0]
    assert not link["intact"]
    described = {**link, "source": 0, "dest": 1, "source_host": "a", "dest_host": "b"}
    findings = links.check_links([described], "host")
    assert findings[-1].status == "fail" and "rank 0 (a) -> 1 (b)" in findings[-1].found
    assert exit_code(findings) == 69


def test_silence_ends() -> None:
    def links_of(world: LocalTransport) -> str:
        effort = replace(SMALL, timeout_s=0.2)
        try:
            links.measure_links(Mute(world._hub, world.rank), torch.device("cpu"), effort)
        except SilentError as error:
            return str(error)
        return ""

    assert run_local(2, links_of)[0].startswith("an answer of rank 1 did not come")

    def meeting(world: LocalTransport) -> str:
        try:
            meet(world if world.rank != 1 else Mute(world._hub, 1), 0.3)
        except SilentError as error:
            return str(error)
        return ""

    assert "rank(s) 1 were not heard of" in run_local(3, meeting)[0]


def test_links_are_compared_with_their_kind() -> None:
    def link(at: int, hosts: str, speed: float, latency_us: float = 1.0) -> dict[str, Any]:
        ends = {"source": at, "dest": at + 1, "source_host": hosts[0], "dest_host": hosts[1]}
        return {**ends, "gigabytes_per_s": speed, "latency_us": latency_us, "intact": True}

    usual = [link(0, "aa", 12.0), link(1, "ab", 2.0), link(2, "bb", 11.0)]
    (found,) = links.check_links(usual, "host")
    assert found.status == "ok", "a network is slower than memory"
    assert {"latency_us", "gigabytes_per_s"} <= set(found.measured[0])
    assert "slowest 2.00, rank 1 (a) -> 2 (b)" in found.found
    slow = links.check_links([*usual, link(3, "bb", 1.0)], "host")[1:]
    assert [(one.status, "rank 3" in one.found) for one in slow] == [("warn", True)]
    late = links.check_links([*usual, link(3, "bb", 12.0, 50.0)], "host")[1:]
    assert "50.0 us" in only(late).found
    lost = links.check_links([usual[0], {**usual[1], "error": "SilentError: no answer"}], "host")
    assert statuses(lost) == ["ok", "fail"]


def test_one_broken_rank_does_not_hold_the_others() -> None:
    def work(world: LocalTransport) -> list[dict[str, Any]]:
        return gather_tried(world, lambda: 1 // world.rank, 5.0)

    tried = run_local(3, work)[0]
    assert tried[1:] == [{"value": 1}, {"value": 0}]
    assert tried[0]["error"].startswith("ZeroDivisionError")


def test_within() -> None:
    assert within(5.0, lambda: 3, "three") == 3
    with pytest.raises(KeyError):
        within(5.0, lambda: {}["x"], "nothing")
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="a dead disk"):
        within(0.1, threading.Event().wait, "a dead disk")
    assert time.monotonic() - began < 5


def test_folder(tmp_path: Path) -> None:
    findings = folder.check_folder(tmp_path)
    assert [one.check for one in findings] == ["folder", "locking", "space"]
    assert findings[0].status == "ok"
    assert "there is no" in folder.check_folder(tmp_path / "new" / "run")[0].found
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    found = only(folder.check_folder(Path("/proc")))
    assert found.status == "fail" and "/proc cannot be written" in found.found


def test_shared_folder(tmp_path: Path) -> None:
    facts = [place(rank, f"node{rank}") for rank in range(3)]

    def work(world: LocalTransport) -> list[Finding]:
        path = tmp_path / "elsewhere" if world.rank == 2 and apart else tmp_path / "runs"
        return folder.check_shared(world, path, facts)

    apart = False
    (tmp_path / "runs").mkdir()
    assert "the same on all 3 host(s)" in only(run_local(3, work)[0]).found
    (tmp_path / "elsewhere").mkdir()
    apart = True
    found = only(run_local(3, work)[0])
    assert found.status == "fail" and "rank 2 on node2" in found.found and "rank 1" not in found.found
    assert not list((tmp_path / "runs").iterdir())


def test_clocks() -> None:
    facts = [place(0), place(1), place(2, "node2")]
    assert clocks.first_on_each_host(facts) == [2]
    assert only(clocks.check_clocks({}, facts[:2])).status == "ok"
    assert only(clocks.check_clocks({2: 0.2}, facts)).status == "ok"
    found = only(clocks.check_clocks({2: -3.5}, facts))
    assert found.status == "warn" and "node2 is 3.500 s behind node1" in found.found
    skews_s = run_local(3, lambda world: clocks.measure_skews(world, [1, 2]))[0]
    assert set(skews_s) == {1, 2} and all(abs(skew_s) < 0.5 for skew_s in skews_s.values())


NOW_S = 1_800_000_000
JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_END_TIME": str(NOW_S + 3600)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"SLURM_JOB_END_TIME": None}, ["SLURM_JOB_END_TIME is not set"]),
        ({"SLURM_JOB_END_TIME": "soon"}, ["SLURM_JOB_END_TIME='soon' is no number"]),
        ({"SLURM_JOB_END_TIME": str(NOW_S - 5)}, ["is in the past"]),
        ({"SLURM_NTASKS": "8"}, ["SLURM_NTASKS=8, but there are 4 rank(s)"]),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, []),
        ({"SLURM_RESTART_COUNT": "-1"}, ["SLURM_RESTART_COUNT='-1' is no number"]),
        ({"SLURM_JOB_NUM_NODES": "3"}, ["3 node(s), the ranks are on 2"]),
    ],
)
def test_slurm(changes: dict[str, str | None], words: list[str]) -> None:
    environ = {name: value for name, value in {**JOB, **changes}.items() if value is not None}
    findings = slurm.check_slurm(environ, 4, 2, NOW_S)
    warnings = [one for one in findings if one.status == "warn"]
    assert len(warnings) == len(words) and all(one.remedy for one in warnings)
    for word, one in zip(words, warnings, strict=True):
        assert word in one.found


def test_slurm_restarts_and_absence() -> None:
    assert "not in a SLURM job" in only(slurm.check_slurm({"SLURM_NTASKS": "8"}, 1, 1, NOW_S)).found
    assert "restarted 2 time(s)" in slurm.check_slurm({**JOB, "SLURM_RESTART_COUNT": "2"}, 4, 2, NOW_S)[0].found


def test_versions() -> None:
    ranges = versions.required_ranges()
    assert ranges["transformers"], "the package's metadata name a range"
    assert "matplotlib" not in ranges, "extras are not asked for"
    wanted = {"transformers": "<5.24,>=5.23"}
    assert statuses(versions.check_versions([place(0)], wanted)) == ["ok"]
    old = place(0, versions={**VERSIONS, "transformers": "4.57.1"})
    found = versions.check_versions([old], wanted)[1]
    assert found.status == "warn" and "4.57.1 is outside <5.24,>=5.23" in found.found
    assert "pip install" in found.remedy
    assert "differs: 4.57.1 on rank(s) 0, 5.23.0 on rank(s) 1" in versions.check_versions([old, place(1)], {})[1].found


def test_launch_failures_become_findings() -> None:
    with pytest.raises(TransportError) as caught:
        connect({"SLURM_NTASKS": "8"})
    found = launch_failure(caught.value)
    assert found.status == "fail" and "8 ranks were meant" in found.found and "srun --mpi=pmi2" in found.remedy
    assert launch_failure(TransportError("something new")).remedy


def test_launcher_rank() -> None:
    assert launcher_rank({}) == 0
    assert launcher_rank({"SLURM_PROCID": "3"}) == 3
    assert launcher_rank({"PMI_RANK": "1", "SLURM_PROCID": "0"}) == 1


def test_this_process_looks_at_itself() -> None:
    facts = look_at_rank(0, 0, {"OMP_NUM_THREADS": "2"}, with_mpi=False)
    assert facts.cores and facts.threads == "2" and facts.mpi is None
    assert facts.versions["torch"] == torch.__version__
    assert not facts.device.error


def findings_of(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    report = json.loads(run.stdout)
    for one in report["findings"]:
        assert {"check", "status", "found", "remedy"} <= one.keys()
        assert (one["status"] == "ok") == (not one["remedy"]), one
    return {one["check"]: one for one in report["findings"]}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_doctor_under_mpirun(size: int, mpirun: Any, kvr: Path, tmp_path: Path) -> None:
    tried = "host" if size == 2 else "auto"
    run = mpirun(size, [kvr, "doctor", "--json", "--output-dir", tmp_path, "--try-transfers", tried], timeout_s=90)
    assert run.returncode == 0, run.stdout + run.stderr
    found = findings_of(run)
    assert f"{size} rank(s) started by" in found["launcher"]["found"]
    chain = found["links"]["measured"]
    assert [(link["source"], link["dest"]) for link in chain] == [(at, at + 1) for at in range(size - 1)]
    assert all(link["latency_us"] > 0 and link["gigabytes_per_s"] > 0 and link["intact"] for link in chain)
    assert ("transfers" in found) == (size == 2)
    if size == 2:
        assert "checksums right" in found["transfers"]["found"]
    assert {"cores", "threads", "devices", "cuda-aware", "hdf5", "folder", "space", "clocks", "slurm"} <= found.keys()
    assert not list(tmp_path.iterdir())


def test_doctor_alone_says_what_fails(kvr: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [kvr, "doctor", "--output-dir", "/proc"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90, env=environ)
    assert run.returncode == 78, run.stderr
    lines = run.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("fail"))
    assert "folder" in lines[at] and "what to do:" in lines[at + 1]
    assert any(line.startswith("ok") and "versions" in line for line in lines), "the checks after it were made"


@pytest.mark.slow
@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
        # A launcher that MPICH does not survive joining; Open MPI does not look at it, and is alone.
        {"PMI_FD": "999", "PMI_SIZE": "2", "PMI_RANK": "0"},
    ],
)
def test_a_launcher_that_does_not_match(environ: dict[str, str], kvr: Path, tmp_path: Path) -> None:
    command, options = [kvr, "doctor", "--json"], {"capture_output": True, "text": True, "timeout": 90, "cwd": tmp_path}
    run: Any = subprocess.run(command, env={**os.environ, **environ}, check=False, **options)  # type: ignore[call-overload]
    assert run.returncode == 69, run.stdout + run.stderr
    found = findings_of(run)
    assert found["launcher"]["status"] == "fail" and "does not match" in found["launcher"]["found"]
    assert "srun --mpi=pmi2" in found["launcher"]["remedy"]
    assert found["folder"]["status"] == found["versions"]["status"] == "ok", "the other checks were made"
    second = {**os.environ, **environ, "PMI_RANK": "1"}
    other: Any = subprocess.run(command, env=second, check=False, **options)  # type: ignore[call-overload]
    assert (other.returncode, other.stdout) == (0, ""), "one speaks for all"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where", "check", "words"),
    [("hangs", "links", "links", "rank(s) 1"), ("killed", "clocks", "ranks", "rank(s) 1")],
)
def test_a_lost_rank_is_named_and_ends_all(how: str, where: str, check: str, words: str, mpirun: Any) -> None:
    run = mpirun(3, [sys.executable, PROGRAMS / "doctor_lost_rank.py", how, where, "4"], timeout_s=90)
    report = json.loads(run.stdout)
    failed = {one["check"]: one["found"] for one in report["findings"] if one["status"] == "fail"}
    assert words in failed[check] and not report["ok"]
    assert run.returncode == 69, run.stderr
    assert "versions" in {one["check"] for one in report["findings"]}
    if how == "killed":
        assert "rank 1: the step 'clocks' ends the process (signal SIGKILL)" in run.stderr
