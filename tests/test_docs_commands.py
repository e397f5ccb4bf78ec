"""Commands on the pages are parsed by the program they name; job files on them are valid jobs."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from constants import ROOT

from benchmarks.__main__ import BENCHMARKS
from kvr_mpi.cli import COMMANDS, group
from kvr_mpi.cli.run import run
from kvr_mpi.job import JobSpec
from kvr_mpi.job.combinations import check_combinations

PAGES = [
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "slurm" / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
]
BLOCK = re.compile(r"^```(?:sh)?\n(.*?)^```$|((?:^    \S.*\n)+)", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:[a-z]+ )?[^`]*?\b(?:kvr|make|benchmarks)\b[^`]*)`(?!`)")
ENDS = {"|", ">", ">>", "&&", ";", "||", "&"}
# Whose commands are checked; and who starts a command: whatever stands before it is theirs.
PROGRAMS = {"kvr", "kvr-run", "make", "benchmarks"}
STARTERS = {"mpirun", "srun", "timeout", "mpiexec"}


def lines_of(page: Path) -> Iterator[str]:
    """Lines of a page's blocks, and what stands in a sentence as code."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        yield from (block[1] or block[2]).replace("\\\n", " ").splitlines()
    for code in INLINE.finditer(BLOCK.sub("", text)):
        yield " ".join(code[1].split())


def commands_of(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Programs of ours that a page calls, with their arguments."""
    for line in lines_of(page):
        try:
            words = shlex.split(line.replace("python -m benchmarks", "benchmarks"), comments=True)
        except ValueError:  # half of a sentence in quotes
            continue
        at = next((at for at, word in enumerate(words) if Path(word).name in PROGRAMS), None)
        if at is None or (at and words[0] not in STARTERS and not re.match(r"[A-Z_]+=", words[0])):
            continue
        arguments = words[at + 1 :]
        stop = next((number for number, word in enumerate(arguments) if word in ENDS), len(arguments))
        yield Path(words[at]).name, arguments[:stop]


def check(program: str, arguments: list[str]) -> None:
    """Parse a command as its program does; a name that stands for any is no mistake."""
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets for word in arguments if re.fullmatch(r"[a-z-]+", word)), arguments
        return
    if "..." in arguments or not arguments:
        return
    command: click.Command | None = run
    if program == "benchmarks":
        name, *arguments = arguments
        assert name in BENCHMARKS, f"python -m benchmarks {name}"
        main = importlib.import_module(f"benchmarks.{BENCHMARKS[name][0]}").main
        if not isinstance(main, click.Command):  # argparse's are parsed where they run
            return
        command = main
    if program == "kvr":
        name, *arguments = arguments
        if name.startswith("-"):
            return
        assert name in COMMANDS, f"kvr {name}"
        command = group.get_command(click.Context(group), name)
    assert command is not None
    # As the command is called: click keeps the help option that it makes for the first context.
    context = click.Context(command, **command.context_settings)
    try:
        command.make_parser(context).parse_args(list(arguments))
    except click.BadOptionUsage:  # a sentence names an option without its value
        command.make_parser(context).parse_args([*arguments, "VALUE"])


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_of_the_pages_are_understood(page: Path) -> None:
    wrong = []
    for program, arguments in commands_of(page):
        try:
            check(program, arguments)
        except (click.UsageError, AssertionError) as error:
            wrong.append(f"{program} {' '.join(arguments)}: {error}")
    assert not wrong


JOBS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    if block.startswith("[")  # other files have no sections
]


@pytest.mark.parametrize("text", JOBS)
def test_jobs_of_the_pages_are_valid(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "minutes.schema.json").write_text('{"type": "object", "properties": {"date": {"type": "string"}}}')
    monkeypatch.chdir(tmp_path)
    job = {"model": {"path": "model"}, "documents": {"path": "corpus"}, "output": {"path": "runs"}}
    for section, settings in tomllib.loads(text).items():
        job[section] = settings if isinstance(settings, list) else job.get(section, {}) | settings
    check_combinations(JobSpec.model_validate(job))


# The pages become a site


def build(source: Path, made: Path) -> subprocess.CompletedProcess[str]:
    """Build a site of these pages as `make docs` does."""
    target = re.search(r"^\t.*sphinx-build (.*) --conf-dir docs \. ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target is not None
    command = [sys.executable, "-m", "sphinx", *target[1].split(), "--conf-dir", ROOT / "docs", source, made]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_pages_become_a_site_that_needs_no_network(tmp_path: Path) -> None:
    """Also pages, headings, files and folders that links on them name are there."""
    done = build(ROOT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {page.name: page.read_text() for page in tmp_path.glob("**/*.html")}
    assert {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")} <= pages.keys()
    assert "--set" in pages["job-file.html"]
    fetched = [link for page in pages.values() for link in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page)]
    assert len(fetched) > 10 and not [link for link in fetched if "//" in link]
    styles = [style.read_text() for style in tmp_path.glob("_static/**/*.css")]
    assert styles and not [style for style in styles if re.search(r"@import|url\(['\"]?(?:https?:)?//", style)]
