"""A ``.gguf`` file with its weights in float16, for engines that would compute with others than it has.

OpenVINO keeps blocks of 4 bits as whole multiples of their scale, and rounds what they begin with (the minimum of Q4_1)
to one of them: that is another model, whose first token may be another. Of what is not quantised it reads float16 only.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np

from kvr_mpi.errors import ConfigError

LARGEST = float(np.finfo(np.float16).max)


def half_gguf(source: Path, cache_dir: Path) -> Path:
    """Write a file's matrices in float16 into the cache, beside all else that it says; once for a file.

    Parameters
    ----------
    source : Path
        A ``.gguf`` file.
    cache_dir : Path

    Raises
    ------
    ConfigError
        If it cannot be read, or written, or its weights exceed float16.
    """
    try:
        about = source.stat()
        known = hashlib.sha256(f"{source.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]
        target = cache_dir / f"{source.stem}-float16-{known}.gguf"
        if target.exists():
            return target
        cache_dir.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{target.stem}-", dir=cache_dir)
        os.close(handle)
        try:
            _write(source, Path(part))
            os.replace(part, target)
        finally:
            Path(part).unlink(missing_ok=True)
    except (OSError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise ConfigError(f"--rivals: {source} cannot be written in float16 for other engines: {error}") from error
    return target


def _write(source: Path, part: Path) -> None:
    """Copy what a file says, and its tensors dequantised: vectors in float32, as they are, and matrices in float16."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim > 1:
            if float(np.abs(weights).max()) > LARGEST:
                raise ValueError(f"{tensor.name} exceeds the range of float16")
            weights = weights.astype(np.float16)
        writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
