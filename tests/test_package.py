"""What is installed, and what a source distribution holds: all that the README speaks of; where its links lead."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from constants import ROOT

import kvr_mpi

# Nothing of these is made by hand.
MADE = ".git PKG-INFO setup.cfg .venv* runs build dist __pycache__ *.egg-info .*_cache .hypothesis .cache".split()

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "slurm" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


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


def test_whoever_cites_it_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [kvr_mpi.__version__]
    assert f'version = "{kvr_mpi.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """The names of a page's headings, as forges make them: a second one of the same words gets a number."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return {f"{name}-{found[:idx].count(name)}" if name in found[:idx] else name for idx, name in enumerate(found)}


def links_of(page: Path) -> list[str]:
    """Where a page's links lead, those out of the project left out."""
    text = re.sub(r"(`+)(?!`).+?\1", lambda code: "x" * len(code[0]), prose(page), flags=re.DOTALL)
    return [link for link in LINK.findall(text) if not re.match(r"[a-z][a-z0-9+.-]*:", link)]


def test_the_pages_are_short() -> None:
    readme, docs = ROOT / "README.md", list(ROOT.glob("docs/*.md"))
    texts = {page: page.read_text(encoding="utf-8") for page in [readme, *docs]}
    words = {page: len(text.split()) for page, text in texts.items()}
    assert words[readme] <= 750 and sum(words.values()) <= 25_000, words
    lines = [line for text in texts.values() for block in FENCE.findall(text) for line in block.splitlines()]
    assert not [line for line in lines if len(line) > 75], "a browser would scroll sideways"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in links_of(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not (target.is_relative_to(ROOT) and target.exists()):
            wrong.append(f"{link}: no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors_of(target)):
            wrong.append(f"{link}: no such heading")
    assert not wrong


def test_every_page_is_on_the_landing_page() -> None:
    index = ROOT / "docs" / "index.md"
    assert index in {(ROOT / link).resolve() for link in links_of(ROOT / "README.md")}
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links_of(index)}
    assert set(index.parent.glob("*.md")) - {index} <= linked
