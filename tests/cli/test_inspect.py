"""``kvr inspect`` and ``kvr status``: what they say, and that looking changes nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import h5py
import pytest
import torch
from click.testing import CliRunner
from constants import Kvr
from made_runs import COLUMNS, HEADER, NAMES, SHOWN, example_records, kv_in, record, take, write, write_run

from kvr_mpi.cli import group
from kvr_mpi.duration import duration_text
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK, DataError, OutputError
from kvr_mpi.logs import NAME, RankLogger
from kvr_mpi.report.progress import Progress
from kvr_mpi.store.lock import read_lock
from kvr_mpi.store.record import Record
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.states import StateWriter
from kvr_mpi.store.status import read_status
from kvr_mpi.store.volumes import RESULTS
from kvr_mpi.store.writer import ResultWriter


def test_inspect_shows_every_document_of_a_file_and_of_a_folder(run_folder: Path, run_kvr: Kvr) -> None:
    for merge in (False, True):
        path = merge_run(run_folder) if merge else run_folder
        code, out, err = run_kvr("inspect", path)
        assert code == EXIT_OK and err == ""
        assert "tiny/Llama (LlamaForCausalLM, float32)" in out and "torch" in out
        assert all(record.id in out for record in example_records())
        for word in ("60+40", "2 prompts", "1.50 s", "4 done, 1 failed", "not UTF-8", "[red]brackets[/red] [/b]"):
            assert word in out, out
    told = json.loads(run_kvr("inspect", run_folder, "--json")[1])
    assert told["model"] == SHOWN.model and told["identity"] == SHOWN.identity
    assert told["software"]["torch"] == torch.__version__
    assert (told["done"], told["errors"]) == (4, 1)
    assert told["documents"] == [record.id for record in example_records()]


def test_inspect_shows_one_document(run_folder: Path, run_kvr: Kvr) -> None:
    for each in example_records():
        code, out, err = run_kvr("inspect", run_folder, each.id)
        assert code == EXIT_OK and err == ""
        for name, value in each.as_dict().items():
            if name not in ("answer", "token_ids"):
                assert (f"\n{name:21} " in f"\n{out}") == bool(value)
            if value and isinstance(value, float):
                assert f"{name:21} {value:.4g}\n" in out
        if each.status == "done":
            assert out.endswith("\n\n" + each.answer.replace("\r", "") + "\n")
        told = json.loads(run_kvr("inspect", run_folder, each.id, "--json")[1])
        assert list(told) == [*COLUMNS, "kv"] and {name: told[name] for name in COLUMNS} == each.as_json()


def test_inspect_wraps_an_answer_at_the_width_of_a_terminal(tmp_path: Path, kvr: Path) -> None:
    answer = "First, the council approved the minutes of its last meeting.\n\n- a list  \n" + "Then it adjourned. " * 9
    run, (reader, terminal) = write_run(tmp_path / "run", [Record("a", "done", answer=answer)]), pty.openpty()
    environ = {**os.environ, "COLUMNS": "40", "TERM": "dumb"}
    shown = subprocess.Popen([kvr, "inspect", run, "a"], stdout=terminal, env=environ)
    os.close(terminal)
    out = b""
    with contextlib.suppress(OSError):  # the end of a terminal whose last writer has ended
        while piece := os.read(reader, 1 << 16):
            out += piece
    os.close(reader)
    assert shown.wait() == EXIT_OK
    lines = out.decode().partition("\r\n\r\n")[2].split("\r\n")
    assert " ".join(" ".join(lines).split()) == " ".join(answer.split())
    assert 35 < max(map(len, lines)) <= 40 and "" in lines[:-1] and "- a list" in lines


def test_inspect_tells_of_keys_and_values_so_that_others_find_them(run_folder: Path, run_kvr: Kvr) -> None:
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in run_folder.iterdir()}
    _, out, _ = run_kvr("inspect", run_folder, "sub/dir/plain.md")
    (line,) = (line for line in out.splitlines() if line.startswith("stored in "))
    assert '"Short."' in Path(line.removeprefix("stored in ").strip()).read_text()
    _, out, _ = run_kvr("inspect", run_folder, "0001")
    assert "2 layers, keys [100, 2, 8], values [100, 2, 8], float32" in out
    (line,) = (line for line in out.splitlines() if line.startswith("kv stored in "))
    with h5py.File(line.removeprefix("kv stored in ").strip()) as stored:
        assert kv_in(stored, "0001")["layer_000/keys"].shape == (100, 2, 8)
    _, out, _ = run_kvr("inspect", run_folder, "0001", "--json")
    layer = {"keys": [100, 2, 8], "values": [100, 2, 8], "dtype": "float32"}
    assert json.loads(out)["kv"] == [{"layer": 0, **layer}, {"layer": 2, **layer}]
    assert json.loads(run_kvr("inspect", run_folder, "nasty", "--json")[1])["kv"] == []
    assert run_kvr("export", run_folder)[0] == EXIT_OK
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in run_folder.iterdir()} == before
    assert not (run_folder / RESULTS).exists(), "reading leaves a run as it is"


def test_inspect_shows_all_answers_and_all_scores(tmp_path: Path, run_kvr: Kvr) -> None:
    samples = json.dumps([{"answer": "one way"}, {"answer": "another"}])
    scores = json.dumps([{"text": " yes", "logprob": -12.5}, {"text": " no", "logprob": -11.0}])
    records = [Record("n", "done", answer="one way", samples=samples), Record("s", "done", scores=scores)]
    path = write_run(tmp_path / "run", records)
    assert run_kvr("inspect", path, "n")[1].endswith("\n\n1 of 2: one way\n\n2 of 2: another\n")
    assert run_kvr("inspect", path, "s")[1].endswith("\n\n' yes' -12.500, ' no' -11.000\n")


def test_a_run_without_records_is_told_from_no_run(tmp_path: Path, run_kvr: Kvr) -> None:
    empty, begun, other = (tmp_path / name for name in ("empty", "begun", "other"))
    for folder in (empty, other):
        folder.mkdir()
    (other / "notes.txt").touch()
    take(begun).lock.release()
    for command in ("inspect", "export"):
        for folder, words in (
            (empty, "is empty; a job that has just begun loads its model first"),
            (begun, "no document is stored yet; see `kvr status"),
            (other, "no result file"),
        ):
            code, _, err = run_kvr(command, folder)
            assert code == EXIT_BAD_DATA and words in err, err


# `kvr status`: what it says, and that looking changes nothing


def test_a_run_at_work_is_seen_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = take(tmp_path)
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
    assert f"1 done, 1 failed, {len(NAMES) - 2} of {len(NAMES)} remaining" in text and "job       running" in text
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
    assert watched.count("\ndocuments ") == 2, "watching goes on, and ends with the job"
    assert watched.index("job       running") < watched.index("job       not running")
    ended = read_status(tmp_path)
    assert not ended.alive and ended.eta_s is None and ended.done == 1


@pytest.mark.parametrize(("work", "eta_s"), [(1, None), (50, 60.0)])
def test_status_gives_the_estimate_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, work: int, eta_s: float | None
) -> None:
    """Of 100 units of work in a minute, one says too little."""
    run, now = take(tmp_path), [time.time()]
    writer = ResultWriter(tmp_path, 0, HEADER)
    writer.write(Record("a", "done"))
    writer.close()
    caplog.set_level(logging.INFO, NAME)
    states = StateWriter(tmp_path, 0, 1, run.lock.number, None, RankLogger())
    progress = Progress(RankLogger(), 4, 100, clock=lambda: now[0], on_estimate=states.estimate)
    now[0] += 60
    progress.document(Record("a", "done"), 1, work)
    states.close()
    assert ("left unknown" if eta_s is None else f"left {duration_text(eta_s)}") in caplog.text
    for later_s in (0.0, 20.0):
        found = read_status(tmp_path, now[0] + later_s)
        assert found.alive and found.eta_s == (None if eta_s is None else pytest.approx(eta_s - later_s, abs=0.1))


def test_damage_is_seen_and_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        read_status(tmp_path)
    take(tmp_path).lock.release()
    for rank, name in enumerate("abc"):
        write(tmp_path, rank, [record(name)], kv=True)
    files = sorted(tmp_path.glob("kv-*.h5"))
    files[0].write_bytes(b"short")
    files[1].unlink()
    found = read_status(tmp_path)
    assert (found.done, found.damaged, found.missing) == (1, (files[0].name,), (files[1].name,))
    assert files[0].read_bytes() == b"short"
    shown = CliRunner().invoke(group, ["status", str(tmp_path)], standalone_mode=False)
    assert "resume the job" in shown.output and shown.return_value == EXIT_BAD_DATA
