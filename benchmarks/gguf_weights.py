"""A ``.gguf`` file with weights that are not quantized, so that other engines compute with the weights that we have.

Engines have kernels of their own for blocks of 4 bits. llama.cpp rounds activations to 8 bits for them; OpenVINO keeps
blocks as whole multiples of their scale, and rounds what they begin with (the minimum of Q4_1) to one of them: that is
another model, whose first token may be another. Of what is not quantized OpenVINO reads float16 only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvr_mpi.disk import replaced
from kvr_mpi.errors import ConfigError

LARGEST = float(np.finfo(np.float16).max)
# Names of formats as llama.cpp's tools have them.
FORMATS = ("f32", "f16", "bf16")


def dequantised_gguf(source: Path, cache_dir: Path, form: str, dtype: str) -> Path:
    """Write a file's matrices in another format into the cache, beside all else that it says; once for a file.

    source : a ``.gguf`` file.
    form : of `FORMATS`; vectors stay in float32.
    dtype : what a job computes in, ``float32`` or ``bfloat16``, to which all weights are rounded first. Then float16
        has the same weights but for those below 6e-5, whose last bits it drops.

    Raises `ConfigError` if the file cannot be read or written, or its weights exceed float16.
    """
    try:
        about = source.stat()
        known = hashlib.sha256(f"{source.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]
        target = cache_dir / f"{source.stem}-{dtype}-in-{form}-{known}.gguf"
        if not target.exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            with replaced(target) as part:
                _write(source, part, form, dtype)
    except (OSError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise ConfigError(f"--rivals: {source} cannot be written in {form} for other engines: {error}") from error
    return target


def _write(source: Path, part: Path, form: str, dtype: str) -> None:
    """Copy what a file says, and its tensors dequantized."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents(), use_temp_file=True)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    file_types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16"}
    writer.add_file_type(gguf.LlamaFileType[file_types[form]])
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if dtype == "bfloat16":
            weights = torch.tensor(weights).bfloat16().float().numpy()
        how: dict[str, Any] = {}
        if weights.ndim > 1 and form == "f16":
            if float(np.abs(weights).max()) > LARGEST:
                raise ValueError(f"{tensor.name} exceeds the range of float16")
            weights = weights.astype(np.float16)
        elif weights.ndim > 1 and form == "bf16":
            weights = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.BF16)
            how = {"raw_dtype": gguf.GGMLQuantizationType.BF16}
        writer.add_tensor(tensor.name, weights, **how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
