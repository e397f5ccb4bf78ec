"""The import order of CONTRIBUTING.md: imports only lead to packages above, and only where they are allowed to."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from constants import ROOT

import kvr_mpi

PACKAGE = Path(kvr_mpi.__file__).parent
# Lowest first: a file imports only from its own package and those before it. Each is where it is named first.
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WORDS = re.findall(r"[a-z]+", PAGE.partition("## Packages\n")[2].partition("```\n")[2].partition("```")[0])
ROOMS = list(dict.fromkeys(word for word in WORDS if (PACKAGE / word).exists() or (PACKAGE / f"{word}.py").exists()))
# Rooms that may name these libraries; anything else goes through them.
CONTACTS = {
    "mpi4py": {"transport/mpi.py", "transport/mpi_query.py", "transport/counters.py"},
    "h5py": {"store"},
    # What looks like a cache to the model.
    "transformers.cache_utils": {"kv/layer.py", "kv/states.py"},
    "click": {"cli"},
    # A feature beside the core, which meets it in one place.
    "kvr_mpi.fairkv": {"fairkv", "runtime/prepare.py"},
    "benchmarks": set(),
}
FORBIDDEN = {"pickle", "cPickle", "dill", "shelve"}


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_lead_up_and_libraries_are_met_in_one_place() -> None:
    """Benchmarks use the package, and are not part of it. Nothing is unpickled."""
    assert {room(path) for path in FILES} == set(ROOMS)
    wrong = []
    for path in FILES:
        here, own = ROOMS.index(room(path)), {str(path.relative_to(PACKAGE)), room(path)}
        for name in imports(path):
            parts = name.split(".")
            is_above = parts[0] == "kvr_mpi" and len(parts) > 1 and parts[1] in ROOMS and ROOMS.index(parts[1]) > here
            met = [places for library, places in CONTACTS.items() if f"{name}.".startswith(f"{library}.")]
            if is_above or name in FORBIDDEN or any(not own & places for places in met):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
        assert "torch.load" not in path.read_text(), path
    assert not wrong


def test_no_circles() -> None:
    """Not even among files of one room, and not for types alone: two files that need each other are one."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    needs = {name: {used for used in imports(path) if used in names and used != name} for name, path in names.items()}
    while free := {name for name, used in needs.items() if not used & needs.keys()}:
        needs = {name: used for name, used in needs.items() if name not in free}
    assert not needs, f"in or above a circle: {sorted(needs)}"


def test_the_environment_is_handed_down() -> None:
    """Outside the commands only a parameter's default, or a main program, names it."""
    wrong = []
    for path in FILES:
        tree = tree_of(path)
        allowed = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.arguments) or (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))
            for part in ast.walk(node)
        }
        for node in ast.walk(tree) if room(path) != "cli" else ():
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and id(node) not in allowed:
                if ast.unparse(node.value) == "os":
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not wrong


COMMANDS = "cli, kvr_mpi.cli.run, kvr_mpi.cli.inspect, kvr_mpi.cli.export, kvr_mpi.cli.doctor, kvr_mpi.cli.plan"
HEAVY = "torch transformers mpi4py h5py numpy pydantic"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [("kvr_mpi", f"{HEAVY} click"), (f"kvr_mpi.{COMMANDS}, kvr_mpi.cli.search", HEAVY)],
    ids=["the package", "help"],
)
def test_importing_loads_nothing_heavy(modules: str, heavy: str) -> None:
    code = f"import sys, {modules}; print([name for name in {heavy!r}.split() if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
