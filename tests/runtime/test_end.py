"""The end of a job: what it says costs the same for any number of documents, and can be cut short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import record, result_files, write

from kvr_mpi.report.table import MAX_ROWS
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import finish_run

COUNT = MAX_ROWS + 25


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A job over more documents than the table has rows; every eighth has no text."""
    rows = tmp_path / "rows.jsonl"
    texts = ["" if number % 8 == 3 else f"Ferry {number} left." for number in range(COUNT)]
    lines = [json.dumps({"id": f"doc-{number:03d}", "text": text}) + "\n" for number, text in enumerate(texts)]
    rows.write_text("".join(lines))
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
        model = {{ path = "{tiny_model_dir}", dtype = "float32" }}
        documents = {{ path = "{rows}" }}
        prompt = {{ template = "Summarise: {{text}} Summary:" }}
        generation = {{ max_new_tokens = 1 }}
        parallel = {{ strategy = "single" }}
        output = {{ path = "{tmp_path / "out"}" }}
        """
    )
    return path


def test_the_table_ends_and_the_counts_do_not(job: Path, tmp_path: Path, run_here: Any) -> None:
    failed = len(range(3, COUNT, 8))
    for more in ([], ["--resume"]):
        done = run_here(1, [job, *more])
        assert done.returncode == 65, done.stderr
        assert f"{COUNT - failed} done, {failed} failed. Results: {tmp_path / 'out' / 'results.h5'}\n" in done.stdout
        rows = done.stdout.splitlines()[1 : MAX_ROWS + 1]
        assert all("error: " in row for row in rows[:failed]) and not any("error: " in row for row in rows[failed:])
        assert f"... and {COUNT - MAX_ROWS} more" in done.stdout and f"{failed} x " in done.stdout
    assert result_files(tmp_path / "out") == ["results.h5"], "whatever their number"


def test_a_merge_at_the_end_of_a_run_can_be_stopped(tmp_path: Path) -> None:
    write(tmp_path, 0, [record(name) for name in "abc"])
    write(tmp_path, 1, [record(name) for name in "de"])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) > 3

    assert finish_run(tmp_path, should_stop) == tmp_path
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert [each.id for each in open_results(tmp_path)] == [*"abcde"]
    assert finish_run(tmp_path) == tmp_path / "results.h5"


def test_an_empty_share_ends_well(job: Path, tmp_path: Path, run_here: Any) -> None:
    done = run_here(1, [job, "--set", "documents.limit=1", "--set", "documents.shard=1/2"])
    assert done.returncode == 0, done.stderr
    assert "0 done, 0 failed" in done.stdout
