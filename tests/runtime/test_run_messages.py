"""What a run says: who and how long, each phase before it begins, how it ended, and commands that work as printed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from constants import Kvr
from made_jobs import last_line, with_settings

from kvr_mpi.cli import group
from kvr_mpi.errors import EXIT_USAGE
from kvr_mpi.store.results import open_results


def test_quiet_leaves_what_went_wrong_and_verbose_adds_what_was_chosen(
    job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr
) -> None:
    (tmp_path / "corpus" / "empty.txt").write_text(" ")
    quiet = run_here(2, [job, "--quiet"])
    failed, last = quiet.stderr.splitlines()
    assert "empty.txt: error: " in failed and "exit code 65: " in last and quiet.stdout == ""
    normal, verbose = (run_here(2, [job, "--overwrite", *words]) for words in ((), ("--verbose",)))
    for word in ("transport: ", "torch 2"):
        assert word in verbose.stderr and word not in normal.stderr
    assert len(re.findall(r"is valid|loading|documents: 6|layers", normal.stderr)) == 4
    assert run_kvr("run", job, "--quiet", "--verbose")[0] == EXIT_USAGE


def test_the_status_of_a_run_is_in_plain_words(job: Path, tmp_path: Path, run_here: Any) -> None:
    def state() -> str:
        return CliRunner().invoke(group, ["status", str(tmp_path / "out")]).output.splitlines()[0]

    (tmp_path / "corpus" / "empty.txt").write_text(" ")
    stopped = run_here(1, [job, "--time-limit", "0:01"])
    assert stopped.returncode == 75, stopped.stderr
    assert last_line(stopped.stderr).startswith("exit code 75: stopped before the end")
    assert "not running and not finished; the same kvr-run command with --resume continues" in state()
    assert run_here(1, [job, "--resume"]).returncode == 65
    before = list(open_results(tmp_path / "out"))
    assert run_here(1, [job, "--resume"]).returncode == 65
    assert list(open_results(tmp_path / "out")) == before, "nothing is repeated, nor what failed"
    assert "finished, 1 with an error record (--retry-failed tries them again)" in state()


@pytest.mark.slow
def test_the_closing_hints_work_as_printed(job: Path, tmp_path: Path, kvr_run: Path) -> None:
    """Called by its path, in a shell that finds nothing of ours by name, and with words a shell would take apart."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "bin").symlink_to(kvr_run.parent)
    (tmp_path / "corpus" / "a b's.txt").write_text("An odd name.")
    settings = with_settings("parallel.strategy=single", "documents.limit=1", "output.path=the results")
    command = ["env/bin/kvr-run", str(job), *settings]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    hints = [line.partition("env/bin/")[1:] for line in run.stdout.splitlines() if "env/bin/kvr " in line]
    assert len(hints) == 3
    shell = {**os.environ, "PATH": "/usr/bin:/bin"}
    for hint in map("".join, hints):
        done = subprocess.run(hint, shell=True, cwd=tmp_path, env=shell, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "a b's.txt" in done.stdout, (hint, done.stderr)
