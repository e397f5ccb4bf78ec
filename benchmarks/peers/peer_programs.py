"""The peers: how each is started, how many answers it has had, and which of them are on the disk.

Each is used as its own documentation has it, with what it offers for going on after a crash switched on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

BIN = Path(sys.executable).parent
HERE = Path(__file__).resolve().parent
CONTEXT_TOKENS = 1024  # of a prompt and its answer, for those who want to know before


@dataclass(frozen=True, slots=True)
class Task:
    """What all peers are given.

    requests : a file of OpenAI's batch format.
    model : a folder of safetensors in float32.
    ranks : of ours, one core each; the others' threads.
    compiles : whether vLLM may compile the model before it begins.
    """

    requests: Path
    model: Path
    ranks: int
    compiles: bool = True


class Peer(Protocol):
    """A program that answers a batch file."""

    @property
    def name(self) -> str:
        """What a user calls it."""

    def why_not(self) -> str | None:
        """Why it cannot run here; None if it can."""

    def command(self, task: Task, output: Path) -> list[str]:
        """Return what a user types, at first and after a crash; `output` is a folder of its own, made already."""

    def environment(self, task: Task) -> dict[str, str]:
        """Variables that it needs beside those of this process."""

    def answered(self, said: str) -> int:
        """How many answers it has computed in one life, by all it has printed in it."""

    def kept(self, output: Path) -> dict[str, str]:
        """Answers on the disk that it finds again, by the requests' ids."""


@dataclass(frozen=True, slots=True)
class Ours:
    """``kvr-run --resume``; its records by ``kvr export``."""

    name: str = "kvr-mpi"

    def why_not(self) -> str | None:
        """Return None: it runs wherever this does."""
        return None

    def command(self, task: Task, output: Path) -> list[str]:
        """Write a job of four settings, started as many times as it takes."""
        job = output / "job.toml"
        job.write_text(
            f'[model]\npath = "{task.model}"\ndtype = "float32"\n\n'
            f'[documents]\npath = "{task.requests}"\nformat = "openai-batch"\n\n'
            f'[output]\npath = "{output / "run"}"\n'
        )
        return ["mpirun", "-n", str(task.ranks), str(BIN / "kvr-run"), str(job), "--resume"]

    def environment(self, task: Task) -> dict[str, str]:
        """Nothing but what finds ``mpirun``."""
        return {"PATH": f"{BIN}:{os.environ['PATH']}"}

    def answered(self, said: str) -> int:
        """By the log's line for each document."""
        return len(set(re.findall(r"\] \d+/\d+ (\S+): \d+ tokens", said)))

    def kept(self, output: Path) -> dict[str, str]:
        command = [str(BIN / "kvr"), "export", str(output / "run"), "--format", "openai-batch"]
        told = subprocess.run(command, capture_output=True, text=True)
        # Nothing has been written yet, or some is missing: the latter is what is asked here.
        return dict(_responses(told.stdout))


@dataclass(frozen=True, slots=True)
class VllmRunBatch:
    """``vllm run-batch`` of the vLLM in its environment."""

    folder: Path
    name: str = "vllm run-batch"

    def why_not(self) -> str | None:
        return _why_no(self.folder / "bin" / "vllm")

    def command(self, task: Task, output: Path) -> list[str]:
        """Return the same command again: it has no way to go on."""
        files = ["-i", str(task.requests), "-o", str(output / "answers.jsonl")]
        model = ["--model", str(task.model), "--served-model-name", "peer", "--dtype", "float32"]
        speed = ["--max-model-len", str(CONTEXT_TOKENS), *["--enforce-eager"] * (not task.compiles)]
        return [str(self.folder / "bin" / "vllm"), "run-batch", *files, *model, *speed]

    def environment(self, task: Task) -> dict[str, str]:
        """Threads, and that nothing is looked for on the network."""
        return _vllm_environment(self.folder)

    def answered(self, said: str) -> int:
        return max(map(int, re.findall(r"Running batch:.*?(\d+)/\d+ \[", said)), default=0)

    def kept(self, output: Path) -> dict[str, str]:
        file = output / "answers.jsonl"
        return dict(_responses(file.read_text())) if file.exists() else {}


@dataclass(frozen=True, slots=True)
class Datatrove:
    """datatrove's ``InferenceRunner`` with a local ``vllm serve``, checkpoints and request cache on."""

    folder: Path
    name: str = "datatrove"

    def why_not(self) -> str | None:
        """Without its environment, which is that of its server."""
        return _why_no(self.folder / "bin" / "vllm") or _why_no(
            next(iter(self.folder.glob("lib/python*/site-packages/datatrove")), self.folder / "datatrove")
        )

    def command(self, task: Task, output: Path) -> list[str]:
        """Run a pipeline in its own environment; started again it goes on from its checkpoints."""
        python = str(self.folder / "bin" / "python")
        program = str(HERE / "run_datatrove.py")
        how = [str(CONTEXT_TOKENS), "compiles" if task.compiles else "eager"]
        return [python, program, str(task.requests), str(task.model), str(output), *how]

    def environment(self, task: Task) -> dict[str, str]:
        """Put its server on the path, where it looks for it."""
        return {**_vllm_environment(self.folder), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def answered(self, said: str) -> int:
        """By a line of our program for each answer that came from the server."""
        return len(re.findall(r"^answered ", said, re.MULTILINE))

    def kept(self, output: Path) -> dict[str, str]:
        """By what it looks at when it starts: its cache of requests, and its chunks; at the end by what it wrote."""
        found: dict[str, str] = {}
        for folder in output.glob("checkpoints/*/"):
            # A killed writer leaves a journal that whoever opens the database has to apply: to a copy.
            with tempfile.TemporaryDirectory() as copies:
                for file in folder.glob("replay.sqlite3*"):
                    shutil.copy(file, copies)
                found |= _cached(Path(copies) / "replay.sqlite3")
        for file in (*output.glob("checkpoints/*/chunk_*.jsonl"), *output.glob("answers/*.jsonl")):
            for row in _lines(file.read_text()):
                found[row["id"]] = row["metadata"]["rollout_results"][0]["text"]
        return found


def find_peers(folder: Path) -> dict[str, Peer]:
    """Name the peers; `folder` has their environments."""
    peers: list[Peer] = [Ours(), VllmRunBatch(folder / "vllm"), Datatrove(folder / "vllm")]
    return {peer.name: peer for peer in peers}


def _vllm_environment(folder: Path) -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    return {**quiet, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def _why_no(path: Path) -> str | None:
    return None if path.exists() else f"there is no {path}; `benchmarks/install_rivals vllm` creates it"


def _cached(database: Path) -> dict[str, str]:
    """Read the answers in a cache of requests."""
    with closing(sqlite3.connect(database)) as cache:
        if not cache.execute("SELECT 1 FROM sqlite_master WHERE name = 'request_cache'").fetchall():
            return {}  # killed before it was made
        rows = cache.execute("SELECT doc_id, result FROM request_cache WHERE result IS NOT NULL").fetchall()
    return {name: json.loads(result)["text"] for name, result in rows}


def _responses(text: str) -> Iterator[tuple[str, str]]:
    """Go through the answers of a batch format's output; errors are none."""
    for row in _lines(text):
        response = row.get("response") or {}
        if response.get("status_code") == 200 and not row.get("error"):
            yield row["custom_id"], response["body"]["choices"][0]["message"]["content"]


def _lines(text: str) -> Iterator[dict[str, Any]]:
    """Go through whole lines of JSON; the last of a program that was killed may be cut."""
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
