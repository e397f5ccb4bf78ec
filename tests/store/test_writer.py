"""Writing: records are durable in time, keys and values whole or not at all, and no fault of the disk goes unsaid."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import new_writer, record, result_files, resume, stored_layers, write

import kvr_mpi.store.writer as writer_module
from kvr_mpi.disk import final_name
from kvr_mpi.errors import DataError, OutputError
from kvr_mpi.store.folder import survey
from kvr_mpi.store.kv import CachedTokens, piece_id
from kvr_mpi.store.kv_writer import KVWriter
from kvr_mpi.store.results import open_results
from kvr_mpi.store.status import read_status

pytestmark = pytest.mark.quick
LOG, VOLUME = "log-0001-0000.jsonl", "kv-0001-0000-00000.h5"
LAYER = torch.ones(4, 1, 4), -torch.ones(4, 1, 4)
TOKENS = CachedTokens((7, 8, 9, 5), (1, 3))


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def ids(folder: Path) -> list[str]:
    with contextlib.suppress(DataError):
        return [each.id for each in open_results(folder)]
    return []


def test_an_answer_counts_when_its_line_is_written_and_one_with_kv_when_that_is(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    assert list(tmp_path.iterdir()) == []
    writer.write(record("a"))
    wait_for(lambda: ids(tmp_path) == ["a"])  # no flush, and no call after it
    writer.write(record("b"), [LAYER], TOKENS)
    wait_for(lambda: [*map(final_name, result_files(tmp_path))] == [VOLUME, LOG])
    time.sleep(0.1)
    assert ids(tmp_path) == ["a"] and not (tmp_path / VOLUME).exists(), "it is incomplete"
    assert read_status(tmp_path).unfinished == tuple(path.name for path in tmp_path.glob("kv-*"))
    writer.flush()
    assert result_files(tmp_path) == [VOLUME, LOG] and read_status(tmp_path).unfinished == ()
    assert list(open_results(tmp_path)) == [record("a"), record("b")]
    writer.close()
    writer.close()


def test_a_volume_replaces_no_file(tmp_path: Path) -> None:
    """Such as one of another job that has the same number by mistake."""
    (tmp_path / VOLUME).write_text("precious")
    writer = new_writer(tmp_path)
    writer.write(record("a"), [LAYER], TOKENS)
    with pytest.raises(OutputError, match="File exists"):
        writer.close()
    assert (tmp_path / VOLUME).read_text() == "precious" and not ids(tmp_path)
    assert result_files(tmp_path) == [VOLUME, LOG]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that have been synced; a volume has been before it is listed."""
    found, real_sync = list[str](), os.fsync

    def sync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        is_listed = (log := path.with_name(LOG)).exists() and b'"volume"' in log.read_bytes()
        assert not is_listed or VOLUME in found
        found.append(final_name(path.name))
        real_sync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(writer_module, "SYNC_S", 0.02)
    return found


def test_a_volume_is_on_the_disk_before_it_is_listed_and_records_within_their_time(
    tmp_path: Path, synced: list[str]
) -> None:
    writer = new_writer(tmp_path)
    writer.write(record("a"))
    wait_for(lambda: LOG in synced)
    writer.write(record("b"), [LAYER], TOKENS)
    writer.close()
    assert VOLUME in synced and ids(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(("limit", "value"), [("VOLUME_S", 0.2), ("VOLUME_BYTES", -1), ("LEAST_VOLUME_S", 0.05)])
def test_a_volume_closes_by_itself_at_its_limits_and_sooner_in_a_young_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    monkeypatch.setattr(writer_module, "VOLUME_S", 1e4)
    monkeypatch.setattr(writer_module, limit, value)
    writer = new_writer(tmp_path)
    names = "a" if limit == "LEAST_VOLUME_S" else "abc"
    for number, name in enumerate(names, start=1):
        writer.write(record(name), [LAYER], TOKENS)
        wait_for(lambda count=number: len(ids(tmp_path)) == count)  # type: ignore[misc]
    assert len(list(tmp_path.glob("kv-*"))) == len(names)
    writer.close()


def test_a_document_whose_layers_cannot_be_had_is_forgotten(tmp_path: Path) -> None:
    def layers() -> Iterator[Any]:
        yield LAYER
        raise ZeroDivisionError

    writer = new_writer(tmp_path)
    for name in ("a", "b"):
        with pytest.raises(ZeroDivisionError):
            writer.write(record(name), layers())
        writer.write(record(name), [LAYER])  # the writer goes on, and the document can be written after all
    with writer.writing_piece(record("c"), TOKENS) as document:
        document.add_layer(LAYER)
        document.drop()
    with pytest.raises(ZeroDivisionError), writer.writing_piece(record("d"), TOKENS) as document:
        document.add_layer(LAYER)
        raise ZeroDivisionError
    writer.close()
    assert list(open_results(tmp_path)) == [record("a"), record("b")]
    assert [*survey(tmp_path).volumes[VOLUME][1]] == [piece_id(record(name), None) for name in "ab"]
    assert resume(tmp_path)[0] == {"a", "b"}


def test_what_is_written_again_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    """An attempt of which nothing came, of the same prompt; and one that is forgotten leaves nothing of either."""
    writer = new_writer(tmp_path)
    writer.write(record("a"), [(LAYER[1], LAYER[1])], TOKENS, has_record=False)
    writer.write(record("a"), [LAYER], TOKENS)
    writer.write(record("b"), [LAYER], TOKENS, has_record=False)
    with writer.writing_piece(record("b"), TOKENS) as document:
        document.add_layer(LAYER)
        document.drop()
    writer.close()
    assert torch.equal(stored_layers(tmp_path, "a")[0][0], LAYER[0])
    assert [*survey(tmp_path).volumes[VOLUME][1]] == [piece_id(record("a"), TOKENS)]


def test_tensors_may_change_as_soon_as_write_returns(tmp_path: Path) -> None:
    """Buffers of keys and values are used again for the next prompt."""
    writer, wanted = new_writer(tmp_path), {}
    buffer = torch.empty(2, 1 << 16, 4, dtype=torch.bfloat16)
    for number in range(12):
        buffer.fill_(number)
        buffer[0, number] = -1
        view = buffer.transpose(0, 1)  # as a cache hands it out: not contiguous
        wanted[f"{number:02d}"] = view.clone()
        writer.write(record(f"{number:02d}"), [(view, view)])
    buffer.fill_(99)
    writer.close()
    for name, tensor in wanted.items():
        assert torch.equal(stored_layers(tmp_path, name)[0][1], tensor)


def test_what_waits_to_be_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "IN_FLIGHT_BYTES", 3 * 8192)
    seen, real = [], KVWriter.add

    def watched(*arguments: Any) -> None:
        time.sleep(0.02)
        seen.append(writer._waiting_bytes)
        real(*arguments)

    monkeypatch.setattr(KVWriter, "add", watched)
    writer = new_writer(tmp_path)
    layer = (torch.ones(1024, 1, 1), torch.ones(1024, 1, 1))
    for name in "abcdef":
        writer.write(record(name), [layer, layer, None, layer, layer])
    writer.flush()
    assert max(seen) <= 3 * 8192
    writer.write(record("g"), [(torch.ones(8192, 1, 1),) * 2])  # one that is larger gets through
    writer.close()
    assert ids(tmp_path) == list("abcdefg")


def test_a_record_too_long_to_be_read_becomes_an_error_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "LINE_BYTES", 2000)
    write(tmp_path, 0, [record("a", answer="x" * 2000), record("b")])
    found = {each.id: each for each in open_results(tmp_path)}
    assert found["b"].status == "done" and found["a"].status == "error" and "can be stored" in found["a"].error


@pytest.mark.parametrize("kv", [True, False])
def test_a_full_disk_is_said_and_what_was_durable_stays(
    tmp_path: Path, kv: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small tmpfs can only be mounted by root")
    request.addfinalizer(lambda: subprocess.run(["umount", "--lazy", tmp_path], check=True))
    monkeypatch.setattr(writer_module, "IN_FLIGHT_BYTES", 4096 * 2 * 8 * 4 * 3)  # writing waits for the thread
    folder = tmp_path / "run"
    folder.mkdir()
    writer = new_writer(folder)
    layer = torch.randn(1024, 2, 8)
    written = []
    with pytest.raises(OutputError, match=r"MB free there.*No space left.*--resume") as caught:
        for number in range(100):
            name = f"{number:03d}"
            writer.write(record(name, answer="" if kv else "x" * 50_000), [(layer, layer)] * 5 if kv else ())
            writer.flush()
            written.append(name)
    found = re.search(r"\(([0-9.]+) MB free there\)", str(caught.value))
    assert found is not None and float(found[1]) < 0.8
    with pytest.raises(OutputError):
        writer.close()
    assert written and ids(folder) == written
    assert len(list(folder.glob("kv-*"))) == len(written) * kv and shutil.disk_usage(folder).free > 0.1e6
    if kv:  # somebody makes room, and the job goes on
        (folder / VOLUME).unlink()
        write(folder, 0, [record(written[0])])
        assert ids(folder) == written


def test_records_are_synced_and_no_volume_is_closed_while_the_layers_of_another_document_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    for name in ("VOLUME_S", "LEAST_VOLUME_S"):
        monkeypatch.setattr(writer_module, name, 0.02)
    writer = new_writer(tmp_path)
    writer.write(record("a"))
    with writer.writing_piece(record("b"), TOKENS, has_record=True) as document:
        document.add_layer(LAYER)
        wait_for(lambda: LOG in synced)
        time.sleep(0.1)
        document.add_layer(LAYER)
    writer.close()
    assert ids(tmp_path) == ["a", "b"] and [*stored_layers(tmp_path, "b")] == [0, 1]
