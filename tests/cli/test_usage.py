"""Wrong arguments, nothing to read and readers that have gone: a line at most, and the right exit code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from constants import Kvr
from shown_runs import write_run

from kvr_mpi.cli.environment import is_offline
from kvr_mpi.cli.launch import guarded
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_BUG, EXIT_CONFIG, EXIT_OK, EXIT_USAGE, ConfigError
from kvr_mpi.store.record import Record
from kvr_mpi.transport.local import LocalTransport, run_local

# Arguments and paths


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("export", "Usage: kvr"),
        ("export x --format xml", "Usage: kvr"),
        ("inspect a b c", "Usage: kvr"),
        ("search --heads heads.json", "Usage: kvr"),
        ("stauts", "No such command 'stauts'. Did you mean 'status'?"),
        ("exprot", "No such command 'exprot'. Did you mean 'export'"),
        ("xyz", "No such command 'xyz'.\n"),
    ],
)
def test_wrong_arguments_are_a_usage_error(arguments: str, words: str, run_kvr: Kvr) -> None:
    code, out, err = run_kvr(*arguments.split())
    assert code == EXIT_USAGE and out == "" and words in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_nothing_to_read_is_bad_data_or_a_wrong_path(tmp_path: Path, command: str, run_kvr: Kvr) -> None:
    (tmp_path / "empty").mkdir()
    for path, expected in ((tmp_path / "absent.h5", EXIT_CONFIG), (tmp_path / "empty", EXIT_BAD_DATA)):
        code, out, err = run_kvr(command, path)
        assert code == expected and out == "" and len(err.splitlines()) == 1 and path.name in err


@pytest.mark.parametrize(
    ("value", "alone", "in_a_job"),
    [("1", True, True), ("yes", True, True), ("0", False, False), ("off", False, False), ("", False, True)],
)
def test_offline_as_the_hub_library_reads_it_and_by_default_in_a_job(value: str, alone: bool, in_a_job: bool) -> None:
    assert is_offline({"HF_HUB_OFFLINE": value}) is alone
    assert is_offline({"HF_HUB_OFFLINE": value, "SLURM_JOB_ID": "1"}) is in_a_job


# Pipes


def test_head_gets_its_line_and_nobody_complains(tmp_path: Path, kvr: Path) -> None:
    # More than fits into a pipe, so that export is still writing when head has gone.
    path = write_run(tmp_path / "run", [Record(f"{n:03d}", "done", answer="x" * 5000) for n in range(60)])
    for words in (f"export {path}", f"export {path} --format csv", f"inspect {path} 000"):
        command = f"{kvr} {words} | head -1"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300, check=True)
        assert len(done.stdout.splitlines()) == 1
        assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["export"], ["inspect", "nasty"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_traceback(result: Path, kvr: Path, arguments: list[str]) -> None:
    # Little output stays in a buffer until the very end; it is there that writing fails.
    source, sink = os.pipe()
    os.close(source)
    command: list[str | Path] = [kvr, arguments[0], result, *arguments[1:]]
    with os.fdopen(sink, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("kvr st", ["plain,status"]),
        ("kvr export x --format par", ["plain,parquet"]),
        ("kvr plan jobs/", ["file,jobs/"]),
        ("kvr-run --over", ["plain,--overwrite"]),
    ],
)
def test_the_tab_key_completes(words: str, found: list[str], kvr: Path) -> None:
    """As the lines do that ``_KVR_COMPLETE=bash_source kvr`` prints."""
    name, *rest = words.split()
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(rest))}
    asked[f"_{name.upper().replace('-', '_')}_COMPLETE"] = "bash_complete"
    command, env = [kvr.with_name(name)], {**os.environ, **asked}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == found and done.stderr == ""


# Under a launcher


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan", "nowhere.toml"], EXIT_CONFIG, "Error: "),
        (["verify", "--vanished"], EXIT_USAGE, "No such option"),
        (["vanished"], EXIT_USAGE, "No such command"),
        (["run", "--help"], EXIT_OK, "Usage: kvr run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_several_ranks_print_once(arguments: list[str], code: int, words: str, kvr: Path, mpirun: Any) -> None:
    run = mpirun(2, [kvr, *arguments])
    assert (run.stdout + run.stderr).count(words) == 1, run.stdout + run.stderr
    assert run.returncode == code


# Errors and Ctrl-C


def test_a_rank_that_fails_alone_ends_all_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []

    class World(LocalTransport):
        def abort(self, code: int) -> None:  # type: ignore[override]
            ended.append(code)

    def fail(error: Exception) -> int:
        raise error

    for error, code in ((ConfigError("no \x1b[2J ranks"), EXIT_CONFIG), (ZeroDivisionError(), EXIT_BUG)):
        assert guarded(World(), lambda error=error: fail(error)) == code  # type: ignore[misc]
    told = capsys.readouterr().err
    assert ended == [EXIT_CONFIG, EXIT_BUG] and "error: no \\x1b[2J ranks" in told
    assert "ZeroDivisionError" in told and told.count("exit code") == 2


def test_who_interrupts_a_job_is_told_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_local(1, lambda world: guarded(world, interrupted))
    out, err = capsys.readouterr()
    assert "exit code 130: interrupted" in out + err and "--resume" in out + err and "Traceback" not in out + err
