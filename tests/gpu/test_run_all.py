"""What `make test-gpu` does where there is no GPU, and what becomes of steps that hang or fail."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import gpu_steps
import pytest
import torch
from gpu_steps import MARK, Given, Outcome, Step, run_all, run_step, write_report

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
    return run_step(Step("it", "", lambda given: {}, timeout_s), [sys.executable, str(program)], tmp_path)


def test_a_step_that_hangs_is_ended_and_shows_where_it_stood(tmp_path: Path) -> None:
    code = (
        "import time\ndef stands_still(given): time.sleep(600)\nrun_inside(Step('it', '', stands_still, 6.0), Given())"
    )
    outcome = _outcome(tmp_path, code, 6.0)
    assert outcome.status == "timeout" and "in stands_still" in outcome.said


def test_a_step_that_hangs_beyond_python_is_killed(tmp_path: Path) -> None:
    outcome = _outcome(tmp_path, "import signal, time\nprint('begun', flush=True)\ntime.sleep(600)", 1.0)
    assert (outcome.status, outcome.said) == ("timeout", "begun") and (tmp_path / "it.txt").read_text() == "begun\n"


def test_ranks_that_a_step_has_started_show_where_they_stand(tmp_path: Path) -> None:
    lost, file = "def lost(): time.sleep(600)", tmp_path / "pid"
    begin = f"faulthandler.register(signal.SIGUSR1)\nopen({str(file)!r}, 'w').write(str(os.getpid()))\nlost()"
    rank = f"import faulthandler, os, signal, time\n{lost}\n{begin}"
    code = f"subprocess.run([sys.executable, '-c', {rank!r}], start_new_session=True)"
    outcome = _outcome(tmp_path, code, 6.0)
    assert outcome.status == "timeout" and "in lost" in outcome.said
    status, until = Path(f"/proc/{file.read_text()}/status"), time.monotonic() + 30
    with contextlib.suppress(OSError):  # a signal is on its way for a while; then it is gone, or nobody's to bury
        while "State:\tZ" not in status.read_text():
            assert time.monotonic() < until, "it is still running"
            time.sleep(0.05)


def test_the_report_is_written_whatever_ends_the_steps(tmp_path: Path) -> None:
    """Ctrl-C, or the end of an allocation, in the middle of the second step."""
    told: list[int] = []

    def run(step: Step, command: list[str], logs: Path) -> Outcome:
        if told:
            raise KeyboardInterrupt
        return Outcome(step.name, "ok")

    steps = [Step(name, "", lambda given: {}, 40.0) for name in ("one", "two")]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gpu_steps, "run_step", run)
        run_all(steps, Given(), SCRIPT, lambda: True, 100.0, lambda outcomes: told.append(len(outcomes)))
    assert told == [1]


@pytest.mark.parametrize(
    ("work", "status", "said"),
    [
        ("return {'ms': 1.5}", "ok", ""),
        ("raise Absent('one GPU')", "absent", "one GPU"),
        ("assert 1 == 2, 'worse than allowed'", "failed", "worse than allowed"),
        ("import os; os._exit(3)", "failed", ""),
    ],
)
def test_what_a_step_tells(tmp_path: Path, work: str, status: str, said: str) -> None:
    outcome = _outcome(tmp_path, f"def work(given):\n    {work}\nrun_inside(Step('it', '', work), Given())")
    assert outcome.status == status and said in outcome.said
    assert outcome.figures == ({"ms": 1.5} if status == "ok" else {})


def test_the_page_says_what_failed(tmp_path: Path) -> None:
    page = write_report([Outcome("nccl", "failed", 2.0, said="one\nranks 0 and 1 differ")], {"date": "today"}, tmp_path)
    assert "date: today" in page and "failed  nccl" in page and "ranks 0 and 1 differ" in page
    assert MARK not in page


def test_a_step_gets_no_more_than_is_left_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an hour is half an hour, whatever its steps would take."""
    limits: list[tuple[float, float]] = []

    def run(step: Step, command: list[str], logs: Path) -> Outcome:
        limits.append((step.timeout_s, float(command[command.index("--limit") + 1])))
        return Outcome(step.name, "ok")

    monkeypatch.setattr(gpu_steps, "run_step", run)
    steps = [Step(name, "", lambda given: {}, limit) for name, limit in (("short", 40.0), ("long", 300.0))]
    assert [each.status for each in run_all(steps, Given(), SCRIPT, lambda: True, 100.0)] == ["ok", "ok"]
    (late,) = run_all([Step("late", "", lambda given: {}, 100.0)], Given(), SCRIPT, lambda: True, 0.0)
    assert late.status == "absent" and "no time is left" in late.said
    (short, told_short), (long, told_long) = limits
    assert (short, told_short) == (40.0, 40.0)
    assert long + gpu_steps.DUMP_S <= 100.0 and abs(told_long - long) <= 0.5
