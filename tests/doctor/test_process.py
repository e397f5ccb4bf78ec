"""Processes end in many ways, and nobody waits for one that does not end."""

from __future__ import annotations

import os
import sys
import time

import pytest

from kvr_mpi.doctor import process
from kvr_mpi.doctor.process import Child, run_limited

TELL = "from kvr_mpi.doctor.process import Tell; tell = Tell(); "
FINDING = "from kvr_mpi.doctor.findings import ok; tell.findings([ok('a', 'b')]); "


@pytest.mark.parametrize(
    ("program", "step", "problem"),
    [
        (TELL + "tell.step('x', 60); " + FINDING + "tell.end(False)", "end", ""),
        (TELL + "tell.step('x', 60); " + FINDING + "print('noise'); import os; os.abort()", "x", "signal SIGABRT"),
        (TELL + "tell.step('x', 60); " + FINDING + "raise SystemExit(3)", "x", "exit code 3"),
        (TELL + "tell.step('x', 0.5); " + FINDING + "import time; time.sleep(60)", "x", "hangs"),
    ],
)
def test_what_a_process_wrote_is_kept_however_it_ends(program: str, step: str, problem: str) -> None:
    outcome = Child([sys.executable, "-c", program], os.environ).outcome()
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


def test_a_process_whose_ranks_are_lost_waits_until_that_is_reported() -> None:
    program = TELL + "tell.end(True); raise SystemExit(7)"
    child = Child([sys.executable, "-c", program], os.environ)
    assert child.outcome().lost
    child.release()
    assert child.end(0.0) == 7


def test_no_process_outlives_its_parent() -> None:
    inner = TELL + "import os; tell.step(str(os.getpid()), 600); import time; time.sleep(600)"
    outer = (
        "import os, sys; from kvr_mpi.doctor.process import Child; "
        f"child = Child([sys.executable, '-c', {inner!r}], os.environ); "
        "print(child._lines.get(timeout=60).decode(), flush=True); os._exit(0)"
    )
    code, output, errors = run_limited([sys.executable, "-c", outer], os.environ, 120.0)
    assert code == 0, errors
    pid, ends = int(output.split('"step": "')[1].split('"')[0]), time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < ends:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_command_is_limited_with_all_that_it_starts() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert run_limited([sys.executable, "-c", program], os.environ, 1.0)[0] is None
    assert run_limited(["/no/such/program"], {}, 1.0)[0] == 127
    assert run_limited([sys.executable, "-c", "print(1)"], os.environ, 60.0)[:2] == (0, "1\n")
