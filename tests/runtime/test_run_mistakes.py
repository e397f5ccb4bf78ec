"""Everything a user gets wrong before a job runs: one line that says what it is, and nothing is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from constants import Kvr
from made_jobs import last_line


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
    assert both.returncode == 2 and "give only one" in both.stderr


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
