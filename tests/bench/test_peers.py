"""The comparison with peers: a killed program leaves nobody behind, and answers are counted as they lie on the disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from constants import ROOT

from benchmarks.peers.batch_file import write_batch_file
from benchmarks.peers.compare import try_peer
from benchmarks.peers.killing import is_alive, live
from benchmarks.peers.peer_programs import Task

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
