"""Who holds a folder: one job at a time, and the dead hold nothing, wherever they died."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from made_logs import logger_to

import kvr_mpi.store.lock as lock_module
from kvr_mpi.errors import EXIT_CONFIG, EXIT_STOPPED, KvrError, OutputError
from kvr_mpi.store.lock import Lock, Owner, check_unused, is_alive, read_lock, session_of, this_process

pytestmark = pytest.mark.quick

ELSEWHERE = Owner("node17", "another-boot pid:[1]", 4242, 99, "1234", 0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "BEAT_S", 0.05)
    monkeypatch.setattr(lock_module, "WATCH_S", 0.6)


def plant(folder: Path, owner: Owner, number: int = 1, **values: Any) -> Path:
    """A lock of somebody who is not here."""
    path = folder / f".lock-{number:06d}"
    stored = {"owner": asdict(owner), "beats": 7, "released": False, "since_s": 0.0, **values}
    path.write_text(json.dumps(stored).ljust(1023) + "\n")
    return path


@contextmanager
def beating(path: Path) -> Iterator[None]:
    """Somebody elsewhere who lives."""
    ended, stored = threading.Event(), json.loads(path.read_text())

    def beat() -> None:
        for beats in itertools.count(1):
            if ended.wait(0.05):
                return
            handle = os.open(path, os.O_WRONLY)
            os.pwrite(handle, json.dumps({**stored, "beats": beats}).ljust(1023).encode(), 0)
            os.close(handle)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_second_job_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    first = Lock(tmp_path, this_process("77", 0))
    with pytest.raises(OutputError, match=rf"in use by process {os.getpid()} on .*job 77.*choose another") as caught:
        Lock(tmp_path, this_process())
    assert caught.value.exit_code == EXIT_CONFIG
    assert is_alive(tmp_path)
    with pytest.raises(OutputError, match=rf"in use by process {os.getpid()} on .*job 77.*choose another"):
        check_unused(tmp_path)
    first.release()
    assert not is_alive(tmp_path)
    check_unused(tmp_path)
    check_unused(tmp_path / "not-yet-there")
    (tmp_path / ".lock-000000").mkdir()  # cannot be removed, and holds nothing
    second = Lock(tmp_path, this_process())
    assert (first.number, second.number) == (1, 2) and session_of(tmp_path) == 2
    assert {path.name for path in tmp_path.iterdir()} == {".lock-000000", ".lock-000002"}
    second.release()
    second.release()


def test_a_killed_owner_on_this_machine_is_known_at_once(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from kvr_mpi.store.lock import Lock, this_process; "
        "Lock(pathlib.Path(sys.argv[1]), this_process()); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    state = read_lock(tmp_path)
    assert state is not None and state.owner is not None and not state.released
    said: list[str] = []
    Lock(tmp_path, this_process(), logger_to(said)).release()
    me = this_process()  # and another process with the same number is not the owner
    plant(tmp_path, replace(me, started=me.started - 1), number=3)
    assert not is_alive(tmp_path)
    Lock(tmp_path, me, logger_to(said)).release()
    assert len(said) == 2 and all("killed" in line for line in said), "nobody is watched"


def test_an_owner_elsewhere_that_lives_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "WATCH_S", 60.0)  # until the first beat
    path, said = plant(tmp_path, ELSEWHERE), list[str]()
    with beating(path):
        assert is_alive(tmp_path, 60.0)
        with pytest.raises(OutputError, match="in use by process 4242 on node17, job 1234"):
            Lock(tmp_path, this_process(), logger_to(said))
    assert len(said) == 1 and "watching it for" in said[0]


@pytest.mark.parametrize(("restart", "at_once"), [(1, True), (0, False)])
def test_a_restarted_job_takes_over_from_itself(tmp_path: Path, restart: int, at_once: bool) -> None:
    plant(tmp_path, ELSEWHERE)
    said: list[str] = []
    began = time.monotonic()
    lock = Lock(tmp_path, this_process("1234", restart), logger_to(said))
    assert any("watching" in line for line in said) != at_once and lock.number == 2
    assert at_once or time.monotonic() - began >= 0.6, "else it is watched, and dead if it stands still"
    lock.release()


def contend(folder: Path, start: Any, won: Any, end: Any) -> None:
    lock_module.WATCH_S, lock_module.BEAT_S = 0.3, 0.05
    start.wait()
    try:
        lock = Lock(folder, this_process())
    except OutputError:
        won.put(0)
        return
    won.put(lock.number)
    end.wait()
    lock.release()


def test_of_many_contenders_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if attempt % 2:
            plant(folder, ELSEWHERE)
        start, end, won = context.Event(), context.Event(), context.Queue()
        processes = [context.Process(target=contend, args=(folder, start, won, end)) for _ in range(6)]
        for process in processes:
            process.start()
        start.set()
        numbers = [won.get(timeout=300) for _ in processes]
        end.set()
        for process in processes:
            process.join()
        assert sum(number > 0 for number in numbers) == 1


def check_until_lost(lock: Lock) -> None:
    """As a job does between documents: what is raised was found by a beat."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        lock.check()
        time.sleep(0.02)


def test_one_that_stood_still_too_long_is_told(tmp_path: Path) -> None:
    lock = Lock(tmp_path, this_process())
    lock.check()
    plant(tmp_path, ELSEWHERE, number=2)
    with pytest.raises(OutputError, match="another job has taken .*node17"):
        check_until_lost(lock)
    lock.release()
    assert session_of(tmp_path) == 2 and read_lock(tmp_path).owner == ELSEWHERE  # type: ignore[union-attr]


def test_a_folder_that_was_swapped_is_noticed_though_its_lock_has_the_same_number(tmp_path: Path) -> None:
    folder, away = tmp_path / "out", tmp_path / "away"
    folder.mkdir()
    lock = Lock(folder, this_process())
    folder.rename(away)
    for ask in (lambda: lock.check(anew=True), lambda: session_of(folder)):
        with pytest.raises(OutputError, match="is gone; restore it"):
            ask()
    shutil.copytree(away, folder)
    with pytest.raises(OutputError, match="was replaced by another folder"):
        check_until_lost(lock)
    with pytest.raises(OutputError, match="was replaced by another folder"):
        lock.check(anew=True)
    shutil.rmtree(folder)
    away.rename(folder)
    lock.check(anew=True)
    lock.release()


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """See no processes: ``/proc`` is mounted with ``hidepid``, and they are others'."""
    read_text = Path.read_text

    def see(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == "stat":
            raise FileNotFoundError(2, os.strerror(2), str(path))
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", see)


@pytest.mark.usefixtures("hidden")
def test_a_hidden_owner_counts_as_alive_while_its_lock_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me, said = replace(this_process(), pid=os.getppid(), started=1), list[str]()
    path = plant(tmp_path, me)
    with beating(path):
        monkeypatch.setattr(lock_module, "WATCH_S", 60.0)  # until the first beat
        with pytest.raises(OutputError, match="in use by process"):
            Lock(tmp_path, this_process(), logger_to(said))
    monkeypatch.setattr(lock_module, "WATCH_S", 0.6)
    Lock(tmp_path, this_process(), logger_to(said)).release()
    assert sum("watching it for" in line for line in said) == 2


@pytest.mark.usefixtures("hidden")
def test_a_process_that_does_not_exist_is_not_hidden(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    plant(tmp_path, replace(this_process(), pid=ended.pid, started=1))
    said: list[str] = []
    Lock(tmp_path, this_process(), logger_to(said)).release()
    assert not any("watching" in line for line in said)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO])
def test_a_lock_that_cannot_be_read_is_nobodys_to_take(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = plant(tmp_path, ELSEWHERE), os.open

    def refuse(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(name) == str(path) and not flags & os.O_CREAT:
            raise OSError(error, os.strerror(error), str(name))
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(KvrError, match=rf"{path} cannot be read.*{os.strerror(error)}") as caught:
        Lock(tmp_path, this_process())
    assert caught.value.exit_code in (EXIT_CONFIG, EXIT_STOPPED)
    assert session_of(tmp_path) == 1
    monkeypatch.undo()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_lock_file_holds_nothing(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ".lock-000007"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    lock = Lock(tmp_path, this_process())
    assert lock.number == 8
    lock.release()
