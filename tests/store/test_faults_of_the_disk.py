"""What cannot be read now is not damaged, what was not written is not used, and neither is found out too late."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from made_faults import failing, system_error
from made_logs import logger_to
from made_runs import HEADER, NAMES, corpus_of, new_writer, record, result_files, resume, take, write

from kvr_mpi import disk
from kvr_mpi.disk import RUN_FILE
from kvr_mpi.errors import EXIT_CONFIG, ConfigError, DataError, UnavailableError, WriteError
from kvr_mpi.store import folder as folders
from kvr_mpi.store import results as readers
from kvr_mpi.store.log import LogWriter, seal
from kvr_mpi.store.record import Record, record_values
from kvr_mpi.store.results import open_results, read_results
from kvr_mpi.store.rewrite import finish_run
from kvr_mpi.store.status import read_status
from kvr_mpi.store.writer import volume_s

LOG, VOLUME = "log-0001-0000.jsonl", "kv-0001-0000-00000.h5"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(disk, "RETRY_S", 0.005)


def begin(folder: Path, *, merged: bool = False) -> None:
    """Make a run with keys and values of all documents, in a log and a volume or in ``results.h5``."""
    run = take(folder)
    write(folder, 0, map(record, NAMES), kv=True)
    if merged:
        assert finish_run(folder).is_file()
    run.lock.release()


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in result_files(folder)}


FAULTS = {
    "stale": system_error(errno.ESTALE),
    "as h5py says it": lambda path: KeyError(
        f"'open failed (errno = 5, error message = 'Input/output error', {path})'"
    ),
    "no memory": lambda path: MemoryError(),
    "no memory in HDF5": lambda path: RuntimeError("Can't open (memory allocation failed for file cache)"),
    "other": system_error(errno.EMFILE),
}


@pytest.mark.parametrize(
    ("file", "fault"),
    [*((file, fault) for file in ("results.h5", VOLUME) for fault in FAULTS), (LOG, "stale"), (LOG, "other")],
)
def test_a_file_that_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, file: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, merged=file == "results.h5")
    before, error = digests(tmp_path), FAULTS[fault]
    for times in (1, 99):
        with monkeypatch.context() as patch:
            if file == LOG:
                patch.setattr(os, "open", failing(os.open, error, file, times=times))
            else:
                patch.setattr(h5py, "File", failing(h5py.File, error, file, times=times))
            if times == 1 and fault != "other":
                assert resume(tmp_path)[:2] == ({*NAMES}, set())
            else:
                with pytest.raises(UnavailableError, match=f"{file} cannot be read now"):
                    resume(tmp_path)
                if times > 1:
                    with pytest.raises(UnavailableError):
                        open_results(tmp_path)
        assert digests(tmp_path) == before, "nothing was set aside"
    assert resume(tmp_path)[0] == {*NAMES}


def test_a_folder_is_listed_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path)
    real = os.scandir
    for name in ("stale", "other"):
        for times in (1, 99):
            monkeypatch.setattr(os, "scandir", failing(real, FAULTS[name], times=times))
            if (name, times) == ("stale", 1):
                assert {*open_results(tmp_path).places} == {*NAMES}
            else:
                with pytest.raises(OSError, match="cannot be read now|open files"):
                    open_results(tmp_path)


def test_results_without_permission_are_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, merged=True)
    monkeypatch.setattr(h5py, "File", failing(h5py.File, system_error(errno.EACCES), "results", times=99))
    for read in (open_results, read_status, take):
        with pytest.raises(ConfigError, match="no permission") as caught:
            read(tmp_path)
        assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize("state", ["whole", "damaged", "gone", "passing"])
def test_no_answer_stands_for_a_changed_text(tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to ``run.json``."""
    begin(tmp_path)
    run_file, changed = tmp_path / RUN_FILE, corpus_of(NAMES, a="another text")
    before = run_file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(os.open, system_error(errno.EIO), RUN_FILE, times=99))
        with pytest.raises(UnavailableError):
            take(tmp_path, corpus=changed)
    assert run_file.read_bytes() == before
    if state == "damaged":
        run_file.write_bytes(before.replace(b"identity", b"identify"))
    elif state == "gone":
        run_file.unlink()
    with monkeypatch.context() as patch:
        if state == "passing":
            patch.setattr(os, "open", failing(os.open, system_error(errno.EIO), RUN_FILE, times=1))
        done, failed, said = resume(tmp_path, corpus=changed)
    assert (done, failed) == ({*NAMES} - {"a"}, set()) and any("(a)" in line for line in said)
    assert resume(tmp_path, corpus=changed)[0] == {*NAMES} - {"a"}


Write = Callable[[int, Any, int], int]


def disturbed(kind: str, at: int) -> Iterator[Write]:
    """Let one write of HDF5 fail once, all from one on, or one be lost or changed unnoticed."""
    real, count = os.pwrite, [0]

    def pwrite(handle: int, data: Any, offset: int) -> int:
        count[0] += 1
        if kind == "from then on" and count[0] >= at or kind == "once" and count[0] == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind == "unnoticed" and count[0] == at:
            return len(memoryview(data))
        return real(handle, data, offset)

    yield pwrite


@pytest.mark.parametrize("kind", ["once", "from then on", "unnoticed"])
@pytest.mark.parametrize("at", [1, 4, 17, 60])
def test_a_failed_write_leaves_logs_and_volumes(
    tmp_path: Path, kind: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path)
    before, said = digests(tmp_path), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", next(disturbed(kind, at)))
        finish_run(tmp_path, logger=logger_to(said))
    if kind == "unnoticed" and (tmp_path / "results.h5").exists():  # what was lost was written again later
        assert at < 60
    else:
        assert digests(tmp_path) == before and "stay in logs" in said[0]
    assert {*open_results(tmp_path).places} == {*NAMES}
    finish_run(tmp_path)
    assert result_files(tmp_path) == ["results.h5"] and {*open_results(tmp_path).places} == {*NAMES}


@pytest.mark.parametrize("kind", ["once", "from then on", "unnoticed"])
@pytest.mark.parametrize("at", [1, 3, 20])
def test_a_volume_counts_only_if_it_was_written(
    tmp_path: Path, kind: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = take(tmp_path).lock
    with monkeypatch.context() as patch:
        patch.setattr("kvr_mpi.store.lock.os.pwrite", next(disturbed(kind, at)))
        try:
            write(tmp_path, 0, map(record, NAMES), kv=True)
            assert kind == "unnoticed", "an error was not noticed"
        except WriteError:
            pass
    lock.release()
    done = resume(tmp_path)[0]
    assert done in ({*NAMES}, set()) and {*open_results(tmp_path).places} == done if done else True
    write(tmp_path, 1, map(record, {*NAMES} - done), kv=True)
    assert {*open_results(tmp_path).places} == {*NAMES}


def test_a_job_that_merges_its_logs_meanwhile_damages_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path)
    real, left = folders._sources, [1]  # noqa: SLF001

    def sources(path: Path, names: Any) -> list[Path]:
        found = real(path, names)
        if left:
            left.clear()
            finish_run(tmp_path)
        return found

    monkeypatch.setattr(folders, "_sources", sources)
    status = read_status(tmp_path)
    assert (status.done, status.left, status.damaged, status.missing) == (len(NAMES), 0, (), ())


def test_a_merge_opens_each_of_many_logs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, count = readers.OPEN_FILES + 2, 300
    writers = [LogWriter(tmp_path, 1, rank, HEADER) for rank in range(logs)]
    for number in range(count):
        line = seal(record_values(Record(f"{number:04d}", "done", answer="x"), ()))
        writers[number % logs].write(line)
    for writer in writers:
        writer.close()
    found, opened, real = read_results([tmp_path]), list[Path](), readers.open_source

    def counting(path: Path) -> Any:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(readers, "open_source", counting)
    assert [one.id for one in found] == [f"{number:04d}" for number in range(count)] and len(opened) == logs


def test_the_number_of_volumes_does_not_grow_with_every_minute() -> None:
    def volumes(hours: float) -> int:
        age_s, count = 0.0, 0
        while age_s < 3600 * hours:
            age_s, count = age_s + volume_s(age_s), count + 1
        return count

    assert volumes(12) < 250 and volumes(48) < volumes(12) + 100


def test_a_record_is_lost_only_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading goes on after an error in the middle of a log, with the next line."""
    begin(tmp_path)
    real, left = folders.lines_of, [1]
    source = next(iter(read_results([tmp_path]).places.values())).source
    stale, lines = OSError(errno.ESTALE, "Stale file handle"), [*real(source)]

    class Failing:
        def __init__(self, stream: Any) -> None:
            self._stream, self._count = stream, 0

        def readline(self, size: int) -> bytes:
            self._count += 1
            if left and self._count == 4:
                left.clear()
                raise stale
            return bytes(self._stream.readline(size))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self._stream.close()

    opened = disk.open_regular
    monkeypatch.setattr("kvr_mpi.store.volumes.open_regular", lambda path: Failing(opened(path)))
    assert [*real(source)] == lines and not left


def test_new_files_are_named_in_errors_and_closed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", next(disturbed("from then on", 1)))
    writer = new_writer(tmp_path)
    with pytest.raises(WriteError, match="Input/output error"):
        writer.write(record("a"), [(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))])
        writer.close()
    assert not [name for name in os.listdir(tmp_path) if ".h5" in name]
    with pytest.raises(DataError):
        open_results(tmp_path)
