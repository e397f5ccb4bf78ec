"""What is installed, and what a source distribution holds: all that the README speaks of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from constants import ROOT

# Nothing of these is made by hand.
MADE = (
    ".git",
    "PKG-INFO",
    "setup.cfg",
    ".venv",
    "runs",
    "build",
    "dist",
    "__pycache__",
    "*.egg-info",
    ".*_cache",
    ".hypothesis",
    ".cache",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree, as it was written."""
    copy = tmp_path_factory.mktemp("source") / "kvr-mpi"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode or not (ROOT / ".git").exists():  # unpacked from a source distribution
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*MADE))
        return copy
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def build(kind: str, source: Path, target: Path) -> Path:
    """Build with what pyproject.toml names."""
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_source_distribution_is_complete(source: Path, tmp_path: Path) -> None:
    wanted = files_of(source) - {"slurm/site.sh"}
    (source / "slurm" / "site.sh").touch()  # somebody's own
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    found = files_of(unpacked)
    assert wanted <= found, sorted(wanted - found)
    assert {name for name in found - wanted if "egg-info" not in name} == {"PKG-INFO", "setup.cfg"}
    assert os.access(unpacked / ".ci" / "run", os.X_OK) == os.access(source / ".ci" / "run", os.X_OK)


def test_a_wheel_has_the_jobs_and_the_scripts(source: Path, tmp_path: Path) -> None:
    wheel = build("wheel", source, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        found = {name.partition(".data/data/share/kvr-mpi/")[2] or name for name in archive.namelist()}
    shared = {name for name in files_of(source) if name.startswith(("jobs/", "slurm/"))} - {"slurm/site.sh"}
    assert len(shared) > 15 and shared <= found, sorted(shared - found)
    package = {name for name in files_of(source) if name.startswith("kvr_mpi/")}
    assert package <= found, sorted(package - found)
    assert not [name for name in found if name.startswith("tests/")]
