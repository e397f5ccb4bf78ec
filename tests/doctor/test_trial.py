"""Transfers are tried in processes of their own, which end in many ways: nobody waits for one that does not end."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace

import pytest
from made_facts import GPU, MPI, only, place

from kvr_mpi.doctor import process, trial
from kvr_mpi.doctor.facts import DeviceFacts
from kvr_mpi.doctor.process import Child, python_module, run_limited


@pytest.mark.parametrize(("device", "cuda"), [(GPU, True), (GPU, False), (DeviceFacts(), True)])
def test_what_is_tried(device: DeviceFacts, cuda: bool) -> None:
    facts = [place(0, device=device, mpi=replace(MPI, cuda=cuda))]
    assert trial.is_to_be_tried(facts) == (cuda and device is GPU)
    word = "no GPU" if device is not GPU else "tested" if cuda else "staged"
    assert word in only(trial.check_cuda_awareness(facts)).found


READY = '{"ready": 0}{"ready": 1}'
RIGHT = "".join(
    json.dumps({"rank": rank, "bytes": size, "sent": rank + size, "received": 1 - rank + size})
    for rank in (0, 1)
    for size in trial.SIZES
)


@pytest.mark.parametrize(
    ("said", "then", "status", "words"),
    [
        (READY + RIGHT, "", "ok", "checksums correct"),
        (READY + "[1] { noise" + RIGHT, "", "ok", "checksums correct"),
        (READY, "os.abort()", "fail", "crashes (killed by SIGABRT)"),
        (READY + RIGHT, "sys.exit(3)", "fail", "crashes (exit code 3)"),
        (READY, "", "fail", "crashes (exit code 0)"),
        (READY, "threading.Event().wait()", "fail", "hangs, killed after 2 s"),
        (READY + RIGHT.replace('"received": 4096', '"received": 7'), "", "fail", "checksum of 4096 bytes is wrong"),
        ('{"ready": 0}', "sys.exit('no slots')", "warn", "did not start (exit code 1); its output: no slots"),
        ("", "threading.Event().wait()", "warn", "did not start (no response within 2 s)"),
    ],
)
def test_how_a_trial_ends(said: str, then: str, status: str, words: str) -> None:
    program = f"import os, sys, threading; print({said!r}, flush=True); {then}"
    found = trial.try_transfers([sys.executable, "-c", program], dict(os.environ), 2.0)
    assert found.status == status and words in found.found
    assert (found.status == "ok") == (not found.remedy)
    assert "did not start" in trial.try_transfers(["/no/such/mpirun"], {}, 1.0).found


@pytest.mark.slow
def test_two_real_ranks_swap_buffers() -> None:
    launcher = trial.find_launcher((), os.environ["PATH"])
    assert launcher is not None
    command = [*launcher, *python_module("kvr_mpi.doctor.trial", "120")]
    found = trial.try_transfers(command, trial.trial_environment(os.environ, launcher[0]), 120.0)
    assert found.status == "ok" and "checksums correct" in found.found, found


def test_a_trial_starts_as_if_by_hand() -> None:
    environ = {"PMI_FD": "9", "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_JOB_ID": "1", "PRTE_LAUNCHED": "1"}
    kept = {"PATH": "/bin", "OMPI_MCA_pml": "ob1", "PRTE_ALLOW_RUN_AS_ROOT": "1", "CUDA_VISIBLE_DEVICES": "1"}
    assert kept.items() <= trial.trial_environment({**environ, **kept}, "/x/mpirun").items()
    assert not environ.keys() & trial.trial_environment(environ, "/x/mpirun").keys()
    assert "SLURM_JOB_ID" in trial.trial_environment(environ, "/usr/bin/srun")


# Processes

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
