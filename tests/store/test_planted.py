"""What others may leave in a folder that is shared: links, pipes, nonsense under the names we use."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from made_runs import record, take, write

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK

PRECIOUS = "somebody else's, and not to be changed"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.write_text(PRECIOUS)
    return path


def kvr_says(kvr: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([kvr, *arguments], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("log", ["", "link", "dangling-link", "pipe"])
def test_a_job_writes_through_no_link_or_pipe(
    job: Path, tmp_path: Path, outside: Path, log: str, run_here: Any
) -> None:
    out, absent = tmp_path / "out", tmp_path / "absent"
    out.mkdir()
    for name in ("run.json.part", "results.h5.part", "kv-0009-0000-00000.h5"):
        (out / name).symlink_to(outside)
    if log == "pipe":
        os.mkfifo(out / "log-0001-0000.jsonl")
    elif log:
        (out / "log-0001-0000.jsonl").symlink_to(outside if log == "link" else absent)
    before = os.umask(0o002)  # lets the group write, as on shared file systems
    try:
        done = run_here(1, [job])
    finally:
        os.umask(before)
    assert done.returncode == EXIT_OK, done.stderr
    written = {
        file.name: file.stat().st_mode & 0o777 for file in out.iterdir() if file.is_file() and not file.is_symlink()
    }
    assert written.keys() >= {"run.json", "results.h5"} and {*written.values()} == {0o664}
    assert outside.read_text() == PRECIOUS and not absent.exists()


@pytest.mark.slow
def test_a_pipe_in_the_folder_holds_nobody_up(tmp_path: Path, kvr: Path) -> None:
    take(tmp_path).lock.release()
    write(tmp_path, 9, [record("a")])
    for name in ("run.json", ".lock-000007", "log-0001-0000.jsonl", "kv-0001-0000-00009.h5"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    for command in ("status", "export", "inspect"):
        assert kvr_says(kvr, command, tmp_path).returncode == EXIT_OK
    os.mkfifo(tmp_path / "results.h5")
    assert kvr_says(kvr, "export", tmp_path / "results.h5").returncode == EXIT_BAD_DATA
