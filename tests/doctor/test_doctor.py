"""The doctor as a user runs it: whole runs under mpirun, and each way to lose a rank for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from constants import TESTS
from made_jobs import with_settings

from kvr_mpi.cli.files import find_shipped


def findings_of(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    report = json.loads(run.stdout)
    for one in report["findings"]:
        assert {"check", "status", "found", "remedy"} <= one.keys()
        assert (one["status"] == "ok") == (not one["remedy"]), one
    # A check may warn after its first finding: of a link slower than the others, on a loaded machine.
    return {one["check"]: one for one in reversed(report["findings"])}


@pytest.mark.slow
def test_doctor_under_mpirun(mpirun: Any, kvr: Path, tmp_path: Path) -> None:
    run = mpirun(3, [kvr, "doctor", "--json"], cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    found = findings_of(run)
    assert "3 ranks, started by" in found["launcher"]["found"]
    chain = found["links"]["measured"]
    assert [(link["source"], link["dest"]) for link in chain] == [(0, 1), (1, 2)]
    assert all(link["latency_us"] > 0 and link["gigabytes_per_s"] > 0 and link["intact"] for link in chain)
    assert {"devices", "folder", "space", "shared folder", "scheduler"} <= found.keys()
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
def test_doctor_alone_says_what_fails(kvr: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [kvr, "doctor", find_shipped("jobs", "demo.toml"), *with_settings("output.path=/proc/run")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environ)
    assert run.returncode == 78, run.stderr
    lines = run.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("fail"))
    assert "folder" in lines[at] and "remedy:" in lines[at + 1]
    assert any(line.startswith("ok") and "scheduler" in line for line in lines), "the checks after it were made"


@pytest.mark.slow
@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},  # MPICH would abort; Open MPI does not look at it
    ],
)
def test_a_launcher_that_does_not_match(environ: dict[str, str], kvr: Path) -> None:
    command, given = [kvr, "doctor", "--json"], {**os.environ, **environ}
    run = subprocess.run(command, env=given, capture_output=True, text=True, timeout=90, check=False)
    assert run.returncode == 69, run.stdout + run.stderr
    found = findings_of(run)
    assert found["launcher"]["status"] == "fail" and "does not match" in found["launcher"]["found"]
    assert found["folder"]["status"] == found["devices"]["status"] == "ok", "the other checks were made"
    given |= {"PMI_RANK": "1", "OMPI_COMM_WORLD_RANK": "1"}
    other = subprocess.run(command, env=given, capture_output=True, text=True, timeout=90, check=False)
    assert (other.returncode, other.stdout) == (0, ""), "one speaks for all"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "killed"])
def test_a_lost_rank_ends_all_after_what_was_found(how: str, mpirun: Any) -> None:
    run = mpirun(3, [sys.executable, TESTS / "programs" / "doctor_lost_rank.py", how, "15"])
    assert run.returncode != 0
    shown = {line[6:].split("  ")[0] for line in run.stdout.splitlines() if line.startswith(("ok", "warn", "fail"))}
    assert {"launcher", "folder", "scheduler", "shared folder"} <= shown
    steps = [line for line in run.stderr.splitlines() if line.startswith("kvr doctor: ")]
    assert any(line == "kvr doctor: links" for line in steps)
    if how == "hangs":
        assert any("rank 1: the step 'links' hangs" in line for line in steps), run.stderr
