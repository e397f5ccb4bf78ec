"""`kvr demo`: from an installed wheel, in a folder that has nothing of the clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from constants import ROOT, SMOLLM, Kvr

from kvr_mpi.cli.shipped import find_shipped
from kvr_mpi.errors import EXIT_CONFIG, EXIT_USAGE, ConfigError
from kvr_mpi.store.results import open_results

# As short as it can be, which is still the real model: through the environment, as a user would.
SHORT = {"KVR_DOCUMENTS__LIMIT": "1", "KVR_GENERATION__MAX_NEW_TOKENS": "2", "KVR_PARALLEL__PARTITION": "even"}


def test_what_is_wrong_is_said_once_before_any_rank(
    tmp_path: Path, run_kvr: Kvr, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="jobs/nothing.toml was not installed with kvr-mpi"):
        find_shipped("jobs", "nothing.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVR_MODEL__PATH", SMOLLM.replace("smollm2", "smollm3"))
    code, out, err = run_kvr("demo")
    assert code == EXIT_CONFIG and out == "" and err.count("package 'llm_smollm3' is not installed") == 1
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("PMI_SIZE", "2")  # it starts its ranks itself
    code, _, err = run_kvr("demo")
    assert code == EXIT_USAGE and "here: 2 ranks" in err


@pytest.mark.long
def test_a_wheel_runs_it(tmp_path: Path) -> None:
    code = f"import setuptools.build_meta as backend; print(backend.build_wheel({str(tmp_path)!r}))"
    source = tmp_path / "source"
    subprocess.run(["git", "-C", ROOT, "checkout-index", "--all", f"--prefix={source}/"], check=True)
    built = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True)
    wheel = tmp_path / built.stdout.splitlines()[-1]
    venv, here = tmp_path / "venv", Path(sys.executable)
    subprocess.run([here, "-m", "venv", "--without-pip", venv], check=True)
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pip = [here, "-m", "pip", "--python", venv / "bin" / "python", "install", "--quiet", "--no-deps", wheel]
    subprocess.run(pip, env=environ, check=True)
    # Everything but kvr-mpi itself, which a checkout may be in development mode, is this environment's.
    (packages,) = venv.glob("lib/python3*/site-packages")
    (base,) = (path for path in map(Path, sys.path) if (path / "mpi4py").is_dir())
    (packages / "base.pth").write_text(f"{base}\n")
    (tmp_path / "work").mkdir()
    environ |= {**SHORT, "PATH": f"{here.parent}{os.pathsep}{environ['PATH']}"}
    environ["LD_LIBRARY_PATH"] = str(here.parents[1] / "lib")  # of an MPI that came as a package
    done = subprocess.run(
        [venv / "bin" / "kvr", "demo"], cwd=tmp_path / "work", env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{venv}/share/kvr-mpi/jobs/demo.toml" in done.stderr and "2 ranks" in done.stderr
    (record,) = open_results(tmp_path / "work" / "runs" / "demo")
    assert record.status == "done" and len(record.token_ids) == 2 and len(record.slices) == 3
