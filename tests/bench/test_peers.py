"""The comparison with peers: a killed program leaves nobody behind, and answers are counted as they lie on the disk."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from constants import ROOT

from benchmarks.peers.batch_file import write_batch_file
from benchmarks.peers.compare import try_peer
from benchmarks.peers.killing import is_alive
from benchmarks.peers.peer_programs import Task

# Answers in a process of its own and another session, keeps each answer at once or all in the end, and goes on with
# what it finds of an earlier life.
ANSWERS = """
import json, os, pathlib, sys, time
requests, output, durable = sys.argv[1:]
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
os.setsid()
(pathlib.Path(output) / "pid").write_text(str(os.getpid()))
kept = pathlib.Path(output) / "kept"
kept.touch()
done = kept.read_text().split()
for name in [json.loads(line)["custom_id"] for line in open(requests)]:
    if name not in done:
        if durable == "yes":
            kept.open("a").write(name + " ")
        done.append(name)
        print("did", name, flush=True)
        time.sleep(0.02)
kept.write_text(" ".join(done))
"""


@pytest.mark.parametrize("durable", ["yes", "no"])
def test_what_is_left_is_not_computed_again_and_nobody_lives_on(tmp_path: Path, durable: str) -> None:
    ids, alive = write_batch_file(tmp_path / "requests.jsonl", ROOT / "jobs" / "demo", 20), list[bool]()
    task = Task(tmp_path / "requests.jsonl", tmp_path, 1)

    def kept(output: Path) -> dict[str, str]:
        alive.append(is_alive(int((output / "pid").read_text())))
        return dict.fromkeys((output / "kept").read_text().split(), "it")

    toy: Any = SimpleNamespace(
        name="toy",
        command=lambda task, output: [sys.executable, "-c", ANSWERS, str(task.requests), str(output), durable],
        environment=lambda task: {},
        answered=lambda said: said.count("did "),
        kept=kept,
    )
    found = try_peer(toy, task, ids, tmp_path, undisturbed=True, timeout_s=300.0)
    assert found.rows == found.same == 20 and 10 <= found.computed < 20
    assert found.left == (found.computed if durable == "yes" else 0)
    assert found.again == found.computed - found.left and not any(alive)
