"""Many tiny documents: no rank grows with them, and a job that is over ends, also when it is told to, in seconds.

`make test-long PARTS=many` runs it with DOCUMENTS=50000; a rank that kept something of each document shows here and
nowhere else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from constants import MPI_ENVIRONMENT
from disturb import ranks_of

from kvr_mpi.store.folder import survey

DOCUMENTS = int(os.environ.get("KVR_TEST_DOCUMENTS", "50000"))
LAUNCHER = Path(sys.executable).parent / "mpirun"
KVR_RUN = Path(sys.executable).parent / "kvr-run"
RANKS = 2
# A rank may grow by this much from the first tenth of its documents to the last: caches, arenas, no document.
MAY_GROW = 16 << 20
EVERY_S = 0.5


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """Rows of a few words each, of four lengths."""
    folder = tmp_path_factory.mktemp("many")
    with open(folder / "rows.jsonl", "w") as rows:
        for number in range(DOCUMENTS):
            text = f"Document {number}. " + "The ferry left at seven. " * (1 + number % 4)
            rows.write(json.dumps({"id": f"doc-{number}", "text": text}) + "\n")
    job = folder / "job.toml"
    job.write_text(
        f"""
        [model]
        path = "{tiny_model_dir}"
        dtype = "float32"
        [documents]
        path = "{folder}/rows.jsonl"
        [prompt]
        template = "{{text}}"
        [generation]
        max_new_tokens = 2
        [parallel]
        partition = "even"
        ranks_per_chain = 1
        [output]
        path = "{folder}/out"
        """
    )
    return job


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
        return len(survey(out).index().places)
    return sum(log.read_bytes().count(b'\n{"id": ') for log in out.glob("log-*.jsonl"))


def begin(job: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a job in processes of its own."""
    command = [str(LAUNCHER), "-n", str(RANKS), str(KVR_RUN), str(job), "--resume"]
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **MPI_ENVIRONMENT})


def most(held: list[tuple[int, ...]]) -> np.ndarray:
    """The most that each rank held; of too few documents nothing is known."""
    assert held, f"{DOCUMENTS:,} documents are done too soon to see: KVR_TEST_DOCUMENTS=50000"
    return np.max(held, axis=0)


@pytest.mark.long
def test_no_rank_grows_with_the_documents(job: Path, tmp_path: Path) -> None:
    out, log = job.parent / "out", tmp_path / "log"
    running = begin(job, log)
    seen: list[tuple[int, tuple[int, ...]]] = []  # documents done; bytes held, by rank
    while running.poll() is None:
        held = tuple(resident(pid) for pid in ranks_of(running.pid, "kvr-run"))
        if len(held) == RANKS and all(held):
            seen.append((done(out), held))
        time.sleep(EVERY_S)
    assert running.returncode == 0, log.read_text()[-3000:]
    early = most([held for count, held in seen if DOCUMENTS // 20 <= count <= DOCUMENTS // 5])
    late = most([held for count, held in seen if DOCUMENTS * 9 // 10 <= count < DOCUMENTS])
    end = most([held for _, held in seen[-3:]])
    tenths = [most([held for count, held in seen if count >= part * DOCUMENTS // 10][:3]) >> 20 for part in range(10)]
    print(f"MiB by rank, tenth by tenth: {' '.join(map(str, tenths))}")
    print(
        f"{DOCUMENTS:,} documents; held early, late, at the end: {early >> 20}, {late >> 20}, {end >> 20} MiB by rank"
    )
    assert (late - early < MAY_GROW).all(), (early, late)

    started = time.monotonic()
    again = begin(job, log)
    assert again.wait(600) == 0, log.read_text()[-3000:]
    print(f"nothing left to do: {time.monotonic() - started:.1f} s")
    assert f"documents: {DOCUMENTS}, {DOCUMENTS} of them already done" in log.read_text()


@pytest.mark.long
def test_told_to_end_when_all_is_done_it_ends(job: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    shutil.copytree(job.parent / "out", out) if (job.parent / "out").exists() else None
    moved = tmp_path / "job.toml"
    moved.write_text(job.read_text().replace(str(job.parent / "out"), str(out)))
    for after_s in (1.0, 6.0, 8.0, 9.0):
        running = begin(moved, log)
        time.sleep(after_s)
        for pid in ranks_of(running.pid, "kvr-run"):
            os.kill(pid, signal.SIGTERM)
        code = running.wait(120)
        print(f"told after {after_s} s: {code}")
        # A rank that has not begun ends as any program does: by the signal, which the launcher hands on.
        assert code in (0, 75, signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGTERM), log.read_text()[-3000:]
    assert begin(moved, log).wait(600) == 0, log.read_text()[-3000:]
    assert done(out) == DOCUMENTS
