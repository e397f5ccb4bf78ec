"""Shards: whole or not at all, durable in time, written beside the caller, and no fault of the disk goes unsaid."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from made_runs import HEADER, record, result_files, resume, stored_layers, write

import kvr_mpi.store.shards as shards_module
from kvr_mpi.disk import PART
from kvr_mpi.errors import DataError, OutputError, WriteError, exit_line
from kvr_mpi.store.folder import run_files
from kvr_mpi.store.ledger import crc32_of, read_ledger
from kvr_mpi.store.results import open_results
from kvr_mpi.store.shards import ShardWriter

pytestmark = pytest.mark.quick


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_nothing_has_its_name_before_flush_and_all_of_it_after(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "0000", HEADER)
    assert list(tmp_path.iterdir()) == []
    writer.write(record("a"))
    writer.write(record("b"))
    wait_for(lambda: result_files(tmp_path))
    assert result_files(tmp_path) == [f"shard-0000-0000-00000.h5{PART}"]
    with pytest.raises(DataError, match="no result file"):
        list(open_results(tmp_path))
    writer.flush()
    assert result_files(tmp_path) == ["shard-0000-0000-00000.h5"]
    assert list(open_results(tmp_path)) == [record("a"), record("b")]
    writer.close()


def test_what_has_its_name_is_in_the_ledger_with_its_checksum(tmp_path: Path) -> None:
    write(tmp_path, "0003", [record("a"), record("b", "error")], kv=True)
    (file,) = run_files(tmp_path)
    ((name, (line,)),) = read_ledger(tmp_path).shards.items()
    assert name == line.shard == file.name
    assert (line.size_bytes, line.crc32) == (file.stat().st_size, crc32_of(file))
    assert (line.done, line.failed) == (["a"], ["b"])


def test_flushing_nothing_makes_no_file(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "0000", HEADER)
    writer.flush()
    writer.write(record("a"))
    writer.flush()
    writer.flush()
    writer.close()
    writer.close()
    assert len(run_files(tmp_path)) == 1


@pytest.mark.parametrize(("limit", "value"), [("FLUSH_S", 0.2), ("FLUSH_BYTES", -1)])
def test_a_shard_closes_by_itself_at_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    monkeypatch.setattr(shards_module, limit, value)
    writer = ShardWriter(tmp_path, "0000", HEADER)
    for number, name in enumerate("abc", start=1):
        writer.write(record(name))
        # No flush, and no call after the last: what is written must be there all the same.
        wait_for(lambda count=number: len(run_files(tmp_path)) == count)  # type: ignore[misc]
    assert [each.id for each in open_results(tmp_path)] == ["a", "b", "c"]
    writer.close()


def test_a_young_job_makes_its_first_documents_durable_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "LEAST_FLUSH_S", 0.05)
    monkeypatch.setattr(shards_module, "FLUSH_S", 1e4)
    writer = ShardWriter(tmp_path, "0000", HEADER)
    writer.write(record("a"))
    wait_for(lambda: len(run_files(tmp_path)) == 1)
    writer.flush()  # done with that shard
    writer._began_s -= 2000
    writer.write(record("b"))
    wait_for(lambda: writer._shard is not None)
    assert writer._shard is not None and 100 < writer._shard.due_s - time.monotonic() < 1000  # a tenth of its age
    writer.close()
    assert [each.id for each in open_results(tmp_path)] == ["a", "b"]


def test_writers_side_by_side_do_not_disturb_each_other(tmp_path: Path) -> None:
    writers = [ShardWriter(tmp_path, f"{chain:04d}", HEADER) for chain in range(4)]
    for step in range(5):
        for chain, writer in enumerate(writers):
            writer.write(record(f"{chain}-{step}"))
            if step % (chain + 1) == 0:
                writer.flush()
    for writer in writers:
        writer.close()
    assert [each.id for each in open_results(tmp_path)] == sorted(f"{c}-{s}" for c in range(4) for s in range(5))
    assert list(tmp_path.glob(f"*{PART}")) == []


def test_a_new_writer_of_the_same_name_overwrites_nothing(tmp_path: Path) -> None:
    write(tmp_path, "0000", [record("a")])
    write(tmp_path, "0000", [record("b")])
    before = {file: file.read_bytes() for file in run_files(tmp_path)}
    (tmp_path / f"shard-0000-0000-00002.h5{PART}").write_bytes(b"of another")
    write(tmp_path, "0000", [record("c")])
    assert len(before) == 2 and all(file.read_bytes() == content for file, content in before.items())
    assert [each.id for each in open_results(tmp_path)] == ["a", "b", "c"]


def test_a_document_whose_layers_cannot_be_had_is_forgotten(tmp_path: Path) -> None:
    def layers() -> Iterator[Any]:
        yield torch.ones(2, 1, 4), torch.ones(2, 1, 4)
        raise ZeroDivisionError

    writer = ShardWriter(tmp_path, "0000", HEADER)
    for name in ("a", "b"):
        with pytest.raises(ZeroDivisionError):
            writer.write(record(name), layers())
        writer.write(record(name))  # the writer goes on, and the document can be written after all
    writer.close()
    assert list(open_results(tmp_path)) == [record("a"), record("b")]
    assert resume(tmp_path)[0] == {"a", "b"}


def test_only_forgotten_documents_make_no_shard(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "0000", HEADER)
    with pytest.raises(ZeroDivisionError):
        writer.write(record("a"), (1 / 0 for _ in range(1)))  # type: ignore[misc]
    writer.close()
    assert result_files(tmp_path) == []


def test_tensors_may_change_as_soon_as_write_returns(tmp_path: Path) -> None:
    """Buffers of keys and values are used again for the next prompt."""
    writer, wanted = ShardWriter(tmp_path, "0000", HEADER), {}
    buffer = torch.empty(2, 1 << 16, 4, dtype=torch.bfloat16)
    for number in range(12):
        buffer.fill_(number)
        buffer[0, number] = -1
        view = buffer.transpose(0, 1)  # as a cache hands it out: not contiguous
        wanted[f"{number:02d}"] = view.clone()
        writer.write(record(f"{number:02d}"), [(view, view)])
    buffer.fill_(99)
    writer.close()
    (file,) = run_files(tmp_path)
    with h5py.File(file) as stored:
        for name, tensor in wanted.items():
            assert torch.equal(stored_layers(stored[f"documents/{name}"])[0][1], tensor)


def test_what_waits_to_be_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "IN_FLIGHT_BYTES", 3 * 8192)
    seen, real = [], shards_module.write_record

    def watched(file: Any, each: Any, layers: Any, tokens: Any, **how: bool) -> None:
        time.sleep(0.02)
        seen.append(writer._waiting_bytes)
        real(file, each, layers, tokens, **how)

    monkeypatch.setattr(shards_module, "write_record", watched)
    writer = ShardWriter(tmp_path, "0000", HEADER)
    layer = (torch.ones(1024, 1, 1), torch.ones(1024, 1, 1))
    for name in "abcdef":
        writer.write(record(name), [layer, layer, None, layer, layer])
    writer.close()
    assert max(seen) <= 3 * 8192 and writer._waiting_bytes == 0
    assert [each.id for each in open_results(tmp_path)] == list("abcdef")


def test_one_document_larger_than_the_bound_gets_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "IN_FLIGHT_BYTES", 100)
    write(tmp_path, "0000", [record("a"), record("b")], kv=True)
    assert [each.id for each in open_results(tmp_path)] == ["a", "b"]


def test_a_document_written_twice_is_a_bug_that_is_said(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "0000", HEADER)
    writer.write(record("a"))
    writer.write(record("a"))
    with pytest.raises(ValueError, match="exists"):
        writer.flush()


def test_a_folder_that_has_gone_is_said_at_the_next_call(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    writer = ShardWriter(folder, "0000", HEADER)
    folder.rmdir()
    writer.write(record("a"))
    for call in (writer.flush, lambda: writer.write(record("b")), writer.close):
        with pytest.raises(WriteError, match=r"cannot be written any more.*--resume") as caught:
            call()
        assert "--resume continues" in exit_line(caught.value.exit_code, meaning=caught.value.meaning)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("a small tmpfs can only be mounted by root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_the_space_that_is_named_was_free_when_it_mattered(small_disk: Path) -> None:
    folder = small_disk / "run"
    folder.mkdir()
    writer = ShardWriter(folder, "0000", HEADER)
    with pytest.raises(OutputError) as caught:
        for number in range(100):
            writer.write(record(f"{number:03d}", answer="x" * 50_000))
        writer.close()
    with contextlib.suppress(OutputError):
        writer.close()
    found = re.search(r"\(([0-9.]+) MB free there\)", str(caught.value))
    assert found is not None and float(found[1]) < 0.6
    assert shutil.disk_usage(folder).free > 1.2e6, "the unfinished shard has been removed since"


@pytest.mark.parametrize("kv", [True, False])
def test_a_full_disk_is_said_and_what_was_durable_stays(
    small_disk: Path, kv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "IN_FLIGHT_BYTES", 4096 * 2 * 8 * 4 * 3)  # writing waits for the thread
    folder = small_disk / "run"
    folder.mkdir()
    writer = ShardWriter(folder, "0000", HEADER)
    layer = torch.randn(1024, 2, 8)
    written = []
    with pytest.raises(OutputError, match=r"MB free there.*No space left.*--resume"):
        for number in range(100):
            name = f"{number:03d}"
            writer.write(record(name, answer="" if kv else "x" * 50_000), [(layer, layer)] * 5 if kv else ())
            writer.flush()
            written.append(name)
    with pytest.raises(OutputError):
        writer.close()
    assert written and list(folder.glob(f"*{PART}")) == []
    assert [each.id for each in open_results(folder)] == written
    run_files(folder)[0].unlink()  # somebody makes room
    write(folder, "0000", [record("again")])
    assert [each.id for each in open_results(folder)] == [*written[1:], "again"]
