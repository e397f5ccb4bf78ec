"""A run's folder: files appear whole or not at all, and each document counts once, whatever was interrupted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvr_mpi.store.folder as folder_module
from kvr_mpi.errors import EXIT_CONFIG, ConfigError, DataError, KvrError, OutputError
from kvr_mpi.store.folder import (
    PART,
    RESULTS,
    ShardWriter,
    check_fresh,
    find_record,
    merge_run,
    prepare_folder,
    read_run,
    run_files,
)
from kvr_mpi.store.outputs import Header, Record, open_file, read_header

IDENTITY: dict[str, Any] = {"model": "0123abcd", "generation": {"max_new_tokens": 96}, "kv": False}
HEADER = Header(IDENTITY, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "float32"})
STAMP = "2026-01-01T00:00:00.000+00:00"


def record(name: str, status: str = "done", answer: str = "") -> Record:
    error = "it went wrong" if status == "error" else ""
    return Record(name, status, error=error, answer=answer or f"about {name}", token_ids=(1, 2), finished_at=STAMP)


def write(folder: Path, name: str, records: Iterable[Record], *, kv: bool = False, header: Header = HEADER) -> None:
    """Write one shard."""
    writer = ShardWriter(folder, name, header)
    for number, each in enumerate(records):
        layer = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(number))
        writer.write(each, [(layer, -layer), None, (layer.half(), layer.half())] if kv else ())
    writer.flush()


def raw(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Read all numbers of all documents: type, shape and bytes, by document and name within it."""
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for file in run_files(path):
        with h5py.File(file, "r") as stored:

            def visit(name: str, item: Any) -> None:
                if isinstance(item, h5py.Dataset) and item.dtype.kind in "if":
                    found[name] = (str(item.dtype), item.shape, item[()].tobytes())

            stored["documents"].visititems(visit)
    return found


def age(path: Path, seconds: int) -> None:
    """Make a file older (or, if negative, newer)."""
    then = path.stat().st_mtime_ns - seconds * 10**9
    os.utime(path, ns=(then, then))


# Shards


def test_nothing_has_its_name_before_flush_and_all_of_it_after(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "0000", HEADER)
    assert list(tmp_path.iterdir()) == []
    writer.write(record("a"))
    writer.write(record("b"))
    assert list(tmp_path.glob("*.h5")) == [] and run_files(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == [f"shard-0000-00000.h5{PART}"]
    with pytest.raises(DataError, match="no result file"):
        list(read_run(tmp_path))
    writer.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["shard-0000-00000.h5"]
    assert list(read_run(tmp_path)) == [record("a"), record("b")]


def test_flushing_nothing_makes_no_file(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "0000", HEADER)
    writer.flush()
    writer.write(record("a"))
    writer.flush()
    writer.flush()
    assert len(list(tmp_path.iterdir())) == 1


def test_each_flush_makes_another_shard(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "0000", HEADER)
    for name in "abc":
        writer.write(record(name))
        writer.flush()
    assert len(run_files(tmp_path)) == 3
    assert [each.id for each in read_run(tmp_path)] == ["a", "b", "c"]


@pytest.mark.parametrize("limit", ["FLUSH_S", "FLUSH_BYTES"])
def test_a_shard_closes_by_itself_at_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(folder_module, limit, -1)
    writer = ShardWriter(tmp_path, "0000", HEADER)
    for name in "abc":
        writer.write(record(name))
    # No flush: what is written must be there all the same.
    assert [each.id for each in read_run(tmp_path)] == ["a", "b", "c"]


def test_part_files_left_by_a_crash_are_ignored_and_then_removed(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    (tmp_path / f"shard-0001-00000.h5{PART}").write_bytes(b"\x89HDF\r\n\x1a\n half a file")
    unfinished = ShardWriter(tmp_path, "0002", HEADER)
    unfinished.write(record("lost"))
    (tmp_path / f"{RESULTS}{PART}").write_bytes(b"")
    assert [each.id for each in read_run(tmp_path)] == ["a"]
    assert prepare_folder(tmp_path, IDENTITY, overwrite=False, resume=True) == {"a"}
    assert [path.name for path in tmp_path.iterdir()] == ["shard-0000-00000.h5"]


def test_writers_side_by_side_do_not_disturb_each_other(tmp_path: Path) -> None:
    writers = [ShardWriter(tmp_path, f"{chain:04d}", HEADER) for chain in range(4)]
    for step in range(5):
        for chain, writer in enumerate(writers):
            writer.write(record(f"{chain}-{step}"))
            if step % (chain + 1) == 0:
                writer.flush()
    for writer in writers:
        writer.flush()
    assert [each.id for each in read_run(tmp_path)] == sorted(f"{c}-{s}" for c in range(4) for s in range(5))
    assert list(tmp_path.glob(f"*{PART}")) == []


def test_a_new_writer_of_the_same_name_overwrites_nothing(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    write(tmp_path, "0000", [record("b")])
    before = {file: file.read_bytes() for file in run_files(tmp_path)}
    write(tmp_path, "0000", [record("c")])
    assert len(before) == 2 and all(file.read_bytes() == content for file, content in before.items())
    assert [each.id for each in read_run(tmp_path)] == ["a", "b", "c"]


def test_a_failing_layer_does_not_spoil_what_was_flushed(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "0000", HEADER)
    writer.write(record("a"))
    writer.flush()
    with pytest.raises(ZeroDivisionError):
        writer.write(record("b"), (1 / 0 for _ in range(1)))  # type: ignore[misc]
    assert list(read_run(tmp_path)) == [record("a")]


# Reading a run


def test_done_beats_error_and_later_beats_earlier(tmp_path: Path) -> None:
    write(
        tmp_path, "0000", [record("done first"), record("failed twice", "error", "old"), record("twice", answer="old")]
    )
    write(
        tmp_path,
        "0001",
        [record("done first", "error"), record("failed twice", "error", "new"), record("late", "error")],
    )
    write(tmp_path, "0002", [record("late"), record("twice", answer="new")])
    for number, file in enumerate(sorted(tmp_path.glob("*.h5"))):
        age(file, 100 - number)
    got = list(read_run(tmp_path))
    assert len(got) == 4
    by_id = {each.id: each for each in got}
    assert by_id["done first"] == record("done first")
    assert by_id["late"] == record("late")
    assert by_id["failed twice"].answer == "new"
    assert by_id["twice"].answer == "new"


@settings(max_examples=20, deadline=None)
@given(
    shards=st.lists(
        st.dictionaries(st.sampled_from("abcde"), st.sampled_from(["done", "error"]), min_size=1),
        min_size=1,
        max_size=4,
    )
)
def test_each_id_once_before_and_after_a_merge(
    tmp_path_factory: pytest.TempPathFactory, shards: list[dict[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    wanted: dict[str, Record] = {}
    for number, shard in enumerate(shards):
        records = [record(name, status, f"shard {number}") for name, status in shard.items()]
        write(folder, f"{number:04d}", records)
        age(folder / f"shard-{number:04d}-00000.h5", 100 - number)
        for each in records:
            if each.status == "done" or wanted.get(each.id, each).status == "error":
                wanted[each.id] = each
    assert list(read_run(folder)) == [wanted[name] for name in sorted(wanted)]
    merge_run(folder)
    assert list(read_run(folder)) == [wanted[name] for name in sorted(wanted)]


@pytest.mark.parametrize(
    "names",
    [
        ["z", "é", "漢"],
        ["report.txt", "report/one.txt"],
        ["a b", "a!b", "a/b", "a~b", "a-b"],
        ["#2", "+", ".", "..", "A", "a"],
    ],
)
def test_documents_come_in_the_order_of_their_ids(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path, "0000", [record(name) for name in reversed(names)])
    assert [each.id for each in read_run(tmp_path)] == sorted(names)


def test_reading_a_folder_without_results_is_bad_data(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no results here")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match="no result file"):
            list(read_run(path))


def test_find_record_names_some_that_exist(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record(f"doc-{n:02d}") for n in range(12)])
    file, key = find_record(tmp_path, "doc-03")
    assert file in run_files(tmp_path) and key == "doc-03"
    with pytest.raises(ConfigError, match=r"'doc-99'.* 12: doc-00, doc-01") as caught:
        find_record(tmp_path, "doc-99")
    assert caught.value.exit_code == EXIT_CONFIG


# Merging


def test_a_merge_keeps_records_and_bits_and_removes_the_shards(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a"), record("x/y.txt")], kv=True)
    write(tmp_path, "0001", [record("b", "error"), record("..")], kv=True)
    records, arrays = list(read_run(tmp_path)), raw(tmp_path)
    assert len(arrays) == 4 * (2 + 2 * 2)
    result = merge_run(tmp_path)
    assert result == tmp_path / RESULTS
    assert list(tmp_path.iterdir()) == [result]
    assert list(read_run(result)) == list(read_run(tmp_path)) == records
    assert raw(result) == arrays
    with open_file(result) as stored:
        assert read_header(stored) == HEADER


def test_merging_again_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    result = merge_run(tmp_path)
    content, changed = result.read_bytes(), result.stat().st_mtime_ns
    assert merge_run(tmp_path) == result
    assert result.read_bytes() == content and result.stat().st_mtime_ns == changed


def test_merging_adds_later_shards_to_earlier_results(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a"), record("b", "error")])
    merge_run(tmp_path)
    age(tmp_path / RESULTS, 100)
    write(tmp_path, "0000", [record("b"), record("c")])
    merge_run(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / RESULTS]
    assert list(read_run(tmp_path)) == [record("a"), record("b"), record("c")]


@pytest.mark.parametrize("shard_age_s", [-100, 0, 100])
def test_a_crash_between_merging_and_removing_counts_each_document_once(tmp_path: Path, shard_age_s: int) -> None:
    folder, kept = tmp_path / "run", tmp_path / "kept"
    folder.mkdir()
    write(folder, "0000", [record("a"), record("b", "error")], kv=True)
    write(folder, "0001", [record("b"), record("c", "error")], kv=True)
    age(folder / "shard-0000-00000.h5", 10)
    records = list(read_run(folder))
    shutil.copytree(folder, kept)
    merge_run(folder)
    arrays = raw(folder)
    for shard in kept.iterdir():
        back = shutil.copy2(shard, folder)
        age(Path(back), shard_age_s)
    assert len(run_files(folder)) == 3
    assert list(read_run(folder)) == records
    assert prepare_folder(folder, IDENTITY, overwrite=False, resume=True) == {"a", "b"}
    merge_run(folder)
    assert list(folder.iterdir()) == [folder / RESULTS]
    assert list(read_run(folder)) == records and raw(folder) == arrays


def test_an_interrupted_merge_can_be_done_again(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    (tmp_path / f"{RESULTS}{PART}").write_bytes(b"\x89HDF\r\n\x1a\n")
    merge_run(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / RESULTS]
    assert list(read_run(tmp_path)) == [record("a")]


def test_large_runs_are_left_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "MERGE_MAX_BYTES", 100)
    write(tmp_path, "0000", [record("a")])
    write(tmp_path, "0001", [record("b")])
    files = run_files(tmp_path)
    assert merge_run(tmp_path) == tmp_path
    assert run_files(tmp_path) == files
    assert list(read_run(tmp_path)) == [record("a"), record("b")]


def test_merging_an_empty_folder_makes_no_file(tmp_path: Path) -> None:
    assert merge_run(tmp_path) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_merge_with_a_damaged_shard_removes_nothing(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    write(tmp_path, "0001", [record("b")])
    damaged = tmp_path / "shard-0001-00000.h5"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    before = {file: file.read_bytes() for file in run_files(tmp_path)}
    with pytest.raises(DataError, match="shard-0001"):
        merge_run(tmp_path)
    assert {file: file.read_bytes() for file in run_files(tmp_path)} == before
    assert not (tmp_path / RESULTS).exists()


# Preparing


def test_a_fresh_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert prepare_folder(folder, IDENTITY, overwrite=False, resume=False) == set()
    assert folder.is_dir() and list(folder.iterdir()) == []
    check_fresh(folder)


def test_an_existing_run_is_refused_without_a_flag(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    for check in (
        lambda: prepare_folder(tmp_path, IDENTITY, overwrite=False, resume=False),
        lambda: check_fresh(tmp_path),
    ):
        with pytest.raises(OutputError, match=r"--resume.*--overwrite") as caught:
            check()
        assert str(tmp_path) in str(caught.value)
    assert list(read_run(tmp_path)) == [record("a")]


def test_overwrite_deletes_our_files_and_no_others(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    merge_run(tmp_path)
    write(tmp_path, "0000", [record("b")])
    others = [tmp_path / "notes.txt", tmp_path / "table.csv", tmp_path / "h5", tmp_path / "sub" / "results.h5"]
    (tmp_path / "sub").mkdir()
    for other in others:
        other.write_text("mine")
    assert prepare_folder(tmp_path, IDENTITY, overwrite=True, resume=False) == set()
    assert list(tmp_path.glob("*.h5")) == []
    assert all(other.read_text() == "mine" for other in others)


def test_overwrite_deletes_damaged_results_too(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    damaged = tmp_path / "shard-0000-00000.h5"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    assert prepare_folder(tmp_path, IDENTITY, overwrite=True, resume=False) == set()
    assert list(tmp_path.iterdir()) == []


def foreign(path: Path) -> Path:
    """Make an HDF5 file of someone else."""
    with h5py.File(path, "w") as file:
        file["measurements"] = np.arange(10.0)
    return path


def test_overwrite_never_deletes_a_foreign_hdf5_file(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    other = foreign(tmp_path / "measurements.h5")
    content = other.read_bytes()
    try:
        prepare_folder(tmp_path, IDENTITY, overwrite=True, resume=False)
    except KvrError as error:  # to refuse is as good as to leave it alone
        assert "measurements.h5" in str(error)
    assert other.exists() and other.read_bytes() == content


def test_a_foreign_hdf5_file_stops_a_resume_and_a_fresh_start(tmp_path: Path) -> None:
    other = foreign(tmp_path / "measurements.h5")
    with pytest.raises(DataError, match=r"measurements\.h5.*not of kvr-mpi"):
        prepare_folder(tmp_path, IDENTITY, overwrite=False, resume=True)
    with pytest.raises(OutputError):
        prepare_folder(tmp_path, IDENTITY, overwrite=False, resume=False)
    with pytest.raises(DataError, match="measurements"):
        list(read_run(tmp_path))
    assert other.exists()


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_with_the_name_of_a_result_is_no_crash(tmp_path: Path, overwrite: bool) -> None:
    inner = tmp_path / "old.h5"
    inner.mkdir()
    (inner / "precious.txt").write_text("mine")
    try:
        prepare_folder(tmp_path, IDENTITY, overwrite=overwrite, resume=not overwrite)
    except KvrError as error:
        assert "old.h5" in str(error)
    assert (inner / "precious.txt").read_text() == "mine"


def test_resume_returns_the_done_and_not_the_failed(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a"), record("b", "error"), record("dir/c")])
    write(tmp_path, "0001", [record("d", "error"), record("..")])
    for _ in range(2):
        assert prepare_folder(tmp_path, IDENTITY, overwrite=False, resume=True) == {"a", "dir/c", ".."}
        merge_run(tmp_path)
    assert {each.id for each in read_run(tmp_path)} == {"a", "b", "dir/c", "d", ".."}


def test_resume_counts_a_document_that_failed_later_as_done(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    write(tmp_path, "0001", [record("a", "error")])
    assert prepare_folder(tmp_path, IDENTITY, overwrite=False, resume=True) == {"a"}


def test_resume_of_nothing_starts_afresh(tmp_path: Path) -> None:
    assert prepare_folder(tmp_path / "run", IDENTITY, overwrite=False, resume=True) == set()


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("model", "ffff", r"model was '0123abcd', is 'ffff'"),
        ("generation", {"max_new_tokens": 5}, r"generation was .*96.*, is .*5"),
        ("kv", True, r"kv was False, is True"),
        ("seed", 7, r"seed was None, is 7"),
    ],
)
def test_resume_with_another_identity_names_what_changed(tmp_path: Path, key: str, value: Any, shown: str) -> None:
    write(tmp_path, "0000", [record("a")])
    with pytest.raises(OutputError, match=shown) as caught:
        prepare_folder(tmp_path, {**IDENTITY, key: value}, overwrite=False, resume=True)
    unchanged = {*IDENTITY} - {key}
    assert not any(f"{name} was" in str(caught.value) for name in unchanged)
    assert list(read_run(tmp_path)) == [record("a")]


def test_resume_checks_every_file_not_just_the_first(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    write(tmp_path, "0001", [record("b")], header=Header({**IDENTITY, "kv": True}, HEADER.model))
    with pytest.raises(OutputError, match="kv was True, is False"):
        prepare_folder(tmp_path, IDENTITY, overwrite=False, resume=True)


def test_resume_survives_json_of_the_identity(tmp_path: Path) -> None:
    # What JSON changes (order of keys) must not look like another run; what it cannot hold must not be lost.
    identity = {"b": [1, 2.5, None, True], "a": {"ü": "\n", "z": 1e-17}}
    write(tmp_path, "0000", [record("a")], header=Header(identity, HEADER.model))
    same = {"a": {"z": 1e-17, "ü": "\n"}, "b": [1, 2.5, None, True]}
    assert prepare_folder(tmp_path, same, overwrite=False, resume=True) == {"a"}


def test_resume_refuses_a_damaged_shard(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    file = tmp_path / "shard-0000-00000.h5"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(DataError, match="shard-0000"):
        prepare_folder(tmp_path, IDENTITY, overwrite=False, resume=True)


@pytest.mark.parametrize("missing", ["id", "status"])
def test_resume_refuses_a_document_without_id_or_status(tmp_path: Path, missing: str) -> None:
    write(tmp_path, "0000", [record("a")])
    with h5py.File(tmp_path / "shard-0000-00000.h5", "a") as file:
        del file["documents/a"].attrs[missing]
    with pytest.raises(DataError):
        prepare_folder(tmp_path, IDENTITY, overwrite=False, resume=True)


@pytest.mark.parametrize("below", ["", "run", "deep/er/run"])
@pytest.mark.parametrize(("overwrite", "resume"), [(False, False), (True, False), (False, True)])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, below: str, overwrite: bool, resume: bool) -> None:
    # Below a regular file nobody can make a folder, not even root.
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot be written") as caught:
        prepare_folder(tmp_path / "file" / below, IDENTITY, overwrite=overwrite, resume=resume)
    assert str(tmp_path / "file") in str(caught.value) and caught.value.exit_code == EXIT_CONFIG
    assert (tmp_path / "file").read_text() == "mine"
