"""The reference, written from the code: ``make docs``.

python docs/reference.py            write the pages
python docs/reference.py --check    write nothing; exit code 1 if a page is not what the code says
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from kvr_mpi import errors
from kvr_mpi.cli import COMMANDS, group
from kvr_mpi.cli.environment import VARIABLES
from kvr_mpi.job import JobSpec
from kvr_mpi.job.combinations import MODELS, NO_EFFECT, REFUSED, Row
from kvr_mpi.store import head_rows, kv, outputs

DOCS = Path(__file__).resolve().parent
WRITTEN = "Written from the code by `make docs`; do not edit."
# Characters of a line of help: pages are read in browsers, and on terminals.
WIDTH = 100
# How JSON Schema's types are called here.
TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true`, `false`",
    "object": "table",
}
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def commands() -> str:
    """Write what every command says with ``--help``."""
    top = click.Context(group, info_name="kvr", terminal_width=WIDTH, **group.context_settings)
    parts = [
        "# Commands",
        WRITTEN,
        "What each command says with `--help`; `kvr-run` is `kvr run`. How they end: [Exit codes](exit-codes.md).",
        _block(group.get_help(top)),
    ]
    for name in COMMANDS:
        command = group.get_command(top, name)
        assert command is not None
        told = click.Context(command, info_name=name, parent=top, **command.context_settings)
        parts += [f"## kvr {name}", _block(command.get_help(told))]
    return _page(parts)


def exit_codes() -> str:
    """Write what each exit code means, and which errors end with it."""
    rows = []
    for code, meaning in sorted(errors.MEANINGS.items()):
        found = [kind for kind in _kinds(errors.KvrError) if kind.exit_code == code]
        meanings = dict.fromkeys([meaning, *(kind.meaning for kind in found if kind.meaning)])
        names = [f"`{kind.__name__}`" for kind in found]
        rows.append((str(code), "; or ".join(meanings), ", ".join(names)))
    shown = [(f"`{kind.__name__}`", _first_line(kind)) for kind in _kinds(errors.KvrError)]
    return _page(
        [
            "# Exit codes",
            WRITTEN,
            "A job's last line says its exit code, and what it means. One rank's failure ends all ranks with "
            "that code. How many error records a job may have and still end with 0 is said by `output.max_failed`.",
            _table(("code", "meaning", "errors that end with it"), rows),
            "`inspect`, `export`, `status` and `merge` end with 65 if data are damaged, and with 78 if the folder is "
            "not there. A process that a signal ended has 128 and the signal's number, as ever.",
            "## Errors",
            "Python programs get them as exceptions, all of them `kvr_mpi.KvrError`s.",
            _table(("error", "what is wrong"), shown),
        ]
    )


def environment() -> str:
    """Write which environment variables count."""
    about = {
        "commands": "Read by the commands, and by Python programs",
        "job scripts": "Read by the job scripts",
        "libraries": "Read by libraries",
    }
    parts = [
        "# Environment variables",
        WRITTEN,
        "Job scripts are those in `slurm/`; their variables are best set in the [site file](../slurm/README.md).",
    ]
    for of, variables in VARIABLES.items():
        rows = [(f"`{name}`", meaning) for name, meaning in variables.items()]
        parts += [f"## {about[of]}", _table(("variable", "what it says"), rows)]
    return _page(parts)


def job_keys() -> str:
    """Write every key of a job: its type, its default, and what it is."""
    whole = JobSpec.model_json_schema()
    parts = [
        "# Keys of a job",
        WRITTEN,
        "What the sections are for, with examples: [the job file](job-file.md). `kvr run JOB.toml --show-config` "
        "prints every key of a job with its value. Where there is no default, the key is left out.",
    ]
    for name, section in whole["properties"].items():
        kind = re.findall(r'"#/\$defs/(\w+)"', json.dumps(section))[0]
        table = whole["$defs"][kind]
        needed = table.get("required", ())
        rows = [
            (f"`{key}`", _type(about), _default(about, key in needed), about.get("description", ""))
            for key, about in table["properties"].items()
        ]
        head = f"[[{name}]]" if section.get("type") == "array" else f"[{name}]"
        # A docstring names code for those who read code.
        what = re.sub(r" \(`[^`]*`\)", "", table["description"].splitlines()[0])
        parts += [f"## `{head}`", what, _table(("key", "type", "default", "what it is"), rows)]
    return _page(parts)


def combinations() -> str:
    """Write which settings of a job cannot be combined, and which have no effect beside others."""

    def rows(table: Iterable[Row], *, is_refused: bool) -> list[tuple[str, ...]]:
        return [
            (_code(row.setting), ", ".join(map(_code, row.others)), row.why, *([row.remedy] if is_refused else []))
            for row in table
        ]

    return _page(
        [
            "# Settings that cannot be combined",
            WRITTEN,
            "All other settings can be combined. A key without a value means any value but its default; a section "
            "means that the job has it. A job with both settings of a row is refused when it is read (exit code 78), "
            "or, where the row names a kind of model, when the model is loaded.",
            _table(("setting", "cannot be combined with", "why", "what to do"), rows(REFUSED, is_refused=True)),
            "## Settings without effect",
            "These jobs run; the log says which setting has no effect.",
            _table(("setting", "has no effect with", "why"), rows(NO_EFFECT, is_refused=False)),
        ]
    )


def schema() -> str:
    """Write what is where in an HDF5 file of results."""
    return _page(
        [
            "# HDF5 schema",
            WRITTEN,
            f"Version {outputs.SCHEMA_VERSION}. How to read it, by commands and by h5py: [Results](results.md). Names "
            "after `see` are modules in `kvr_mpi/store`, which write and read what is meant.",
            "## Records",
            _drawing(outputs),
            "## Keys and values",
            "With `output.kv`, in each document's group:",
            _drawing(kv),
            "## What compression leaves",
            "With `[compress]` beside `output.kv`:",
            _drawing(head_rows),
        ]
    )


PAGES: dict[str, Callable[[], str]] = {
    "combinations.md": combinations,
    "commands.md": commands,
    "environment.md": environment,
    "exit-codes.md": exit_codes,
    "job-keys.md": job_keys,
    "schema.md": schema,
}


def differing() -> list[str]:
    """Name the pages that are not what the code says."""
    return [
        name
        for name, write in PAGES.items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text(encoding="utf-8") != write()
    ]


def _page(parts: Iterable[str]) -> str:
    """Join headings, blocks, tables and paragraphs; the latter are filled."""
    as_they_are = ("#", "|", "```")
    filled = (
        part if part.startswith(as_they_are) else textwrap.fill(part, 120, break_on_hyphens=False) for part in parts
    )
    return "\n\n".join(filled) + "\n"


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def _code(name: str) -> str:
    """Write a setting as code, and what a model is in words."""
    return name if name in MODELS else f"`{name}`"


def _drawing(module: ModuleType) -> str:
    """Take from a module's docstring what is indented in it: the groups, datasets and attributes it is about."""
    found = re.search(r"^(?: {4}.*\n+)+", module.__doc__ or "", re.MULTILINE)
    assert found is not None, f"{module.__name__}: its docstring draws nothing"
    return _block(textwrap.dedent(found[0]).replace("``", ""))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, *rows]
    cells = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
    return "\n".join([cells[0], "|" + "---|" * len(heads), *cells[1:]])


def _kinds(kind: type[errors.KvrError]) -> Iterator[type[errors.KvrError]]:
    """Walk through a family of errors, each before its own."""
    yield kind
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield from _kinds(one)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").splitlines()[0]


def _type(about: Mapping[str, Any]) -> str:
    """Say in words what JSON Schema says of a value."""
    if "anyOf" in about:
        return " or ".join(_type(one) for one in about["anyOf"] if one.get("type") != "null")
    values = about.get("enum") or ([about["const"]] if "const" in about else [])
    if values:
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    if about["type"] == "array":
        return f"list of {_type(about['items']).replace('number', 'numbers')}"
    bounds = [f"{words} {about[name]:g}" for name, words in BOUNDS.items() if name in about]
    return f"{TYPES[about['type']]} {', '.join(bounds)}".rstrip()


def _default(about: Mapping[str, Any], needed: bool) -> str:
    """Write a default as TOML has it; nothing if the key is left out by default."""
    if needed:
        return "(required)"
    value = about.get("default")
    return "" if value is None else f"`{json.dumps(value)}`"


def main() -> int:
    """Do what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page differs")
    check = parser.parse_args().check
    wrong = differing()
    for name in wrong:
        if not check:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"docs/{name}: {'not what the code says: run `make docs`' if check else 'written'}")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
