"""What a job with keys and values says it will write, and that it does not begin what the disk has no room for."""

from __future__ import annotations

import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

import kvr_mpi.setup.stored_size as stored_size
from kvr_mpi.store.results import open_results

KV = ["--set", "output.kv=true"]
Usage = namedtuple("Usage", "total used free")


def test_the_forecast_is_what_is_written(job: Path, tmp_path: Path, run_here: Any) -> None:
    run = run_here(2, [job, *KV])
    assert run.returncode == 0, run.stderr
    told = re.search(r"of 5 documents: about ([\d.]+) KiB; [\d.]+ [GT]iB are free", run.stderr)
    assert told is not None, run.stderr
    # 3 layers, 2 heads of 8 elements, keys and values, float32; of the last token there are none.
    tokens = sum(record.prompt_tokens + record.new_tokens for record in open_results(tmp_path / "out"))
    assert float(told[1]) == pytest.approx(tokens * 3 * 2 * 8 * 2 * 4 / 1024, rel=0.05)


def test_a_job_that_would_fill_the_disk_is_refused_before_it_begins(
    job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_size.shutil, "disk_usage", lambda path: Usage(1 << 40, 1 << 40, 100_000))
    run = run_here(2, [job, *KV])
    assert run.returncode == 78 and "not enough space" in run.stderr and "98 KiB are free" in run.stderr
    assert not list((tmp_path / "out").glob("*.h5"))


def test_a_folder_that_goes_while_a_job_begins_is_said_so(
    job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(path: Path) -> Usage:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(stored_size.shutil, "disk_usage", gone)
    run = run_here(2, [job, *KV])
    assert run.returncode == 78 and "it existed when this job began" in run.stderr
    assert "Traceback" not in run.stderr
