"""Other engines in `first-token`: what is refused, one that dies, and the weights that they are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rivals import open_rival
from kvr_mpi.errors import ConfigError


def environment(folder: Path, script: str) -> Path:
    """An environment whose Python is a script."""
    python = folder / "openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("vllm", "model.gguf", "'vllm': expected some of openvino, llama.cpp"),
        ("openvino", "folder", "folder is not a .gguf file"),
        ("openvino", "model.gguf", "ended with 3: no such library"),
        ("llama.cpp", "model.gguf", "`benchmarks/install_rivals` creates it"),
    ],
)
def test_an_engine_that_cannot_take_part_is_said_so(tmp_path: Path, name: str, model: str, words: str) -> None:
    folder = environment(tmp_path, "echo no such library >&2; exit 3")
    with pytest.raises(ConfigError, match=words), open_rival(name, Path(model), 100, folder):
        pass


def test_an_engine_that_dies_at_work_is_said_so(tmp_path: Path) -> None:
    folder = environment(tmp_path, """echo '{"version": "1"}'; read line; echo out of memory >&2; exit 9""")
    with open_rival("openvino", Path("a.gguf"), 9, folder) as rival:
        assert rival.version == "1"
        for _ in range(2):  # and is still said so when it is asked again
            with pytest.raises(ConfigError, match="ended with 9: out of memory"):
                rival.answer([[1, 2]], 1, None)
