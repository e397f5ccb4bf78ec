"""Jobs whose full chunks are computed by compiled code answer as jobs without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_jobs import answers, with_settings

from kvr_mpi.tuning import compiled

CHUNKS = ("parallel.chunk_tokens=32", "parallel.partition=even")

pytestmark = pytest.mark.skipif(compiled._LOADER is None, reason="this torch loads no compiled packages")


@pytest.mark.long
def test_compiled_once_for_all_ranks_and_jobs(
    job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVR_CACHE", str(tmp_path / "cache"))
    found = {}
    for name, ranks, settings in (
        ("plain", 1, ()),
        ("first", 2, ("parallel.compile=true",)),
        ("second", 1, ("parallel.compile=true",)),
    ):
        run = run_here(ranks, [job, *with_settings(f"output.path={tmp_path / name}", *CHUNKS, *settings)])
        assert run.returncode == 0, run.stderr
        found[name] = answers(tmp_path / name)
        assert ("compiling layers for chunks of 32 tokens" in run.stderr) == (name == "first")
        told = f"chunks of 32 tokens are computed by compiled code in 2 of 3 layers, on {ranks} of {ranks} rank(s)"
        assert (told in run.stderr) == (name != "plain")
    assert found["first"] == found["second"] == found["plain"] and len(found["plain"]) == 5


@pytest.mark.long
def test_without_a_compiler_a_job_goes_on_and_says_so(
    job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    run = run_here(2, [job, *with_settings(f"output.path={tmp_path / 'run'}", *CHUNKS, "parallel.compile=true")])
    assert run.returncode == 0, run.stderr
    assert "chunks are computed by the layers' own code on 2 of 2 rank(s)" in run.stderr
    assert len(answers(tmp_path / "run")) == 5
