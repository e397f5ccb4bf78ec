"""What `make test-gpu` does where there is no GPU, and what becomes of steps that hang or fail."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_steps import Outcome, Step, run_step

SCRIPT = Path(__file__).parent / "run_all.py"


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


def _outcome(tmp_path: Path, code: str, timeout_s: float = 60.0) -> Outcome:
    program = tmp_path / "step.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\nfrom gpu_steps import *\n{code}\n")
    return run_step(Step("it", "", "", timeout_s), [sys.executable, str(program)], tmp_path)


def wait_for_end_of(pid: int) -> None:
    state, until = Path(f"/proc/{pid}/status"), time.monotonic() + 30
    with contextlib.suppress(OSError):  # a signal is on its way for a while; then it is gone, or nobody's to bury
        while "State:\tZ" not in state.read_text():
            assert time.monotonic() < until, "it is still running"
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("work", "status", "said"),
    [
        ("return {'ms': 1.5}", "ok", ""),
        ("raise Absent('one GPU')", "absent", "one GPU"),
        ("assert 1 == 2, 'worse than allowed'", "failed", "worse than allowed"),
        ("import os; os._exit(3)", "failed", ""),
        ("import time; time.sleep(600)", "timeout", "in work"),
    ],
)
def test_what_a_step_tells(tmp_path: Path, work: str, status: str, said: str) -> None:
    limit_s = 6.0 if status == "timeout" else 60.0
    code = f"def work(given):\n    {work}\nrun_inside(Step('it', '', '__main__:work', {limit_s}), Given())"
    outcome = _outcome(tmp_path, code, limit_s)
    assert outcome.status == status and said in outcome.said
    assert outcome.figures == ({"ms": 1.5, "attention": "CPU"} if status == "ok" else {})


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
