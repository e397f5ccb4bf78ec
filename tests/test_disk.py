"""What can fail for a moment is tried again; files are replaced whole, whoever else replaces them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from made_faults import failing, system_error

from kvr_mpi import disk
from kvr_mpi.errors import EXIT_STOPPED, UnavailableError


@pytest.mark.parametrize("number", sorted(disk.TRANSIENT))
@pytest.mark.parametrize("name", ["open", "stat", "scandir", "replace"])
def test_an_error_that_goes_away_is_not_seen(
    tmp_path: Path, number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(b"text")
    monkeypatch.setattr(disk, "FIRST_WAIT_S", 0.0001)
    monkeypatch.setattr(os, name, failing(getattr(os, name), system_error(number), times=2))
    assert disk.read_regular(file, 10) == b"text"
    assert [entry.name for entry in disk.list_folder(tmp_path)] == ["file"]
    disk.rename(file, other)
    assert os.listdir(tmp_path) == ["other"]


def test_an_error_that_stays_says_that_the_file_cannot_be_read_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "RETRY_S", 0.01)
    monkeypatch.setattr(disk, "FIRST_WAIT_S", 0.001)
    (tmp_path / "file").write_bytes(b"text")
    with pytest.raises(FileNotFoundError):
        disk.read_regular(tmp_path / "absent", 10)
    with pytest.raises(UnavailableError, match="absent cannot be read now"):  # a listing has just named it
        disk.retried(lambda: disk.read_regular(tmp_path / "absent", 10), "absent", listed=True)
    monkeypatch.setattr(os, "open", failing(os.open, system_error(errno.ESTALE), times=99))
    with pytest.raises(UnavailableError, match="file cannot be read now: Stale file handle") as caught:
        disk.read_regular(tmp_path / "file", 10)
    assert caught.value.exit_code == EXIT_STOPPED
    monkeypatch.setattr(os, "open", failing(os.open, system_error(errno.EACCES), times=99))
    with pytest.raises(PermissionError):  # no waiting helps
        disk.read_regular(tmp_path / "file", 10)


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with disk.replacing(file) as first, disk.replacing(file) as second:
        first.write(b"A" * 1000)
        second.write(b"B")
        second.flush()
    assert file.read_bytes() == b"A" * 1000 and os.listdir(tmp_path) == ["file"]


def test_what_killed_writers_left_is_removed_later(tmp_path: Path) -> None:
    """Unless it was written to lately, or belongs to another file."""
    file = tmp_path / "file"
    old, new, others = (tmp_path / f"{name}.part-{'ab' * 7}{at:02x}" for at, name in enumerate(["file"] * 2 + ["else"]))
    for part in (old, new, others):
        part.write_bytes(b"half")
    for part in (old, others):
        os.utime(part, (0, 0))
    with disk.replacing(file) as stream:
        stream.write(b"whole")
    assert file.read_bytes() == b"whole" and sorted(os.listdir(tmp_path)) == sorted(["file", new.name, others.name])
