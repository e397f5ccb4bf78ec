"""Many tiny documents: no rank grows with them, and a job that is over ends in seconds.

`make test-long PARTS=many` runs it with DOCUMENTS=50000; a rank that kept something of each document shows here and
nowhere else.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from constants import MPI_ENVIRONMENT
from harness import LAUNCHER, ranks_of
from made_jobs import toml_of

from kvr_mpi.store.folder import survey

DOCUMENTS = int(os.environ.get("KVR_TEST_DOCUMENTS", "50000"))
RANKS = 2
# A rank may grow by this much from the first tenth of its documents to the last: caches, arenas, no document.
MAY_GROW = 16 << 20
EVERY_S = 0.5


def resident(pid: int) -> int:
    """What a process holds of the memory, in bytes; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS")), 0)


def done(out: Path) -> int:
    """How many documents the results, or the logs, have."""
    if (out / "results.h5").exists():
        return len(survey(out).locate()[0])
    return sum(log.read_bytes().count(b'\n{"id": ') for log in out.glob("log-*.jsonl"))


def most(seen: list[tuple[int, tuple[int, ...]]], first: int, last: int) -> np.ndarray:
    """The most that each rank held while so many documents were done."""
    held = [each for count, each in seen if first <= count <= last]
    assert held, f"{DOCUMENTS:,} documents are done too soon to see: KVR_TEST_DOCUMENTS=50000"
    return np.max(held, axis=0)


@pytest.mark.long
def test_no_rank_grows_with_the_documents(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = [
        {"id": f"d{number}", "text": f"Document {number}. " + "The ferry left at seven. " * (1 + number % 4)}
        for number in range(DOCUMENTS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "model.path": tiny_model_dir,
        "model.dtype": "float32",
        "documents.path": tmp_path / "rows.jsonl",
        "prompt.template": "{text}",
        "generation.max_new_tokens": 2,
        "parallel.partition": "even",
        "parallel.ranks_per_chain": 1,
        "output.path": tmp_path / "out",
    }
    (tmp_path / "job.toml").write_text(toml_of(job))
    log, seen = tmp_path / "log", list[tuple[int, tuple[int, ...]]]()
    command = [LAUNCHER, "-n", str(RANKS), LAUNCHER.with_name("kvr-run"), tmp_path / "job.toml", "--resume"]
    environment = {**os.environ, **MPI_ENVIRONMENT}
    with log.open("wb") as stream:
        running = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
    while running.poll() is None:
        held = tuple(resident(pid) for pid in ranks_of(running.pid, "kvr-run"))
        if len(held) == RANKS and all(held):
            seen.append((done(tmp_path / "out"), held))
        time.sleep(EVERY_S)
    assert running.returncode == 0, log.read_text()[-3000:]
    early, late = (most(seen, DOCUMENTS * part // 20, DOCUMENTS * (part + 2) // 20) for part in (1, 18))
    assert (late - early < MAY_GROW).all(), (early, late)
    again = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=True)
    assert f"{DOCUMENTS} documents already done" in again.stdout + again.stderr
