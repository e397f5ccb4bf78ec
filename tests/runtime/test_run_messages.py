"""What a run says: who and how long, each phase before it begins, how it ended, and commands that work as printed."""

from __future__ import annotations

import os
import re
import shutil
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
    assert "incomplete, not running; the same kvr-run command with --resume continues" in state()
    assert run_here(1, [job, "--resume"]).returncode == 65
    before = list(open_results(tmp_path / "out"))
    assert run_here(1, [job, "--resume"]).returncode == 65
    assert list(open_results(tmp_path / "out")) == before, "nothing is repeated, nor what failed"
    assert "finished, 1 failed (retry them with --retry-failed)" in state()


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


# What a user gets wrong before a job runs


def test_folders_that_are_missing_are_wrong_arguments_not_damaged_data(tmp_path: Path, run_kvr: Kvr) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("inspect", "export", "status", "merge"):
        for name, expected in (("missing", 78), ("empty", 65)):
            code, _, err = run_kvr(command, tmp_path / name)
            assert code == expected and name in err and len(err.splitlines()) == 1, (command, name, err)


WRONG = [
    ("documents.path=nowhere", ["documents.path 'nowhere'", "no such file or folder"]),
    ("prompt.max_tokens=100000", ["prompt.max_tokens = 100000", "512"]),
    ("generation.max_new_tokens=512", ["max_new_tokens = 512", "no room"]),
    ("model.path={tmp}/damaged", ["cannot be loaded"]),
    ("model.path=package:no_such_package/x.gguf", ["no installed Python package is named 'no_such_package'"]),
    ("model.device=cuda", ["model.device = 'cuda'", "no GPU"]),
    ("prompt.template={{'a b' = '{{text}}'}}", ["prompt.template.'a b': expected a name"]),
    ("prompt.template={{a = 'no text'}}", ["prompt.template.a 'no text' contains {{text}} 0 times"]),
    ("prompt.template={{a = '{{text}}', b = '{{text}}'}}", ["'a' and 'b' have the same template"]),
    ("prompt.template={{a = '{{text}} {{title}}'}}", ["prompt.template.a '{{text}} {{title}}' has {{title}}"]),
    ("generation.score=x", ["max_new_tokens = 8 asks for one"]),
    ("model.adapter=/nowhere", ["no such folder"]),
]


@pytest.mark.parametrize(("setting", "words"), WRONG)
def test_what_users_get_wrong(
    setting: str, words: list[str], job: Path, tmp_path: Path, tiny_model_dir: Path, run_here: Any
) -> None:
    (tmp_path / "damaged").mkdir()
    shutil.copy(tiny_model_dir / "config.json", tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")
    run = run_here(2, [job, "--set", setting.format(tmp=tmp_path)])
    check_refused(run, tmp_path, words)


@pytest.mark.slow
def test_what_users_get_wrong_under_mpirun(job: Path, mpirun: Any, kvr_run: Path, tmp_path: Path) -> None:
    check_refused(mpirun(2, [kvr_run, job, "--set", WRONG[0][0]]), tmp_path, WRONG[0][1])
    both = mpirun(2, [kvr_run, job, "--overwrite", "--resume"])
    assert both.returncode == 2 and "choose one" in both.stderr


def check_refused(run: Any, folder: Path, words: list[str]) -> None:
    assert run.returncode == 78, run.stderr
    assert "Traceback" not in run.stderr
    for word in words:
        assert word.format() in run.stderr
    assert run.stderr.count("error: ") == 1, "one rank speaks for all"
    meaning = (
        "the output folder or file cannot be used" if "output.path" in words else "the job cannot be run as written"
    )
    assert last_line(run.stderr) == f"exit code 78: {meaning}"
    assert not list(folder.glob("out/*.h5*"))


def test_what_cannot_be_read_is_recorded_before_any_prompt_runs_and_other_types_are_named(
    tmp_path: Path, run_job: Any
) -> None:
    """They would be lost without a word: the user believes that they are answered."""
    corpus, others = tmp_path / "corpus", ("skip.docx", "more.docx", "scan.pdf")
    (corpus / "zero.txt").write_bytes("Käse".encode("latin-1"))  # short ones come last
    for name in others:
        (corpus / name).write_text("text")
    run = run_job(1, "generation.max_new_tokens=1", code=65)
    assert "1/6 zero.txt: error: " in run.log and "2 .docx, 1 .pdf" in run.log
    assert all(f"{corpus}/{name}" in run.log for name in others)
    assert "5 documents answered, 1 failed in" in run.log
    assert run.records["zero.txt"].document_sha256 == "", "not an empty text's"
    assert "5 of 5 answers cut off at generation.max_new_tokens" in run.log
