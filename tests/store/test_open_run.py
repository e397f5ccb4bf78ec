"""Beginning and going on: what is refused, what is left alone, and what a resume knows."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from faulty_calls import Faults, faults
from made_runs import HEADER, IDENTITY, NAMES, corpus_of, part_of, record, result_files, resume, take, write

from kvr_mpi.disk import RUN_FILE
from kvr_mpi.documents import Corpus, scan_corpus
from kvr_mpi.errors import NOT_NOW, DataError, OutputError
from kvr_mpi.store.lock import this_process
from kvr_mpi.store.log import SCHEMA_VERSION, Header, seal
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.run import differing_settings, is_of_job, read_run_file
from kvr_mpi.store.status import read_status
from kvr_mpi.store.volumes import RESULTS


def documents_of(folder: Path) -> int:
    run = read_run_file(folder)
    assert run is not None
    return run.documents


def begin(folder: Path, *records: Any, **options: Any) -> None:
    """Begin a run, and write some documents."""
    run = take(folder, **options)
    assert not run.done and not run.failed
    write(folder, 0, records, header=options.get("header", HEADER))
    run.lock.release()


def test_a_folder_is_begun_once_and_may_be_begun_again_before_its_first_document(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert read_run_file(tmp_path) is None
    run = take(folder)
    assert (run.done, run.failed, run.lock.number) == (set(), set(), 1) and documents_of(folder) == len(NAMES)
    run.lock.release()
    for unfinished in (f"{RESULTS}.part-{'0f' * 8}", f"{RUN_FILE}.part-{'1e' * 8}"):
        (folder / unfinished).write_bytes(b"half")
    other = Header({"b": (1, 2.5, None, True), "a": {"ü": "\n", "z": 1e-17}}, HEADER.model)
    begin(folder, record("x"), corpus=corpus_of("xyz"), header=other)
    assert result_files(folder) == ["log-0002-0000.jsonl"] and documents_of(folder) == 3
    # What JSON changes (order of keys, tuples) does not look like another run.
    for same in (other, Header({"a": {"z": 1e-17, "ü": "\n"}, "b": [1, 2.5, None, True]}, HEADER.model)):
        assert resume(folder, corpus=corpus_of("xyz"), header=same)[0] == {"x"}
    with pytest.raises(OutputError, match=r"--overwrite") as caught:
        take(folder)
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


def test_a_requeued_job_deletes_nothing_while_it_is_unknown_whose_results_they_are(tmp_path: Path) -> None:
    assert not is_of_job(tmp_path, "17")
    begin(tmp_path, record("a"), owner=this_process("17"))
    assert [is_of_job(tmp_path, job) for job in ("17", "18", "")] == [True, False, False]
    file = tmp_path / RUN_FILE
    file.write_bytes(file.read_bytes()[:-20])
    assert [is_of_job(tmp_path, job) for job in ("17", "18", "")] == [True, True, False]
    file.unlink()
    assert not is_of_job(tmp_path, "17"), "it is the first that --overwrite deletes"


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
    run = take(tmp_path, overwrite=True)
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
        take(tmp_path, overwrite=mode == "overwrite")
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("mode", ["resume", "overwrite"])
def test_a_file_that_a_rank_did_not_get_to_write_into_is_removed(tmp_path: Path, mode: str) -> None:
    """A process that ends in an orderly way closes its HDF5 files, also one that it has just created."""
    begin(tmp_path, record("a"))
    h5py.File(tmp_path / "kv-0001-0000-00000.h5", "w").close()
    run = take(tmp_path, overwrite=mode == "overwrite")
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
    ],
)
def test_another_job_is_refused_by_name(tmp_path: Path, options: dict[str, Any], shown: str) -> None:
    begin(tmp_path, record("a"))
    for is_there in (True, False):
        for _ in range(2):
            with pytest.raises(OutputError, match=f"cannot resume.*{shown}"):
                take(tmp_path, **options)
            assert list(open_results(tmp_path)) == [record("a")]
            assert resume(tmp_path, corpus=corpus_of(reversed(NAMES)))[0] == {"a"}  # their order does not matter
            merge_run(tmp_path)
        if is_there:
            (tmp_path / RUN_FILE).unlink()


@pytest.mark.parametrize(
    ("corpus", "done", "words"),
    [
        (corpus_of([*NAMES, "new1", "new2"]), {"a", "b", "d"}, ""),
        (corpus_of(NAMES[1:]), {"b", "d"}, r"1 document no longer in the corpus.*\(a\)"),
        (corpus_of(NAMES, b="another text", d="too"), {"a"}, r"2 documents changed.*\(b, d\)"),
        (corpus_of([f"n{number}" for number in range(9)]), set(), "3 documents no longer"),
    ],
)
def test_a_document_is_done_if_its_contents_have_an_answer(
    tmp_path: Path, corpus: Corpus, done: set[str], words: str
) -> None:
    begin(tmp_path, *map(record, "abd"))
    for number in range(3):
        found, failed, said = resume(tmp_path, corpus=corpus)
        assert (found, failed) == (done, set())
        assert any(re.search(words, line) for line in said) or not words or ("changed" in words and number)
        status = read_status(tmp_path)
        left = len(corpus) - len(done)
        assert (status.total, status.done, status.left) == (len(corpus), len(done), left)
        assert open_results(tmp_path).left == left
        if number == 1:
            (tmp_path / RUN_FILE).unlink()
        merge_run(tmp_path)
    write(tmp_path, 1, [record(name) for name in corpus.ids() if name not in done])


def test_long_settings_are_shown_where_they_differ() -> None:
    before, now = ({"prompt": {"template": "a" * 5000 + word + "b" * 5000}} for word in ("ONE", "TWO"))
    ((key, was, is_now),) = differing_settings(before, now)
    assert key == "prompt.template" and "aONEb" in was and "aTWOb" in is_now and len(was) == len(is_now) < 300
    (_, none, short), *_ = differing_settings({}, {"kv": True, "other": 1})
    assert (none, short) == ("not set", "true")


@pytest.mark.parametrize(("version", "remedy"), [(SCHEMA_VERSION + 1, "upgrade"), (SCHEMA_VERSION - 1, "again")])
@pytest.mark.parametrize("merged", [True, False])
def test_another_schema_is_refused_and_not_touched(tmp_path: Path, version: int, remedy: str, merged: bool) -> None:
    write(tmp_path, 0, [record("a")])
    if merged:
        result = merge_run(tmp_path)
        with h5py.File(result, "a") as file:
            file.attrs["schema_version"] = version
    else:
        (result,) = tmp_path.glob("log-*.jsonl")
        header, line = result.read_bytes().splitlines()
        result.write_bytes(seal(HEADER.as_line() | {"schema_version": version}) + line + b"\n")
    content = result.read_bytes()
    with pytest.raises(DataError, match=f"schema version {version};.*version {SCHEMA_VERSION} only: .*{remedy}"):
        take(tmp_path)
    assert result.read_bytes() == content


@pytest.mark.parametrize("other", [part_of(NAMES, 1, 2), part_of(NAMES, 0, 3), part_of([*NAMES, "new"], 0, 2)])
def test_another_share_is_no_resume(tmp_path: Path, other: Corpus) -> None:
    first = part_of(NAMES, 0, 2)
    begin(tmp_path, *map(record, NAMES[0::2][:2]), corpus=first)
    with pytest.raises(OutputError, match=f"cannot resume {tmp_path}"):
        take(tmp_path, corpus=other)
    assert resume(tmp_path, corpus=first)[0] == set(NAMES[0::2][:2])
    assert resume(tmp_path)[0] == set(NAMES[0::2][:2])  # of all documents


def test_a_document_that_can_be_read_by_now_is_no_other_corpus(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("text of a.txt")
    (texts / "b.txt").write_bytes(b"\xff is no text")

    def look() -> tuple[set[str], set[str]]:
        return resume(tmp_path / "run", corpus=scan_corpus([str(texts)]))[:2]

    bad = replace(record("b.txt", "error"), document_sha256="")
    begin(tmp_path / "run", record("a.txt"), bad, corpus=scan_corpus([str(texts)]))
    assert look() == ({"a.txt"}, {"b.txt"})
    (texts / "b.txt").write_text("mended")
    assert look() == ({"a.txt"}, set())
    (texts / "a.txt").write_bytes(b"\xff now it is not")
    assert look() == (set(), set())
    (texts / "a.txt").write_text("text of a.txt")
    assert look() == (set(), set()), "its answer was dropped"


def test_a_document_that_cannot_be_read_now_keeps_its_answer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text of a.txt")
    begin(tmp_path / "run", record("a.txt"), corpus=scan_corpus([str(tmp_path / "a.txt")]))
    with faults(Faults("open", "a.txt")):
        done, _, said = resume(tmp_path / "run", corpus=scan_corpus([str(tmp_path / "a.txt")]))
    assert done == {"a.txt"} and any("cannot be compared" in line for line in said)


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
    late = replace(record("b", "error"), error=f"{NOT_NOW}b.txt: {os.strerror(errno.ESTALE)}")
    begin(tmp_path, record("a"), late, record("c", "error"))
    assert resume(tmp_path)[:2] == ({"a"}, {"c"})
    write(tmp_path, 1, [record("b")])
    assert resume(tmp_path)[:2] == ({"a", "b"}, {"c"})
