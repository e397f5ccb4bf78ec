"""Remembers which modules transformers has.

Whenever transformers is imported, it opens each of its 2,300 model files twice to learn what they define: half of all
files that a rank opens at its start. The result is the same until another version is installed, so it is kept in one
file of the cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import secrets
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

SCANNER, FUNCTION = "transformers.utils.import_utils", "define_import_structure"
# By the packages that modules need: names that each module defines.
Structure = dict[frozenset[str], dict[str, set[str]]]


def remember_modules(cache_dir: Path) -> None:
    """Let the next import of transformers read what an earlier one found; does nothing after it was imported.

    Only packages that pip has installed are remembered, not a checkout, whose files may change at any time.
    """
    if "transformers" in sys.modules:
        return
    with contextlib.suppress(PackageNotFoundError, OSError, ImportError):
        found, name = importlib.util.find_spec("transformers"), f"transformers-{version('transformers')}"
        if found is not None and found.origin is not None:
            package = Path(found.origin).parent
            record = (package.parent / f"{name}.dist-info" / "RECORD").stat()
            state = f"{package} {record.st_size} {record.st_mtime_ns} {sys.version}"
            key = hashlib.sha256(state.encode()).hexdigest()[:16]
            sys.meta_path.insert(0, _Finder(package / "models", cache_dir / f"{name}-modules-{key}.json"))


class _Finder(MetaPathFinder):
    """Finds the module that scans, once, and changes it after it was imported.

    models : folder that is scanned.
    file : what was found in it.
    """

    def __init__(self, models: Path, file: Path) -> None:
        self._models, self._file = models, file

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != SCANNER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if hasattr(module, FUNCTION):
                self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _change(self, module: ModuleType) -> None:
        """Let the module's function read the file; of other folders, and the first time, it scans as before."""
        scan = getattr(module, FUNCTION)

        def define_import_structure(module_path: str | Path, prefix: str | None = None) -> Structure:
            if Path(module_path) not in (self._models, self._models / "__init__.py"):
                return dict(scan(module_path, prefix))
            found = _read(self._file)
            if found is None:
                found = scan(module_path)
                _write(self._file, found)
            start = "" if prefix is None else f"{prefix}."
            return {
                needs: {f"{start}{name}": defined for name, defined in some.items()} for needs, some in found.items()
            }

        setattr(module, FUNCTION, define_import_structure)


def _read(file: Path) -> Structure | None:
    """Read what was found; None if the file does not exist, or is not as `_write` writes it."""
    try:
        groups = json.loads(file.read_bytes())
        found = {
            frozenset(map(str, needs)): {str(name): set(map(str, defined)) for name, defined in some.items()}
            for needs, some in groups
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return found if any(found.values()) else None


def _write(file: Path, found: Mapping[frozenset[str], Mapping[str, set[str]]]) -> None:
    """Write what was found, unless the folder cannot be written."""
    groups = [
        [sorted(needs), {name: sorted(defined) for name, defined in some.items()}] for needs, some in found.items()
    ]
    own = file.with_suffix(f".{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps(groups), encoding="utf-8")
        own.replace(file)
