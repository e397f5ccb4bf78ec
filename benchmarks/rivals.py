"""Other engines as rivals: each in an environment of its own, the same model, prompts and cores.

Nothing of theirs is imported here. ``benchmarks/install_rivals`` makes the environments; a rival is a process that is
told what to run line by line (``outside``), on all cores of the host, while the ranks sleep.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.cores import all_cores, plain
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.one_prompt import prefill_single

# Programs by name of the engine.
PROGRAMS = {"openvino": "run_openvino.py", "llama.cpp": "run_llamacpp.py"}
TIMEOUT_S = 1800.0
ENDS_S = 5.0


@dataclass(frozen=True, slots=True)
class RivalAnswer:
    """What an engine made of some prompts.

    seconds, cpu_s : of all of them together.
    tokens : new ones, of each prompt.
    logprobs : the sum over each answer's tokens.
    peak_bytes : the most memory its process has held.
    """

    seconds: float
    cpu_s: float
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[float, ...]
    peak_bytes: int


class Rival:
    """An engine at work; of `open_rival`.

    Parameters
    ----------
    name : str
        Of `PROGRAMS`.
    process : subprocess.Popen
    """

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self._process = name, process
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        streams = ((process.stdout, self._lines.put), (process.stderr, self._said.append))
        self._drains = [threading.Thread(target=_drain, args=each, daemon=True) for each in streams]
        for drain in self._drains:
            drain.start()
        self.version = str(self._read()["version"])

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int, ends: Sequence[int] | None) -> RivalAnswer:
        """Answer prompts greedily; `ends` are the tokens that end an answer, None for none.

        Raises
        ------
        ConfigError
            If the engine fails, or says nothing for half an hour.
        """
        asked = {"prompts": [list(ids) for ids in prompts], "new_tokens": new_tokens, "ends": ends and list(ends)}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended; what it said last is told below
        found = self._read()
        return RivalAnswer(
            float(found["seconds"]),
            float(found["cpu_s"]),
            tuple(tuple(row) for row in found["tokens"]),
            tuple(found["logprobs"]),
            self._peak_bytes(),
        )

    def _read(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=TIMEOUT_S)
        except queue.Empty:
            line = ""
        if not line:
            self._lines.put("")  # it stays so
            try:
                ended = f"ended with {self._process.wait(ENDS_S)}"
            except subprocess.TimeoutExpired:
                ended = f"did not respond for {TIMEOUT_S:.0f} s"
            self._drains[1].join(ENDS_S)  # what it said last may still be on its way
            told = " ".join("".join(self._said[-4:]).split())
            raise ConfigError(f"--rivals {self.name}: it {ended}: {told or 'without output'}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _peak_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def _drain(stream: IO[str], take: Any) -> None:
    """Hand on every line, and an empty one at the end."""
    with stream:
        for line in stream:
            take(line)
    take("")


@contextmanager
def open_rival(name: str, model: Path, longest: int, folder: Path, at_once: int = 1) -> Iterator[Rival]:
    """Start an engine on all cores of the host.

    Parameters
    ----------
    model : Path
        A ``.gguf`` file, which engines read as it is.
    longest : int
        Tokens of the longest prompt, with its answer.
    folder : Path
        Of the environments, each under its engine's name.
    at_once : int
        Prompts for which an engine that wants to know it beforehand keeps room.

    Raises
    ------
    ConfigError
        If there is no such engine, environment or file, or it does not start.
    """
    if name not in PROGRAMS:
        raise ConfigError(f"--rivals {name!r}: expected some of {', '.join(PROGRAMS)}")
    python = folder / name / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"--rivals {name}: no Python environment at {python}; `benchmarks/install_rivals` creates it")
    if model.suffix != ".gguf":
        raise ConfigError(
            f"--rivals {name}: model {model} is not a .gguf file, the only format that the other engines read here"
        )
    program = Path(__file__).parent / "outside" / PROGRAMS[name]
    with all_cores():
        threads = len(os.sched_getaffinity(0))
        process = subprocess.Popen(
            [python, "-I", program, model, str(threads), str(longest), str(at_once)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
    try:
        yield Rival(name, process)
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # what it was not told any more
            process.stdin.close()


@torch.inference_mode()
def exactness_of(rival: Rival, loaded: LoadedModel, ids: Sequence[int]) -> str:
    """Hold an engine's first token, and its log-probability, against plain transformers on this rank.

    Says how many cores the engine kept busy, too: one that is not given what it could use is beaten easily.
    """
    answer = rival.answer([ids], 1, None)
    with all_cores(), plain(loaded):
        cores = len(os.sched_getaffinity(0))
        logits = prefill_single(loaded.model, ids, loaded.device).logits
    assert logits is not None
    logprobs = logits.double().log_softmax(-1).flatten()
    token = answer.tokens[0][0]
    same = "the same first token" if token == int(logprobs.argmax()) else "a different first token"
    error = abs(answer.logprobs[0] - float(logprobs[token]))
    busy = f"{answer.cpu_s / answer.seconds:.1f} of {counted(cores, 'core')} kept busy"
    return f"{rival.name} {rival.version}: {same} as transformers, its log-probability off by {error:.1e}; {busy}"
