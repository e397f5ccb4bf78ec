"""Everything a user gets wrong before a job runs: one line that says what it is, and nothing is written."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from made_jobs import last_line


@pytest.mark.slow
def test_folders_that_are_missing_are_wrong_arguments_not_damaged_data(tmp_path: Path, kvr: Path) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("inspect", "export", "status", "merge"):
        for name, code in (("missing", 78), ("empty", 65)):
            run = subprocess.run([kvr, command, tmp_path / name], capture_output=True, text=True, check=False)
            assert run.returncode == code, (command, name, run.stderr)
            assert name in run.stderr and len(run.stderr.splitlines()) == 1


WRONG = [
    (["--set", "documents.path=nowhere"], 78, ["documents.path 'nowhere'", "no such file or folder"]),
    (["--set", "documents.path={tmp}/void"], 78, ["contains no .txt"]),
    (["--set", "documents.path={tmp}/void.jsonl"], 78, ["contain no documents"]),
    (["--set", "prompt.template=Summarise it."], 78, ["prompt.template", "{{text}} 0 times"]),
    (["--set", "prompt.template={{question}} {{text}}"], 78, ["prompt.template", "{{question}}", "known are {{text}}"]),
    (["--set", "prompt.reduce_template={{text}} {{x}}"], 78, ["prompt.reduce_template", "has {{x}}"]),
    (["--set", "prompt.system=Mind {{text}}."], 78, ["prompt.system", "into prompt.template"]),
    (["--set", "prompt.max_tokens=100000"], 78, ["prompt.max_tokens = 100000", "512"]),
    (["--set", "generation.max_new_tokens=512"], 78, ["max_new_tokens = 512", "no room"]),
    (["--set", "model.path=./no-model"], 78, ["model.path './no-model'", "no such file or folder"]),
    (["--set", "model.path={tmp}/no-weights"], 78, ["no *.safetensors"]),
    (["--set", "model.path={tmp}/unknown-architecture"], 78, ["cannot be loaded", "no-such-type"]),
    (["--set", "model.path={tmp}/damaged-weights"], 78, ["cannot be loaded"]),
    (["--set", "model.path=package:no_such_package/x.gguf"], 78, ["package 'no_such_package' is not installed"]),
    (["--set", "model.dtype=float31"], 78, ["model.dtype = 'float31'", "'bfloat16'"]),
    (["--set", "model.device=cuda"], 78, ["model.device = 'cuda'", "no GPU"]),
    (["--set", "generation.max_tokens=3"], 78, ["unknown key", "did you mean 'max_new_tokens'"]),
    (["--set", "parallel.ranks_per_chain=3"], 78, ["ranks_per_chain = 3", "[1, 2]"]),
    (["--set", "output.path={tmp}/job.toml/out"], 78, ["output.path", "cannot be written"]),
    (["--set", "nonsense"], 78, ["expected section.key=value"]),
]


@pytest.mark.parametrize(
    ("options", "code", "words"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_users_get_wrong(
    options: list[str], code: int, words: list[str], job: Path, tmp_path: Path, tiny_model_dir: Path, run_here: Any
) -> None:
    make_broken_things(tmp_path, tiny_model_dir)
    run = run_here(2, [job, *(option.format(tmp=tmp_path) for option in options)])
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    for word in words:
        assert word.format() in run.stderr
    assert run.stderr.count("error: ") == 1, "one rank speaks for all"
    assert last_line(run.stderr) == f"exit code {code}: the job cannot be run as written"
    assert not list(tmp_path.glob("out/*.h5*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "words"), [WRONG[0], WRONG[6], (["--overwrite", "--resume"], 2, ["give only one"])]
)
def test_what_users_get_wrong_under_mpirun(
    options: list[str],
    code: int,
    words: list[str],
    job: Path,
    mpirun: Any,
    kvr_run: Path,
    tmp_path: Path,
) -> None:
    run = mpirun(2, [kvr_run, job, *options])
    assert run.returncode == code, run.stderr
    assert all(word in run.stderr for word in words) and "Traceback" not in run.stderr
    if code == 78:
        assert run.stderr.count("error: ") == 1, "one rank speaks for all"
    assert not list(tmp_path.glob("out/*.h5*"))


@pytest.mark.slow
def test_a_model_of_the_hub_that_nobody_has_downloaded(job: Path, mpirun: Any, kvr_run: Path) -> None:
    run = mpirun(1, [kvr_run, job, "--set", "model.path=no-org/no-model"], env={"HF_HUB_OFFLINE": "1"})
    assert run.returncode == 78 and "no-org/no-model" in run.stderr and "HF_HUB_OFFLINE" in run.stderr, run.stderr


def make_broken_things(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Corpora without documents and models that cannot be loaded."""
    (tmp_path / "void").mkdir()
    (tmp_path / "void.jsonl").write_text("\n")
    for name in ("no-weights", "unknown-architecture", "damaged-weights"):
        (tmp_path / name).mkdir()
        config = json.loads((tiny_model_dir / "config.json").read_text())
        if name == "unknown-architecture":
            config["model_type"] = "no-such-type"
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        if name != "no-weights":
            (tmp_path / name / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")


def test_missing_and_broken_job_files(tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    missing = mpirun(2, [kvr_run, tmp_path / "none.toml"])
    assert missing.returncode == 78 and "not found" in missing.stderr
    (tmp_path / "broken.toml").write_text("[model\n")
    broken = mpirun(2, [kvr_run, tmp_path / "broken.toml"])
    assert broken.returncode == 78 and "cannot be read as TOML" in broken.stderr


def test_show_config_names_the_sources(job: Path, mpirun: Any, kvr_run: Path, tmp_path: Path) -> None:
    run = mpirun(
        2, [kvr_run, job, "--show-config", "--set", "generation.seed=4"], env={"KVR_GENERATION__MAX_NEW_TOKENS": "7"}
    )
    assert run.returncode == 0, run.stderr
    rows = {line.split("=")[0].strip(): line for line in run.stdout.splitlines()}
    assert rows["generation.seed"].endswith("= 4  # --set generation.seed")
    assert rows["generation.max_new_tokens"].endswith("= 7  # KVR_GENERATION__MAX_NEW_TOKENS")
    assert rows["parallel.partition"].endswith(f"# {job}")
    assert rows["output.kv"].endswith("# default")
    assert not (tmp_path / "out").exists()
