"""An array and the gathering of its shares under a real SLURM, as `kvr sbatch` submits them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import Cluster, wait_for

from kvr_mpi import open_results
from kvr_mpi.errors import DataError

# What four small jobs take here at most, start and model included.
ARRAY_S = 300.0


def submit(cluster: Cluster, kvr: Path, job: Path, array: str = "3") -> tuple[str, str]:
    """Submit an array of three shares of seven documents; its number, and that of its gathering."""
    words = ["--ranks", "1", "--time=10", "--array", array, "--set", "documents.limit=7"]
    done = cluster.call(kvr, "sbatch", job, *words, cwd=job.parent)
    assert "at most 0.5 node hours, 0.5 core hours" in done.stderr, done.stderr
    number, gather = re.findall(r"^Submitted batch job (\d+)", done.stdout, re.MULTILINE)
    return number, gather


@pytest.mark.long
def test_an_array_is_gathered_when_it_is_over(cluster: Cluster, tmp_path: Path, job: Path, kvr: Path) -> None:
    array, gather = submit(cluster, kvr, job)
    assert cluster.wait_ended(gather, ARRAY_S) == ("COMPLETED", 0)
    assert [cluster.state(f"{array}_{task}") for task in range(3)] == ["COMPLETED"] * 3
    found = open_results(tmp_path / "out" / "all.h5")
    assert found.ids("done") == [f"doc-{n}" for n in range(7)] == open_results(tmp_path / "out").ids()
    logs = [path.read_text() for path in tmp_path.glob("kvr-job*.out")]
    assert len(logs) == 4 and all(re.search(r"used \d+ s on 1 node: .* core hours\n$", log) for log in logs), logs


@pytest.mark.long
def test_a_cancelled_task_is_missed_and_named(cluster: Cluster, tmp_path: Path, job: Path, kvr: Path) -> None:
    array, gather = submit(cluster, kvr, job, "3%1")
    cluster.call("scancel", f"{array}_2")
    assert cluster.wait_ended(gather, ARRAY_S) == ("FAILED", 65)
    (log,) = tmp_path.glob(f"kvr-job-gather-{gather}.out")
    wait_for("its last line", lambda: "used" in log.read_text(), 10)
    assert "share 2 of 3" in log.read_text()
    assert open_results(tmp_path / "out" / "all.h5").ids("done") == [f"doc-{n}" for n in range(7) if n % 3 != 2]
    with pytest.raises(DataError, match="share 2 of 3"):
        open_results(tmp_path / "out")
