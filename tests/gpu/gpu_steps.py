"""The runner of `run_all`: steps one after the other, each a process of its own that is ended when its time is up.

A step is a function that raises `Absent` if the machine lacks what it needs, and returns its figures otherwise.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "timeout", "absent"]
Figures = dict[str, Any]
# Marks the line of a step's output that has its figures.
MARK = "kvr-gpu-step: "
TAIL_LINES = 60
# Before a step's time is up its process shows where it stands; so long that takes at most.
DUMP_S = 5.0
# With less than this left of the time for all, no step is begun.
LEAST_S = 30.0
# What NCCL finds wrong it says in a step's output. Its flight recorder remembers the last messages of each rank, and
# writes them to `MESSAGES` and the rank when something is written to `PIPE`, the rank, and ".pipe".
ENVIRONMENT = {"NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "2000"}
MESSAGES, PIPE = "nccl-messages-", "nccl-"
CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"


class Absent(Exception):  # noqa: N818 - it is no error
    """This machine lacks what a step needs; says what."""


@dataclass(frozen=True)
class Given:
    """What the user said: a model's folder, or none; where files may be written.

    device : where steps compute; a CPU only to try the steps themselves.
    is_small : take sizes that a CPU computes in seconds.
    """

    model: str = ""
    output: str = "."
    device: str = "cuda:0"
    is_small: bool = False

    @property
    def kind(self) -> str:
        """What kind of device that is, as jobs and commands name it."""
        return self.device.partition(":")[0]


@dataclass(frozen=True)
class Step:
    """A step of the examination.

    work : where it is, as ``module:name``: imported by the step's own process.
    needs_gpu : without a GPU it, and all that follow, are not begun.
    needs_model : it is absent without --model.
    """

    name: str
    about: str
    work: str
    timeout_s: float = 120.0
    needs_gpu: bool = True
    needs_model: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    name: str
    status: Status
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    said: str = ""  # why it is absent, or how it failed: the end of its output, with a stack dump after a timeout


def run_inside(step: Step, given: Given) -> None:
    """Run a step in this process, and print what came of it as one line."""
    from gpu_machine import attention_of, count_attention  # which imports this file

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.dump_traceback_later(max(1.0, step.timeout_s - DUMP_S / 2), exit=True)
    try:
        module, _, name = step.work.partition(":")
        work, calls = getattr(importlib.import_module(module), name), count_attention()
        found: dict[str, Any] = {"status": "ok", "figures": work(given) | attention_of(given, calls)}
    except Absent as why:
        found = {"status": "absent", "said": str(why)}
    except BaseException:
        found = {"status": "failed", "said": traceback.format_exc()[-6000:]}
    faulthandler.cancel_dump_traceback_later()
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


def run_step(step: Step, command: Sequence[str], logs: Path) -> Outcome:
    """Run a step's process, with all it starts, until it ends or its time is up; what it prints goes to a file."""
    began, file = time.monotonic(), logs / f"{step.name.replace(' ', '-')}.txt"
    environ = environment_of(logs)
    logs.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, env=environ
        )
        try:
            process.wait(max(1.0, step.timeout_s - DUMP_S))
        except subprocess.TimeoutExpired:
            show_stacks(process.pid, environ)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DUMP_S)
        finally:  # also when this process is told to end
            end_all(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may keep it
                process.wait(DUMP_S)
    told = file.read_text(errors="replace")
    seconds = time.monotonic() - began
    lines = told.splitlines()
    marked = [line for line in lines if line.startswith(MARK)]
    if marked:
        return Outcome(step.name, seconds=seconds, **json.loads(marked[-1].removeprefix(MARK)))
    is_late = "Timeout (" in told or seconds >= step.timeout_s
    return Outcome(step.name, "timeout" if is_late else "failed", seconds, said="\n".join(lines[-TAIL_LINES:]))


def environment_of(logs: Path) -> dict[str, str]:
    """Variables of a step's process; NCCL's recorders write to the folder of logs."""
    files = {"TORCH_FR_DUMP_TEMP_FILE": logs / MESSAGES, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": logs / PIPE}
    return {**os.environ, **ENVIRONMENT, **{name: str(file.absolute()) for name, file in files.items()}}


def show_stacks(pid: int, environ: Mapping[str, str]) -> None:
    """Have a process and all that it has started show their stacks, and NCCL's recorders write what they remember."""
    for member in (member for member, catches in family_of(pid).items() if catches):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGUSR1)
    pipes = Path(environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", PIPE))
    for pipe in pipes.parent.glob(f"{pipes.name}*.pipe"):  # of ranks that have ended nobody reads them
        with contextlib.suppress(OSError):
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(writer, b"1")
            os.close(writer)


def family_of(pid: int) -> dict[int, bool]:
    """Find a process and all that it has started, and whether each of them shows its stacks on ``SIGUSR1``."""
    parents, catches = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            found = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            parents[int(found["Pid"])] = int(found["PPid"])
            catches[int(found["Pid"])] = bool(int(found["SigCgt"], 16) >> (signal.SIGUSR1 - 1) & 1)
    family, before = {pid} & catches.keys(), -1
    while len(family) > before:
        before = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return {member: catches[member] for member in family}


def end_all(pid: int) -> None:
    """Kill a process and all that it has started, whatever their sessions."""
    for member in family_of(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def clocks() -> list[str]:
    """Say at which clocks the GPUs run, how warm they are, and what holds them back."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    return []


def run_command(command: Sequence[str], timeout_s: float) -> str:
    """Run one of our commands within a step, and return what it printed.

    Raises
    ------
    RuntimeError
        If it fails, or does not end: with the end of what it printed.
    """
    with subprocess.Popen(list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:

        def stop() -> None:
            is_late.set()
            show_stacks(process.pid, os.environ)
            time.sleep(DUMP_S)
            end_all(process.pid)

        limit, is_late, lines = threading.Timer(timeout_s, stop), threading.Event(), list[str]()
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:  # what it prints until this step is ended is in the step's log
            print(line, end="", flush=True)
            lines.append(line)
    limit.cancel()
    told = "".join(lines)
    if is_late.is_set():
        raise RuntimeError(f"{' '.join(command)}: not done after {timeout_s:.0f} s\n{told[-6000:]}")
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}\n{told[-3000:]}")
    return told


def run_all(
    steps: Sequence[Step],
    given: Given,
    script: Path,
    budget_s: float,
    tell: Callable[[Sequence[Outcome]], object] = len,
) -> list[Outcome]:
    """Run the steps in turn; those for which no time is left, or no GPU is there, are said to be absent.

    Parameters
    ----------
    tell : callable
        Given all outcomes so far, after every step: whatever ends this program, they are told.
    """
    outcomes: list[Outcome] = []
    began = time.monotonic()
    for step in steps:
        left_s = budget_s - (time.monotonic() - began)
        if step.needs_gpu and is_without_gpus(outcomes):
            outcomes.append(Outcome(step.name, "absent", said="this machine has no GPU that torch can use"))
        elif step.needs_model and not given.model:
            outcomes.append(Outcome(step.name, "absent", said="needs a model of yours: --model FOLDER"))
        elif left_s < LEAST_S:
            outcomes.append(Outcome(step.name, "absent", said=f"no time is left of the {budget_s:.0f} s (--budget)"))
        else:
            begun = replace(step, timeout_s=min(step.timeout_s, left_s - DUMP_S))
            print(f"{step.name}: {step.about} (at most {begun.timeout_s:.0f} s)", flush=True)
            words = [sys.executable, str(script), "--step", step.name, "--limit", f"{begun.timeout_s:.0f}"]
            words += ["--model", given.model, "--output", given.output]
            outcomes.append(run_step(begun, words, Path(given.output) / "logs"))
            outcomes[-1].figures.update({f"gpu {number} after": now for number, now in enumerate(clocks())})
            print(f"  {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s", flush=True)
        tell(outcomes)
    return outcomes


def is_without_gpus(outcomes: Sequence[Outcome]) -> bool:
    """Whether a step found no GPU: a driver that hangs would hang this process, too, which nothing ends."""
    return any(outcome.figures.get("gpus") == 0 for outcome in outcomes)


def write_report(outcomes: Sequence[Outcome], about: Mapping[str, Any], folder: Path) -> str:
    """Write the report as JSON and as a page of text, and return that."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**about, "steps": [asdict(outcome) for outcome in outcomes]}
    (folder / "gpu-report.json").write_text(json.dumps(whole, indent=1) + "\n")
    page = "\n".join([*(f"{name}: {value}" for name, value in about.items()), "", *map(_lines_of, outcomes)]) + "\n"
    (folder / "gpu-report.txt").write_text(page)
    return page


def _lines_of(outcome: Outcome) -> str:
    said = outcome.said if outcome.status == "absent" else ""
    lines = [f"{outcome.status:8}{outcome.name:22}{outcome.seconds:6.0f} s  {said}".rstrip()]
    for name, value in outcome.figures.items():
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        lines += [f"          {name}: {text.splitlines()[0] if text else ''}"[:160]]
    if outcome.status in ("failed", "timeout"):
        lines += [f"          {line}"[:160] for line in outcome.said.splitlines()[-8:]]
    return "\n".join(lines)
