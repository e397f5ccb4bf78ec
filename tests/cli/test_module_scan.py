"""Only the first import of an installation of transformers scans its models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvr_mpi.cli import module_scan

# Counts the files of models that are opened, and compares what is remembered with what a scan finds.
PROGRAM = """
import sys
from pathlib import Path
from kvr_mpi.cli.module_scan import remember_modules

opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
remember_modules(Path(sys.argv[1]))
import transformers

models = Path(transformers.__file__).parent / "models"
print(sum(name.startswith(str(models)) for name in opened))

if "--scan" in sys.argv:
    from transformers import LlamaConfig
    from transformers.utils import import_utils

    given = import_utils.define_import_structure(models / "__init__.py", prefix="models")
    found = import_utils.create_import_structure_from_path(models / "__init__.py")
    found = import_utils.spread_import_structure(found)
    assert given == {needs: {f"models.{name}": some for name, some in each.items()} for needs, each in found.items()}
"""


def opened(folder: Path, *words: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_models_of_transformers_are_scanned_once(tmp_path: Path) -> None:
    assert opened(tmp_path) > 1000
    assert opened(tmp_path, "--scan") < 100
    (file,) = tmp_path.iterdir()
    for damaged in ("", "[[3, 4]]", '[[["torch"], {}]]', '{"a": 1}'):
        file.write_text(damaged)
        assert module_scan._read(file) is None
    file.unlink()
    file.mkdir()
    assert opened(tmp_path) > 1000, "a folder that cannot be written changes nothing"
