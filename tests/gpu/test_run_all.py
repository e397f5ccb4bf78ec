"""What `make test-gpu` does where there is no GPU, and what becomes of steps that hang or fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_steps
import pytest
import torch
from gpu_steps import Given, Outcome, Step, run_step
from run_all import BUDGET_S, STEPS

from benchmarks.links import slow_links

SCRIPT = Path(__file__).parent / "run_all.py"
DUMP_S = 1.0
# What a step's process has at its beginning.
HEAD = f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
import gpu_steps
from gpu_steps import *
gpu_steps.DUMP_S = {DUMP_S}
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give processes less time to show their stacks."""
    monkeypatch.setattr(gpu_steps, "DUMP_S", DUMP_S)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_stops_before_the_first_step_that_needs_one(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, SCRIPT, "--output", tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 77, run.stdout + run.stderr
    assert "No GPU here: stopped before the first step that needs one (attention); exit code 77." in run.stdout
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    first, *others = report["steps"]
    assert (first["name"], first["status"]) == ("machine", "ok") and first["figures"]["gpus"] == 0
    assert first["figures"]["torch"] == torch.__version__.partition("+")[0] or first["figures"]["torch"]
    assert len(others) >= 12 and {each["status"] for each in others} == {"absent"}
    assert (tmp_path / "gpu-report.txt").read_text() in run.stdout


def _outcome(tmp_path: Path, code: str, timeout_s: float = 60.0, python: Sequence[str] = (sys.executable,)) -> Outcome:
    program = tmp_path / "step.py"
    program.write_text(f"{HEAD}\n{code}\n")
    return run_step(Step("it", "", "", timeout_s), [*python, str(program)], tmp_path)


START = "subprocess.run([sys.executable, '-c', rank], start_new_session=True)"
COMMAND = f"run_command([sys.executable, '-c', f'import subprocess, sys; rank = {{rank!r}}; ' + {START!r}], 2.0)"


@pytest.mark.parametrize(("start", "limit_s", "status"), [(START, 4.0, "timeout"), (COMMAND, 60.0, "failed")])
def test_ranks_that_a_step_has_started_show_where_they_stand(
    start: str, limit_s: float, status: str, tmp_path: Path
) -> None:
    """Also if the command that has started them is ended within the step."""
    lost, file = "def lost(): time.sleep(600)", tmp_path / "pid"
    begin = f"faulthandler.register(signal.SIGUSR1)\nopen({str(file)!r}, 'w').write(str(os.getpid()))\nlost()"
    rank = f"import faulthandler, os, signal, time\n{lost}\n{begin}"
    outcome = _outcome(tmp_path, f"rank = {rank!r}\n{start}", limit_s)
    assert outcome.status == status and "in lost" in outcome.said
    wait_for_end_of(int(file.read_text()))


def wait_for_end_of(pid: int) -> None:
    state, until = Path(f"/proc/{pid}/status"), time.monotonic() + 30
    with contextlib.suppress(OSError):  # a signal is on its way for a while; then it is gone, or nobody's to bury
        while "State:\tZ" not in state.read_text():
            assert time.monotonic() < until, "it is still running"
            time.sleep(0.05)


def test_nccls_recorders_are_asked_when_time_is_up(tmp_path: Path) -> None:
    """A rank that has ended leaves its pipe behind."""
    os.mkfifo(tmp_path / "nccl-1.pipe")
    code = """
assert os.environ["NCCL_DEBUG"] == "WARN"
name = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe"
os.mkfifo(name)
reader = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
while not os.read(reader, 1):
    time.sleep(0.05)
open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0", "w").write("the last messages")
time.sleep(600)"""
    assert _outcome(tmp_path, code, 5.0).status == "timeout"
    assert (tmp_path / "nccl-messages-0").read_text() == "the last messages"


@pytest.mark.parametrize(
    ("work", "status", "said"),
    [
        ("return {'queries': attend(rows, rows, rows, AttentionParams(1.0, softcap=2.0)).out.shape[2]}", "ok", ""),
        ("raise Absent('one GPU')", "absent", "one GPU"),
        ("assert 1 == 2, 'worse than allowed'", "failed", "worse than allowed"),
        ("import os; os._exit(3)", "failed", ""),
        ("import time; time.sleep(600)", "timeout", "in work"),
    ],
)
def test_what_a_step_tells(tmp_path: Path, work: str, status: str, said: str, warm_start: list[str]) -> None:
    limit_s = 4.0 if status == "timeout" else 60.0
    code = f"""
import torch
from kvr_mpi.kv.attention import AttentionParams, attend

rows = torch.zeros(1, 2, 5, 8)

def work(given):
    {work}

run_inside(Step("it", "", "__main__:work", {limit_s}), Given())"""
    outcome = _outcome(tmp_path, code, limit_s, warm_start)
    assert outcome.status == status and said in outcome.said
    figures = {"queries": 5, "attention": "CPU", "calls of attention": "blocks 1"}
    assert outcome.figures == (figures if status == "ok" else {})


def test_a_step_gets_no_more_than_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an hour is half an hour."""
    limits: list[float] = []

    def run(step: Step, command: list[str], logs: Path) -> Outcome:
        limits.append(float(command[command.index("--limit") + 1]))
        return Outcome(step.name, "ok")

    monkeypatch.setattr(gpu_steps, "run_step", run)
    steps = [Step(name, "", "", limit_s) for name, limit_s in (("short", 40.0), ("long", 300.0))]
    monkeypatch.setattr(gpu_steps, "clocks", lambda: ["1980 MHz"])
    assert gpu_steps.run_all(steps, Given(), SCRIPT, 100.0)[1].figures == {"gpu 0 after": "1980 MHz"}
    assert limits[0] == 40.0 and limits[1] <= 100.0 - gpu_steps.DUMP_S + 0.5
    (late,) = gpu_steps.run_all(steps[:1], Given(), SCRIPT, 0.0)
    assert late.status == "absent" and "no time is left" in late.said


def test_all_steps_fit_into_the_time_for_all() -> None:
    """By their own limits, so that the last one is reached; those that need a model of the user's are on top."""
    assert sum(step.timeout_s for step in STEPS if not step.needs_model) <= BUDGET_S
    (absent,) = gpu_steps.run_all([Step("it", "", "", needs_gpu=False, needs_model=True)], Given(), SCRIPT, 100.0)
    assert absent.status == "absent" and "--model" in absent.said


def test_slow_links_between_hosts_are_warned_of() -> None:
    rows = [{"bytes": 1 << 28, "from_rank": rank, "gigabytes_per_s": 1.2} for rank in range(3)]
    hosts: list[Any] = [("a", ["Slingshot"]), ("a", ["Slingshot"]), ("b", ["Slingshot"]), ("c", [])]
    (line,) = slow_links([*rows, {**rows[1], "bytes": 1 << 16}, {**rows[1], "gigabytes_per_s": 22.0}], hosts)
    assert "1.20 GB/s from rank 1 on a to b" in line and "Slingshot" in line


def test_the_end_of_an_allocation_ends_a_step_and_leaves_the_report_of_those_before(tmp_path: Path) -> None:
    program, pid = tmp_path / "steps.py", tmp_path / "pid"
    program.write_text(f"""
import os, sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
import run_all
from gpu_steps import Step

def long(given):
    open({str(pid)!r}, "w").write(str(os.getpid()))
    time.sleep(600)

run_all.__file__, quick = __file__, lambda given: {{"ms": 1.5}}
run_all.STEPS = [Step(name, "", f"__main__:{{name}}", needs_gpu=False) for name in ("quick", "long")]
sys.exit(run_all.main())""")
    with subprocess.Popen([sys.executable, program, "--output", tmp_path], stdout=subprocess.PIPE, text=True) as run:
        until = time.monotonic() + 120
        while not (pid.exists() and pid.read_text()):
            assert time.monotonic() < until, "the second step has not begun"
            time.sleep(0.05)
        run.terminate()
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM and (tmp_path / "gpu-report.txt").read_text() in said
    steps = json.loads((tmp_path / "gpu-report.json").read_text())["steps"]
    assert [(step["name"], step["figures"]["ms"]) for step in steps] == [("quick", 1.5)]
    wait_for_end_of(int(pid.read_text()))
