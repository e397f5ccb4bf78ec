"""The examination runs in a process of its own, which ends in many ways: nobody waits for one that does not end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from kvr_mpi.doctor import launch
from kvr_mpi.doctor.launch import Child

REPORTER = "from kvr_mpi.doctor.launch import Reporter; reporter = Reporter(); "
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
    child.end()
    assert [finding.found for finding in child.findings] == ["b"]
    assert child.step == step and problem in child.problem and bool(child.problem) == bool(problem)
    assert not child.lost


@pytest.mark.parametrize(("closes", "problem"), [(True, "SIGKILL"), (False, "hangs")])
def test_a_process_that_lives_on_without_a_word_is_killed(
    closes: bool, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LEAVE_TIMEOUT_S", 0.5)
    program = f"import os, time; {closes} and os.close(1); time.sleep(600)"
    assert problem in Child([sys.executable, "-c", program], os.environ, limit_s=5.0).problem


def test_no_process_outlives_its_parent() -> None:
    inner = REPORTER + "import os, sys; print(os.getpid(), file=sys.stderr, flush=True); import time; time.sleep(600)"
    outer = (
        f"import os, sys; from kvr_mpi.doctor.launch import Child; Child([sys.executable, '-c', {inner!r}], os.environ)"
    )
    with subprocess.Popen([sys.executable, "-c", outer], stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        pid = int(parent.stderr.readline())
        parent.kill()
    ends = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < ends:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
