"""The end of a job: what it says costs the same for any number of documents, and can be cut short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from made_runs import record, result_files, write

from kvr_mpi.report.table import MAX_ROWS
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import finish_run

COUNT = MAX_ROWS + 25


def test_the_table_ends_and_the_counts_do_not(documents: Any, run_job: Any) -> None:
    """Of more documents than the table has rows; every eighth has no text."""
    failed = len(range(3, COUNT, 8))
    texts = {f"doc-{n:03d}": "" if n % 8 == 3 else f"Ferry {n} left." for n in range(COUNT)}
    settings = documents(texts), "generation.max_new_tokens=1", "parallel.strategy=single"
    first: dict[str, Record] = {}
    for words in ([], ["--resume"]):
        done = run_job(1, *settings, to="out", words=words, code=65)
        assert f"{COUNT - failed} done, {failed} failed. Results: {done.folder / 'results.h5'}\n" in done.out
        first = done.records if not words else first
        rows = done.out.splitlines()[1 : MAX_ROWS + 1]
        assert all("error: " in row for row in rows[:failed]) and not any("error: " in row for row in rows[failed:])
        assert f"... and {COUNT - MAX_ROWS} more" in done.out and f"{failed} x " in done.out
    assert result_files(done.folder) == ["results.h5"], "whatever their number"
    assert done.records == first, "nothing is repeated"
    empty = run_job(1, *settings, "documents.limit=1", "documents.shard=1/2")
    assert "0 done, 0 failed" in empty.out


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
