"""``kvr status``: what it says, and that looking changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from made_runs import HEADER, NAMES, record, take, write

from kvr_mpi.cli import group
from kvr_mpi.errors import EXIT_BAD_DATA, DataError, OutputError
from kvr_mpi.store.lock import read_lock
from kvr_mpi.store.record import Record
from kvr_mpi.store.status import read_status
from kvr_mpi.store.writer import ResultWriter


def test_a_run_at_work_is_seen_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = take(tmp_path, mode="new")
    writers = [ResultWriter(tmp_path, rank, HEADER) for rank in (0, 1)]
    writers[0].write(Record("a", "done"))
    writers[0].write(Record("d", "error"))
    writers[0].flush()
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.glob("[!.]*")}
    lock = read_lock(tmp_path)
    assert lock is not None
    found = read_status(tmp_path, lock.since_s + 36)
    assert (found.alive, found.total, found.done, found.failed) == (True, len(NAMES), 1, 1)
    assert found.left == len(NAMES) - 2
    assert found.rate_per_h == pytest.approx(100, rel=0.1) and found.lately_per_h == pytest.approx(100, rel=0.1)
    assert found.eta_s == pytest.approx(36 * (len(NAMES) - 2), rel=0.1), "errors come fast and are no answers"
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.glob("[!.]*")} == before
    for now in (lock.since_s - 10**6, 0.0):  # a clock that jumps
        found = read_status(tmp_path, now)
        assert found.rate_per_h is None and found.eta_s is None and found.done == 1
    text = CliRunner().invoke(group, ["status", str(tmp_path)]).output
    assert f"{len(NAMES)}: 1 done, 1 failed, {len(NAMES) - 2} left" in text and "job       running" in text
    told = json.loads(CliRunner().invoke(group, ["status", str(tmp_path), "--json"]).output)
    assert told["done"] == 1
    warned = CliRunner().invoke(group, ["export", str(tmp_path)])
    assert warned.stdout.count("\n") == 2 and f"not finished: {len(NAMES) - 2} documents left" in warned.stderr
    with pytest.raises(OutputError, match="in use by"):
        CliRunner().invoke(group, ["merge", str(tmp_path)], catch_exceptions=False)
    for writer in writers:
        writer.close()
    monkeypatch.setattr("kvr_mpi.cli.status.time", SimpleNamespace(sleep=lambda seconds: run.lock.release()))
    watched = CliRunner().invoke(group, ["status", str(tmp_path), "--watch"]).output
    assert watched.count("documents ") == 2, "watching goes on, and ends with the job"
    assert watched.index("job       running") < watched.index("job       not running")
    ended = read_status(tmp_path)
    assert not ended.alive and ended.eta_s is None and ended.done == 1


def test_damage_is_seen_and_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        read_status(tmp_path)
    take(tmp_path, mode="new").lock.release()
    for rank, name in enumerate("abc"):
        write(tmp_path, rank, [record(name)], kv=True)
    files = sorted(tmp_path.glob("kv-*.h5"))
    files[0].write_bytes(b"short")
    files[1].unlink()
    found = read_status(tmp_path)
    assert (found.done, found.damaged, found.missing) == (1, (files[0].name,), (files[1].name,))
    assert files[0].read_bytes() == b"short"
    shown = CliRunner().invoke(group, ["status", str(tmp_path)], standalone_mode=False)
    assert "needs --resume" in shown.output and shown.return_value == EXIT_BAD_DATA
