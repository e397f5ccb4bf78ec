"""Other engines in `first-token`: what is refused, one that dies, and the weights that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks.half_weights import half_gguf
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


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(file: Path) -> np.ndarray[Any, Any]:
    """A file with 4-bit blocks, whose exact weights are returned."""
    weights = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_rope_freq_base(1e5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_tensor("matrix", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("vector", weights[0])
    finish(writer)
    exact: np.ndarray[Any, Any] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
    return exact


def test_it_says_the_same_with_weights_in_float16(tmp_path: Path) -> None:
    exact = write(tmp_path / "given.gguf")
    made = half_gguf(tmp_path / "given.gguf", tmp_path / "cache")
    given, found = gguf.GGUFReader(tmp_path / "given.gguf"), gguf.GGUFReader(made)
    said = {name for name in given.fields if not name.startswith("GGUF.")} - {"general.file_type"}
    assert {name: given.fields[name].contents() for name in said} == {
        name: found.fields[name].contents() for name in said
    }
    tensors = {tensor.name: tensor.data for tensor in found.tensors}
    assert tensors["matrix"].dtype == np.float16 and tensors["vector"].dtype == np.float32
    np.testing.assert_allclose(tensors["matrix"], exact, rtol=2**-11, atol=1e-7)
    assert half_gguf(tmp_path / "given.gguf", tmp_path / "cache") == made
    assert list((tmp_path / "cache").iterdir()) == [made]
    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    writer.add_tensor("matrix", np.full((2, 32), 1e5, np.float32))
    finish(writer)
    with pytest.raises(ConfigError, match="matrix exceeds the range of float16"):
        half_gguf(tmp_path / "wide.gguf", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [made]
