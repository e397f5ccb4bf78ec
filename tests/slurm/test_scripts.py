"""The job scripts as text: valid, forcing nothing a site may want otherwise, and filled in as sbatch reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvr_mpi.cli.sbatch import SCRIPT, fill_in, scripts_folder

FOLDER = scripts_folder()
SCRIPTS = sorted(FOLDER.glob("*.sh"))
SUBMITTED = [path for path in SCRIPTS if path.name.startswith("kvr_")]


def directives(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    assert len(found) == script.count("#SBATCH"), "written in another way than --option=value"
    assert len(found) == len(dict(found)), "said twice"
    return dict(found)


@pytest.mark.parametrize("path", [*SCRIPTS, FOLDER / "site.sh.example"], ids=lambda path: path.name)
def test_bash_takes_them(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", "-x", path], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("path", SUBMITTED, ids=lambda path: path.name)
def test_nothing_is_forced_that_sites_differ_in_and_long_jobs_may_be_queued_again(path: Path) -> None:
    chosen = directives(path.read_text())
    forced = {"partition", "account", "mem", "mem-per-cpu", "qos", "constraint", "reservation", "gpus-per-task", "gres"}
    assert not forced & set(chosen) and chosen["open-mode"] == "append"
    assert not re.search(r"^\s*module ", path.read_text(), re.MULTILINE)
    if path.name in ("kvr_prefill.sh", "kvr_array.sh"):
        assert re.fullmatch(r"B:USR2@\d+", chosen["signal"]) and "requeue" in chosen


def test_fill_in_replaces_what_is_there_and_adds_the_rest(tmp_path: Path) -> None:
    before = (FOLDER / SCRIPT).read_text()
    arguments = ["jobs/a b.toml", "--set", "prompt.system=it's $HOME `ls`"]
    after = fill_in(before, {"nodes": "7", "chdir": "/a b/c", "exclusive": ""}, arguments, Path("/some where"))
    chosen = directives(after)
    assert chosen == {**directives(before), "nodes": "7", "chdir": "'/a b/c'", "exclusive": ""}
    # What follows the head is run as it is, but for starting the job, which is printed here.
    (tmp_path / "common.sh").write_text('launch() { printf \'%s\\n\' "$here" "$@"; }\nconclude() { :; }\n')
    runnable = after.replace("'/some where'", f"'{tmp_path}'")
    said = subprocess.run(["bash"], input=runnable, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [str(tmp_path), "kvr-run", *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("separator", ["\n", "\r", "\x0b", "\x85", "\u2028"])
def test_nothing_can_be_smuggled_into_the_script(tmp_path: Path, kvr: Path, separator: str) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\npath = "m"\n[documents]\npath = "d"\n[output]\npath = "o"\n')
    hostile = tmp_path / f"a{separator}touch smuggled"
    hostile.mkdir()
    command = [kvr, "sbatch", job, "--ranks", "4", "--print"]
    for options, folder, word in [
        (["--time=9"], hostile, "--chdir="),
        ([f"--time=9{separator}touch smuggled"], tmp_path, "--time="),
        (["--time=9", f"--comment=x{separator}touch smuggled"], tmp_path, "--comment="),
        (["--time=9", f"--exclusive{separator}touch smuggled"], tmp_path, "exclusive"),
    ]:
        run = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=folder)
        assert run.returncode == 78 and run.stdout == "", run.stdout
        assert word in run.stderr and len(run.stderr.splitlines()) == 1, "before any forecast"


def test_hostile_words_reach_the_job_as_they_are(tmp_path: Path, kvr: Path) -> None:
    """A job's name, and settings, which are written behind the head and quoted."""
    job = tmp_path / "a'; touch smuggled #\nb.toml"
    job.write_text('[model]\npath = "m"\n[documents]\npath = "d"\n[output]\npath = "o"\n')
    setting = "prompt.system='\n#SBATCH --partition=x\ntouch smuggled\n$(touch smuggled)"
    command = [kvr, "sbatch", job, "--ranks", "4", "--time=9", "--print", "--set", setting]
    script = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    (tmp_path / "common.sh").write_text("launch() { printf '%s\\0' \"$@\"; }\nconclude() { :; }\n")
    runnable = re.sub(r"export KVR_SLURM_DIR=.*", f"export KVR_SLURM_DIR={tmp_path}", script)
    said = subprocess.run(["bash"], input=runnable, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert said.split("\0")[:-1] == ["kvr-run", str(job), "--set", setting]
    assert not (tmp_path / "smuggled").exists()
