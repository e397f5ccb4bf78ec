"""The comparison with peers: a killed program leaves nobody behind, and answers are counted as they lie on the disk."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT

from benchmarks.peers.batch_file import write_batch_file
from benchmarks.peers.compare import try_peer
from benchmarks.peers.killing import PeerError, is_alive, live
from benchmarks.peers.peer_programs import Datatrove, Task, VllmRunBatch

# Answers a row at a time in a process of its own, and goes on with what it finds of an earlier life.
ANSWERS = """
import json, pathlib, subprocess, sys, time
requests, output, durable = sys.argv[1:]
code = '''
import json, pathlib, sys, time
requests, output, durable = sys.argv[1:]
kept = pathlib.Path(output) / "kept"
kept.touch()
done = kept.read_text().split()
for line in open(requests):
    name = json.loads(line)["custom_id"]
    if name not in done:
        if durable == "yes":
            kept.open("a").write(name + " ")
        done.append(name)
        print("did", name, flush=True)
        time.sleep(0.02)
kept.write_text(" ".join(done))
'''
sys.exit(subprocess.run([sys.executable, "-c", code, *sys.argv[1:]]).returncode)
"""

LIMIT_S = 300.0


class Toy:
    """A peer that keeps each answer at once, or all of them at the end."""

    name = "toy"

    def __init__(self, durable: str) -> None:
        self.durable = durable

    def why_not(self) -> str | None:
        return None

    def command(self, task: Task, output: Path) -> list[str]:
        return [sys.executable, "-c", ANSWERS, str(task.requests), str(output), self.durable]

    def environment(self, task: Task) -> dict[str, str]:
        return {}

    def answered(self, said: str) -> int:
        return said.count("did ")

    def kept(self, output: Path) -> dict[str, str]:
        file = output / "kept"
        return {name: "it" for name in file.read_text().split()} if file.exists() else {}


@pytest.mark.parametrize("durable", ["yes", "no"])
def test_what_is_left_is_not_computed_again(tmp_path: Path, durable: str) -> None:
    ids = write_batch_file(tmp_path / "requests.jsonl", ROOT / "jobs" / "demo", 20)
    task = Task(tmp_path / "requests.jsonl", tmp_path, 1)
    found = try_peer(Toy(durable), task, ids, tmp_path, undisturbed=True, timeout_s=LIMIT_S)
    assert found.rows == found.same == 20 and 10 <= found.computed < 20
    assert found.left == (found.computed if durable == "yes" else 0)
    assert found.again == found.computed - found.left


def test_a_killed_program_leaves_nobody_behind(tmp_path: Path) -> None:
    own_session = "import os, time; os.setsid(); print(os.getpid(), 'x', flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {own_session!r}])"
    log = tmp_path / "log"
    live([sys.executable, "-c", code], {}, lambda said: said.count("x"), log, timeout_s=LIMIT_S, kill_at=1)
    assert not is_alive(int(log.read_text().split()[0]))


@pytest.mark.parametrize(
    ("code", "kill_at", "words"), [("exit(3)", None, "ended with 3"), ("print('x')", 9, "before it could be killed")]
)
def test_a_program_that_does_not_do_its_work_is_said_so(
    tmp_path: Path, code: str, kill_at: int | None, words: str
) -> None:
    with pytest.raises(PeerError, match=words):
        live([sys.executable, "-c", code], {}, len, tmp_path / "log", timeout_s=LIMIT_S, kill_at=kill_at)


def response(name: str, text: str, status: int = 200) -> str:
    body = {"choices": [{"message": {"content": text}}]}
    return json.dumps({"custom_id": name, "response": {"status_code": status, "body": body}, "error": None}) + "\n"


def test_answers_of_run_batch_are_whole_lines_without_errors(tmp_path: Path) -> None:
    peer = VllmRunBatch(tmp_path)
    assert peer.kept(tmp_path) == {}
    (tmp_path / "answers.jsonl").write_text(response("a", "one") + response("b", "", 400) + response("c", "two")[:-9])
    assert peer.kept(tmp_path) == {"a": "one"}
    said = ("shards: 100% Completed | 99/99 [00:01]", *(f"Running batch: | {done}/20 [00:13" for done in (9, 19)))
    assert peer.answered("\n".join(said)) == 19


def test_answers_of_datatrove_are_in_its_cache_and_its_chunks(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "00000"
    folder.mkdir(parents=True)
    assert Datatrove(tmp_path).kept(tmp_path) == {}, "what a killed writer was about"
    with closing(sqlite3.connect(folder / "replay.sqlite3")) as cache:
        cache.execute("CREATE TABLE request_cache (doc_id TEXT, result BLOB, error_message TEXT)")
        rows = [("a", json.dumps({"text": "one"}).encode(), None), ("b", None, "BadRequestError")]
        cache.executemany("INSERT INTO request_cache VALUES (?, ?, ?)", rows)
        cache.commit()
    whole = json.dumps({"id": "c", "metadata": {"rollout_results": [{"text": "two"}]}})
    (folder / "chunk_00000.jsonl").write_text(f"{whole}\n{whole[:-5]}")
    assert Datatrove(tmp_path).kept(tmp_path) == {"a": "one", "c": "two"}


@pytest.mark.long
def test_peers_that_are_here_take_part(tmp_path: Path) -> None:
    options: list[Any] = ["--rows", "12", "--rivals", ROOT / ".rivals", "--folder", tmp_path]
    command = [sys.executable, "-m", "benchmarks", "peers", *options, "--json", tmp_path / "found.json"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    ours, *_ = json.loads((tmp_path / "found.json").read_text())
    assert ours["peer"] == "kvr-mpi" and ours["rows"] == ours["same"] == 12
    assert ours["again"] == ours["computed"] - ours["left"]
