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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.cores import all_cores
from benchmarks.gguf_weights import dequantised_gguf
from kvr_mpi.errors import ConfigError
from kvr_mpi.model import find_model
from kvr_mpi.model.source import find_converted


@dataclass(frozen=True, slots=True)
class Engine:
    """Another engine.

    program : in ``outside``.
    form : format of the weights in the GGUF file that it reads, by the dtype of the model (`gguf_weights.FORMATS`); no
        entry: it reads a folder of safetensors.
    """

    program: str
    form: Mapping[str, str] = field(default_factory=dict)


# By name. In llama.cpp weights in float32 were the fastest of all formats on AVX2 (a Zen 1, 256 tokens, keys and values
# in float16: 5 to 6 seconds of processor time; bfloat16 7.5 to 8, float16 slower yet), and the most exact. Processors
# with AVX512-BF16 were not tried.
ENGINES = {
    "openvino": Engine("run_openvino.py", {"float32": "f16", "bfloat16": "f16"}),
    "llama.cpp": Engine("run_llamacpp.py", {"float32": "f32", "bfloat16": "f32"}),
    "vllm": Engine("run_vllm.py"),
}
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
        Of `ENGINES`.
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
        started = self._read()
        self.version, self.runs_in = str(started["version"]), str(started["runs_in"])

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
            told = " ".join("".join([line for line in self._said if line.strip()][-4:]).split())
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
def open_rival(
    name: str, model: str, dtype: str, longest: int, folder: Path, at_once: int, cache_dir: Path
) -> Iterator[Rival]:
    """Start an engine on all cores of the host, in its best configuration for a dtype.

    Parameters
    ----------
    model : str
        As for `find_model`; engines that read GGUF files need one.
    dtype : str
        ``float32`` or ``bfloat16``.
    longest : int
        Tokens of the longest prompt, with its answer.
    folder : Path
        Of the environments, each under its engine's name.
    at_once : int
        Prompts for which an engine that wants to know it beforehand keeps room.
    cache_dir : Path
        For files that engines read.

    Raises
    ------
    ConfigError
        If there is no such engine, environment or file, or it does not start.
    """
    if name not in ENGINES:
        raise ConfigError(f"--rivals {name!r}: expected some of {', '.join(ENGINES)}")
    engine = ENGINES[name]
    python = folder / name / "bin" / "python"
    if not python.exists():
        raise ConfigError(
            f"--rivals {name}: no Python environment at {python}; `benchmarks/install_rivals {name}` creates it"
        )
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--rivals {name}: expected float32 or bfloat16 as dtype (--dtype, model.dtype), got {dtype}")
    if not engine.form:
        file = find_converted(model, cache_dir).path
    elif (file := find_model(model).path).suffix == ".gguf":
        file = dequantised_gguf(file, cache_dir, engine.form[dtype], dtype)
    else:
        raise ConfigError(f"--rivals {name}: model {model} is not a .gguf file, the only format that {name} reads here")
    program = Path(__file__).parent / "outside" / engine.program
    with all_cores():
        threads = len(os.sched_getaffinity(0))
        process = subprocess.Popen(
            [python, "-I", program, file, str(threads), str(longest), str(at_once), dtype],
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
