"""Beginning and going on: what is refused, what is left alone, and what a resume knows."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from made_runs import HEADER, IDENTITY, NAMES, corpus_of, record, result_files, resume, take, write

from kvr_mpi.disk import RUN_FILE
from kvr_mpi.documents import scan_corpus
from kvr_mpi.errors import NOT_NOW, DataError, OutputError
from kvr_mpi.store.log import Header
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.run import differing_settings, known_corpus
from kvr_mpi.store.volumes import RESULTS, SCHEMA_VERSION


def begin(folder: Path, *records: Any, **options: Any) -> None:
    """Begin a run, and write some documents."""
    run = take(folder, mode="new", **options)
    assert not run.done and not run.failed
    write(folder, 0, records, header=options.get("header", HEADER))
    run.lock.release()


def test_a_folder_is_begun_once_and_may_be_begun_again_before_its_first_document(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert known_corpus(tmp_path) is None
    run = take(folder, mode="new")
    assert (run.done, run.failed, run.lock.number) == (set(), set(), 1) and known_corpus(folder) == corpus_of(NAMES)
    run.lock.release()
    for unfinished in (f"{RESULTS}.part", f"{RESULTS}.part-{'0f' * 8}", f"{RUN_FILE}.part-{'1e' * 8}"):
        (folder / unfinished).write_bytes(b"half")
    other = Header({"b": (1, 2.5, None, True), "a": {"ü": "\n", "z": 1e-17}}, {})
    begin(folder, record("x"), corpus=corpus_of("xyz"), header=other)
    assert result_files(folder) == ["log-0002-0000.jsonl"] and known_corpus(folder) == corpus_of("xyz")
    # What JSON changes (order of keys, tuples) does not look like another run.
    for same in (other, Header({"a": {"z": 1e-17, "ü": "\n"}, "b": [1, 2.5, None, True]}, {})):
        assert resume(folder, corpus=corpus_of("xyz"), header=same)[0] == {"x"}
    with pytest.raises(OutputError, match=r"--resume.*--overwrite") as caught:
        take(folder, mode="new")
    assert str(folder) in str(caught.value)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot be written"):
        take(tmp_path / "file" / "run")


def test_failed_documents_stay_unless_they_are_to_be_tried_again(tmp_path: Path) -> None:
    begin(tmp_path, record("a"), record("b", "error"), record("dir/c"))
    write(tmp_path, 1, [record("d", "error"), record("..")])
    for number, file in enumerate(sorted(tmp_path.iterdir())):  # clocks that jump change nothing
        os.utime(file, (10**9 * (number % 3), 4 * 10**9 - 10**9 * (number % 3)))
    for _ in range(2):
        assert resume(tmp_path)[:2] == ({"a", "dir/c", ".."}, {"b", "d"})
        assert resume(tmp_path, retry_failed=True)[:2] == ({"a", "dir/c", ".."}, set())
        merge_run(tmp_path)
    write(tmp_path, 0, [record("b"), record("d", "error", "again")])
    assert resume(tmp_path)[:2] == ({"a", "b", "dir/c", ".."}, {"d"})
    found = {each.id: each for each in open_results(tmp_path)}
    assert found["d"].answer == "again" and found["b"].status == "done"


def test_overwrite_deletes_our_files_and_no_others(tmp_path: Path) -> None:
    begin(tmp_path, record("a"))
    merge_run(tmp_path)
    write(tmp_path, 0, [record("b")], kv=True)
    (volume,) = tmp_path.glob("kv-*.h5")
    volume.write_bytes(volume.read_bytes()[:1000])
    assert any("damaged" in line for line in resume(tmp_path)[2])
    others = [tmp_path / name for name in ("notes.txt", "h5", "sub/results.h5", "measurements.h5", "results.h5/notes")]
    (tmp_path / RESULTS).unlink()
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
    done, _, said = resume(tmp_path)
    assert not done and any("measurements.h5" in line and "left alone" in line for line in said)
    run = take(tmp_path, mode="overwrite")
    assert run.done == set() and list(tmp_path.glob("*.jsonl")) == [] and list(tmp_path.glob("*damaged*")) == []
    assert result_files(tmp_path) == ["measurements.h5", RESULTS]
    assert all(other.read_text() == "mine" for other in others)
    run.lock.release()


@pytest.mark.parametrize("name", [RESULTS, "kv-0001-0000-00000.h5"])
@pytest.mark.parametrize("mode", ["resume", "overwrite"])
def test_a_foreign_file_with_our_name_stops_a_job_and_is_not_touched(tmp_path: Path, name: str, mode: str) -> None:
    with h5py.File(tmp_path / name, "w") as file:
        file["measurements"] = np.arange(10.0)
    content = (tmp_path / name).read_bytes()
    with pytest.raises(DataError, match=f"{name}.*not written by kvr-mpi"):
        take(tmp_path, mode=mode)
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("mode", ["resume", "overwrite"])
def test_a_file_that_a_rank_did_not_get_to_write_into_is_removed(tmp_path: Path, mode: str) -> None:
    """A process that ends in an orderly way closes its HDF5 files, also one that it has just created."""
    begin(tmp_path, record("a"))
    h5py.File(tmp_path / "kv-0001-0000-00000.h5", "w").close()
    run = take(tmp_path, mode=mode)
    assert run.done == ({"a"} if mode == "resume" else set()) and not list(tmp_path.glob("kv-*"))
    run.lock.release()


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (
            {"header": Header({**IDENTITY, "model": "f"}, HEADER.model)},
            r'with other settings \(model was "0123abcd", is "f"\)',
        ),
        (
            {"header": Header({**IDENTITY, "kv": True, "generation": {"max_new_tokens": 60, "n": None}}, HEADER.model)},
            r"with other settings \(generation.max_new_tokens was 96, is 60; output.kv was false, is true\)",
        ),
        ({"corpus": corpus_of([*NAMES, "new1", "new2"])}, r"2 new \(new1, new2\)"),
        ({"corpus": corpus_of(NAMES[1:])}, r"1 gone \(a\)"),
        ({"corpus": corpus_of(NAMES, b="another text", d="too")}, r"2 changed \(b, d\)"),
        (
            {"corpus": corpus_of([f"n{number}" for number in range(9)])},
            r"10 gone .* \.\.\.\), 9 new \(n0, n1, .* \.\.\.\)",
        ),
    ],
)
def test_another_job_is_refused_by_name(tmp_path: Path, options: dict[str, Any], shown: str) -> None:
    begin(tmp_path, record("a"))
    for _ in range(2):
        with pytest.raises(OutputError, match=f"cannot resume.*{shown}"):
            take(tmp_path, **options)
        assert known_corpus(tmp_path) == corpus_of(NAMES) and list(open_results(tmp_path)) == [record("a")]
        assert resume(tmp_path, corpus=corpus_of(reversed(NAMES)))[0] == {"a"}  # their order does not matter
        take(tmp_path).lock.release()
        merge_run(tmp_path)
    (tmp_path / RUN_FILE).unlink()
    if "header" in options:
        with pytest.raises(OutputError, match=f"cannot resume.*{shown}"):
            take(tmp_path, **options)


def test_long_settings_are_shown_where_they_differ() -> None:
    before, now = ({"prompt": {"template": "a" * 5000 + word + "b" * 5000}} for word in ("ONE", "TWO"))
    ((key, was, is_now),) = differing_settings(before, now)
    assert key == "prompt.template" and "aONEb" in was and "aTWOb" in is_now and len(was) == len(is_now) < 300
    (_, none, short), *_ = differing_settings({}, {"kv": True, "other": 1})
    assert (none, short) == ("not set", "true")


@pytest.mark.parametrize(("version", "remedy"), [(SCHEMA_VERSION + 1, "upgrade"), (SCHEMA_VERSION - 1, "again")])
def test_another_schema_is_refused_and_not_touched(tmp_path: Path, version: int, remedy: str) -> None:
    write(tmp_path, 0, [record("a")])
    result = merge_run(tmp_path)
    with h5py.File(result, "a") as file:
        file.attrs["schema_version"] = version
    content = result.read_bytes()
    with pytest.raises(DataError, match=f"schema version {version};.*version {SCHEMA_VERSION} only: .*{remedy}"):
        take(tmp_path)
    assert result.read_bytes() == content


@pytest.mark.parametrize("share", [slice(1, None, 2), slice(1, None, 3)])
def test_another_share_is_no_resume(tmp_path: Path, share: slice) -> None:
    first = slice(0, None, 2)
    begin(tmp_path, *map(record, NAMES[first][:2]), share=first)
    with pytest.raises(OutputError, match=r"2 document.*documents\.shard = '0/2', this job has documents\.shard = '1/"):
        take(tmp_path, share=share)
    assert resume(tmp_path, share=first)[0] == set(NAMES[first][:2])
    assert resume(tmp_path)[0] == set(NAMES[first][:2])  # of all documents


def test_a_document_that_can_be_read_by_now_is_no_other_corpus(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("text")
    (texts / "b.txt").write_bytes(b"\xff\xfe not UTF-8")
    begin(tmp_path / "run", record("a.txt"), record("b.txt", "error"), corpus=scan_corpus([str(texts)]))
    (texts / "b.txt").write_text("mended")
    mended = scan_corpus([str(texts)], known=known_corpus(tmp_path / "run"))
    assert mended.entries[1].error is None
    assert resume(tmp_path / "run", corpus=mended, retry_failed=True)[:2] == ({"a.txt"}, set())
    (texts / "a.txt").write_bytes(b"\xff now it is not")
    with pytest.raises(OutputError, match=r"1 changed \(a.txt\)"):
        resume(tmp_path / "run", corpus=scan_corpus([str(texts)]))


def test_a_job_writes_beside_earlier_ones_even_if_their_locks_were_deleted(tmp_path: Path) -> None:
    begin(tmp_path, record("a"))
    for lock in tmp_path.glob(".lock-*"):
        lock.unlink()
    run = take(tmp_path)
    assert run.lock.number == 2 and run.done == {"a"}
    write(tmp_path, 0, [record("b")])
    run.lock.release()
    assert [each.id for each in open_results(tmp_path)] == ["a", "b"]


def test_documents_that_could_not_be_read_for_the_moment_are_tried_again_unasked(tmp_path: Path) -> None:
    late = Record("b", "error", error=f"{NOT_NOW}b.txt: {os.strerror(errno.ESTALE)}")
    begin(tmp_path, record("a"), late, record("c", "error"))
    assert resume(tmp_path)[:2] == ({"a"}, {"c"})
    write(tmp_path, 1, [record("b")])
    assert resume(tmp_path)[:2] == ({"a", "b"}, {"c"})
