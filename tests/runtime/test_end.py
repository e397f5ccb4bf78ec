"""The end of a job: what it says comes from the ledgers, so that it costs the same for any number of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import record, result_files, write

import kvr_mpi.store.folder as folder_module
import kvr_mpi.store.merge as merge_module
from kvr_mpi.report.table import MAX_ROWS
from kvr_mpi.store.ledger import read_ledger
from kvr_mpi.store.merge import merge_run
from kvr_mpi.store.results import open_results

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


def test_no_more_records_are_read_than_are_shown(
    job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_module, "MERGE_MAX_DOCUMENTS", 10, raising=False)
    read: list[str] = []
    real = folder_module.read_record

    def counted(group: Any) -> Any:
        read.append(group.name)
        return real(group)

    monkeypatch.setattr(folder_module, "read_record", counted)
    failed = len(range(3, COUNT, 8))
    for more in ([], ["--resume"]):
        read.clear()
        done = run_here(1, [job, *more])
        assert done.returncode == 65, done.stderr
        assert 0 < len(read) <= MAX_ROWS
        assert f"{COUNT - failed} done, {failed} failed. Results: {tmp_path / 'out'}\n" in done.stdout
        rows = done.stdout.splitlines()[1 : MAX_ROWS + 1]
        assert all("error: " in row for row in rows[:failed]) and not any("error: " in row for row in rows[failed:])
        assert f"... and {COUNT - MAX_ROWS} more" in done.stdout and f"{failed} x " in done.stdout
    assert "results.h5" not in result_files(tmp_path / "out")  # too many documents to be copied at the end
    lines = [lines[-1] for lines in read_ledger(tmp_path / "out").shards.values()]
    assert sum(len(line.reasons) for line in lines) == failed


def test_a_merge_at_the_end_of_a_run_can_be_stopped(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record(name) for name in "abc"])
    write(tmp_path, "0001", [record(name) for name in "de"])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) > 3

    assert merge_run(tmp_path, should_stop) == tmp_path
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert [each.id for each in open_results(tmp_path)] == [*"abcde"]
    assert merge_run(tmp_path) == tmp_path / "results.h5"


def test_an_empty_share_ends_well(job: Path, tmp_path: Path, run_here: Any) -> None:
    done = run_here(1, [job, "--set", "documents.limit=1", "--set", "documents.shard=1/2"])
    assert done.returncode == 0, done.stderr
    assert "0 done, 0 failed" in done.stdout
