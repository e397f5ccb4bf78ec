"""The examination runs in a process of its own, which ends in many ways: nobody waits for one that does not end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from kvr_mpi.doctor import process
from kvr_mpi.doctor.process import Child

REPORTER = "from kvr_mpi.doctor.process import Reporter; reporter = Reporter(); "
FINDING = "from kvr_mpi.doctor.findings import ok; reporter.findings([ok('a', 'b')]); "


@pytest.mark.parametrize(
    ("program", "step", "problem"),
    [
        (REPORTER + "reporter.step('x', 60); " + FINDING + "reporter.end(False)", "end", ""),
        (
            REPORTER + "reporter.step('x', 60); " + FINDING + "print('noise'); import os; os.abort()",
            "x",
            "signal SIGABRT",
        ),
        (REPORTER + "reporter.step('x', 60); " + FINDING + "raise SystemExit(3)", "x", "exit code 3"),
        (REPORTER + "reporter.step('x', 0.5); " + FINDING + "import time; time.sleep(60)", "x", "hangs"),
    ],
)
def test_what_a_process_wrote_is_kept_however_it_ends(program: str, step: str, problem: str) -> None:
    child = Child([sys.executable, "-c", program], os.environ)
    outcome = child.outcome()
    child.end()
    assert [finding.found for finding in outcome.findings] == ["b"]
    assert outcome.step == step and problem in outcome.problem and bool(outcome.problem) == bool(problem)
    assert not outcome.lost


@pytest.mark.parametrize(("closes", "problem"), [(True, "SIGKILL"), (False, "hangs")])
def test_a_process_that_lives_on_without_a_word_is_killed(
    closes: bool, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LEAVE_TIMEOUT_S", 0.5)
    program = f"import os, time; {closes} and os.close(1); time.sleep(600)"
    assert problem in Child([sys.executable, "-c", program], os.environ).outcome(limit_s=5.0).problem


def test_no_process_outlives_its_parent() -> None:
    inner = REPORTER + "import os; reporter.step(str(os.getpid()), 600); import time; time.sleep(600)"
    outer = (
        "import os, sys; from kvr_mpi.doctor.process import Child; "
        f"child = Child([sys.executable, '-c', {inner!r}], os.environ); "
        "print(child._lines.get(timeout=60).decode(), flush=True); os._exit(0)"
    )
    run = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, timeout=120, check=True)
    pid, ends = int(run.stdout.split('"step": "')[1].split('"')[0]), time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < ends:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
