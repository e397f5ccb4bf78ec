"""What others may leave in a folder that is shared: links, pipes, nonsense under the names we use."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import HEADER, record, resume, take, write

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK, DataError
from kvr_mpi.store.log import seal
from kvr_mpi.store.results import open_results
from kvr_mpi.store.status import read_status

SMALL_VOCABULARY = True
PRECIOUS = "somebody else's, and not to be changed"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.write_text(PRECIOUS)
    return path


@pytest.fixture
def umask() -> Iterator[None]:
    """A umask that lets the group write, as on shared file systems."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def kvr_says(kvr: Path, *arguments: str | Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([kvr, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


def test_a_job_writes_through_no_link(job: Path, tmp_path: Path, outside: Path, run_here: Any, umask: None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("run.json.part", f".probe-{os.getpid()}", "results.h5.part", "kv-0009-0000-00000.h5"):
        (out / name).symlink_to(outside)
    done = run_here(1, [job])
    assert done.returncode == EXIT_OK, done.stderr
    assert outside.read_text() == PRECIOUS
    assert all(file.stat().st_mode & 0o777 == 0o664 for file in out.iterdir() if not file.is_symlink())
    assert {file.name for file in out.iterdir()} >= {"run.json", "results.h5", ".lock-000001"}


@pytest.mark.parametrize("plant", ["link", "dangling-link", "pipe"])
def test_no_job_writes_through_a_log_that_is_a_link_or_a_pipe(
    job: Path, tmp_path: Path, outside: Path, plant: str, run_here: Any
) -> None:
    out, absent = tmp_path / "out", tmp_path / "absent"
    out.mkdir()
    if plant == "pipe":
        os.mkfifo(out / "log-0001-0000.jsonl")
    else:
        (out / "log-0001-0000.jsonl").symlink_to(outside if plant == "link" else absent)
    done = run_here(1, [job])
    if plant == "link":  # it may be somebody's results
        assert done.returncode == EXIT_CONFIG and "holds 1 result file" in done.stderr, done.stderr
    else:
        assert done.returncode == EXIT_OK and (out / "results.h5").is_file(), done.stderr
    assert outside.read_text() == PRECIOUS and not absent.exists()


@pytest.mark.slow
def test_a_merge_truncates_nothing_through_a_link(tmp_path: Path, outside: Path, kvr: Path) -> None:
    folder = tmp_path / "run"
    take(folder, mode="new").close()
    write(folder, 0, [record("a")])
    for part in (folder / "results.h5.part", tmp_path / "all.h5.part"):
        part.symlink_to(outside)
    assert kvr_says(kvr, "merge", folder, "-o", tmp_path / "all.h5").returncode == EXIT_OK
    assert kvr_says(kvr, "export", folder, "-o", tmp_path / "all.jsonl").returncode == EXIT_OK
    (tmp_path / "all.jsonl.part").symlink_to(outside)
    assert kvr_says(kvr, "export", folder, "--overwrite", "-o", tmp_path / "all.jsonl").returncode == EXIT_OK
    assert outside.read_text() == PRECIOUS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.json", ".lock-000007", "log-0001-0000.jsonl", "kv-0001-0000-00009.h5"])
def test_a_pipe_in_the_folder_holds_nobody_up(tmp_path: Path, name: str, kvr: Path) -> None:
    take(tmp_path, mode="new").close()
    write(tmp_path, 9, [record("a")])
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    for command in (["status", tmp_path], ["export", tmp_path], ["inspect", tmp_path]):
        assert kvr_says(kvr, *command).returncode == EXIT_OK


HOSTILE_LINES: dict[str, dict[str, Any]] = {
    "unknown": {"line": "other"},
    "nothing": {},
    "dropped-number": {"line": "dropped", "ids": 5},
    "dropped-mixed": {"line": "dropped", "ids": ["a", {}]},
    "pruned-text": {"line": "pruned", "ids": "a"},
    "volume-list": {"line": "volume", "name": ["x"], "size_bytes": 1, "pieces": {}},
    "volume-size": {"line": "volume", "name": "kv-0001-0000-00000.h5", "size_bytes": "1", "pieces": {}},
    "volume-pieces": {"line": "volume", "name": "kv-0001-0000-00000.h5", "size_bytes": 1, "pieces": {"a": "bc"}},
    "id-surrogate": {"id": "\ud800", "status": "done"},
    "id-list": {"id": [], "status": "done"},
    "second-header": HEADER.as_line(),
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_a_sealed_line_may_say_anything(tmp_path: Path, line: dict[str, Any]) -> None:
    take(tmp_path, mode="new").close()
    write(tmp_path, 0, [record("a")])
    (tmp_path / "log-0007.jsonl").write_bytes(seal(HEADER.as_line()) + seal(line))
    assert read_status(tmp_path).done == 1
    with pytest.raises(DataError, match=r"log-0007\.jsonl: .*--resume"):
        open_results(tmp_path)
    assert resume(tmp_path)[0] == {"a"} and open_results(tmp_path).ids() == ["a"]


@pytest.mark.parametrize(
    "change",
    [
        {"share": [0, 0]}, {"share": "x"}, {"share": [1]}, {"corpus": 5}, {"corpus": {}}, {"identity": 5},
        {"corpus": {"ids": [[1]], "chars": [1], "file": [0], "place": [0], "sha256": "", "errors": {}, "files": [],
                    "id_field": "", "text_field": "", "limit": None}},
    ],
    ids=str,
)  # fmt: skip
def test_a_sealed_run_file_may_say_anything(tmp_path: Path, change: dict[str, Any], kvr: Path) -> None:
    take(tmp_path, mode="new").close()
    write(tmp_path, 0, [record("a")])
    stored = json.loads((tmp_path / "run.json").read_bytes())
    stored.pop("seal")
    (tmp_path / "run.json").write_bytes(seal({**stored, **change}))
    done = kvr_says(kvr, "status", tmp_path)
    assert done.returncode == EXIT_OK and "unknown number" in done.stdout
    take(tmp_path).close()  # goes on without it


def test_nothing_but_bad_data_is_said_of_a_pipe(tmp_path: Path, kvr: Path) -> None:
    os.mkfifo(tmp_path / "results.h5")
    assert kvr_says(kvr, "export", tmp_path / "results.h5").returncode == EXIT_BAD_DATA
