"""The script of the clusters page under a real Grid Engine on one host."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cell import PROGRAMS, Cell
from constants import ROOT
from made_jobs import TEXT, toml_of

from kvr_mpi import open_results

DOCUMENTS = 30  # two seconds each until the job is requeued: more than its time limit allows
LIMIT_S = 60


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    if not os.environ.get("KVR_TEST_SLURM"):
        pytest.skip("`make test-slurm` runs these (KVR_TEST_SLURM is not set)")
    if not (PROGRAMS / "sge_execd").exists():
        pytest.fail("not installed: Grid Engine; `make test-slurm` installs it")
    made = Cell(tmp_path_factory.mktemp("gridengine"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def write_script(folder: Path, words: str, warm_start: list[str]) -> Path:
    """Write the page's script, with the job's first lines for this test and other words after ``kvr-run job.toml``.

    Its ranks are forked (``warm``).
    """
    page = (ROOT / "docs" / "clusters.md").read_text()
    (script,) = re.findall(r"```sh\n(#!/bin/bash\n#\$ .*?)```", page, re.DOTALL)
    assert " kvr-run job.toml" in script
    programs = folder / "bin"
    programs.mkdir()
    slow = shlex.join([*warm_start, str(ROOT / "tests" / "programs" / "slow_documents.py")])
    (programs / "kvr-run").write_text(f'#!/bin/sh\nexec {slow} "$@"\n')
    (programs / "kvr-run").chmod(0o755)
    path = f"export OMP_NUM_THREADS=1 PATH={programs}:{Path(sys.executable).parent}:$PATH\nmpirun"
    script = script.replace("mpirun", path).replace("kvr-run job.toml", f"kvr-run job.toml {words}")
    (made := folder / "script.sh").write_text(script)
    return made


def write_job(folder: Path, model: Path) -> None:
    rows = "".join(f'{{"id": "doc-{number}", "text": "Document {number}. {TEXT}"}}\n' for number in range(DOCUMENTS))
    (folder / "corpus.jsonl").write_text(rows)
    job = {"model.path": model, "model.dtype": "float32", "documents.path": folder / "corpus.jsonl"}
    job |= {"generation.max_new_tokens": 4, "parallel.partition": "even", "output.path": folder / "out"}
    (folder / "job.toml").write_text(toml_of(job))


def test_a_job_stops_before_its_limit_is_requeued_and_resumes(
    cell: Cell, tmp_path: Path, tiny_model_dir: Path, warm_start: list[str]
) -> None:
    write_job(tmp_path, tiny_model_dir)
    script = write_script(tmp_path, "", warm_start)
    options = ("-wd", tmp_path, "-o", tmp_path / "log", "-pe", "mpi", "2", "-l", f"h_rt={LIMIT_S}")
    cell.submit_and_wait(*options, script, timeout_s=10 * LIMIT_S)
    log = (tmp_path / "log").read_text()
    assert log.count("the time limit is near") >= 1, log
    assert len(list(open_results(tmp_path / "out"))) == DOCUMENTS, log
    assert "exceeded" not in (cell.root / "qmaster" / "messages").read_text(), "it was killed at its limit"


def test_each_task_of_an_array_takes_its_share(
    cell: Cell, tmp_path: Path, tiny_model_dir: Path, warm_start: list[str]
) -> None:
    write_job(tmp_path, tiny_model_dir)
    script = write_script(tmp_path, "--set documents.shard=task/2 --show-config", warm_start)
    options = ("-wd", tmp_path, "-o", f"{tmp_path}/log-$TASK_ID", "-pe", "mpi", "1", "-l", "h_rt=300", "-t", "1-2")
    cell.submit_and_wait(*options, script, timeout_s=120)
    logs = [(tmp_path / f"log-{task}").read_text() for task in (1, 2)]
    for share, log in enumerate(logs):
        assert re.search(rf"^output.path +=.*/out/share-{share}-of-2'", log, re.MULTILINE), log
