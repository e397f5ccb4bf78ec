"""Export of stored keys and values as safetensors, one file per document.

A file has ``layer_000.keys`` and ``layer_000.values`` (tokens, kv_heads, head_dim) in the model's dtype, ``token_ids``,
and the document's record and the run's header in its metadata, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvr_mpi.disk import PART_CHARS, create, replaced
from kvr_mpi.errors import OutputError
from kvr_mpi.store.kv import KINDS
from kvr_mpi.store.results import Results
from kvr_mpi.store.rewrite import rewriting
from kvr_mpi.store.volumes import key_of

SUFFIX, ABOUT = ".safetensors", "kvr-mpi"
# Longest file name that file systems allow, and the part of a longer name that is kept.
MOST_NAME_BYTES, KEPT_OF_NAME = 255, 150


def export_kv(results: Results, folder: Path, *, overwrite: bool = False) -> int:
    """Write a file for each document that has keys and values; return their number.

    Raises `DataError` if a document is damaged (the files before it are complete), `ConfigError` if its keys and values
    are compressed, and `OutputError` if a file cannot be written, or exists already.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for name in results.ids("done"):
        with results.open(name) as (record, kv):
            kv.refuse_compressed("kvr export --kv")
            tensors = {
                f"layer_{number:03d}.{kind}": tensor.contiguous()
                for number in kv.layers
                for kind, tensor in zip(KINDS, kv.read(number), strict=True)
            }
            whose = kv.tokens
        if not tensors:
            continue
        about: dict[str, Any] = {**asdict(results.header), "record": record.as_dict(), "text": None}
        if whose is not None:
            import torch

            tensors["token_ids"] = torch.tensor(whose.ids)
            about["text"] = list(whose.text)
        file = folder / tensors_file(key_of(name))
        if file.exists() and not overwrite:
            raise OutputError(f"{file} exists; add --overwrite, or choose another folder")
        with rewriting(file), replaced(file) as part:
            os.close(create(part))  # created exclusively: safetensors would follow a symbolic link
            save_file(tensors, part, metadata={ABOUT: json.dumps(about)})
        count += 1
    return count


def tensors_file(key: str) -> str:
    """Return a document's file name; a long one is cut and gets a checksum.

    In a key, two hexadecimal digits follow every ``%``, so no other document's name contains ``%-``.
    """
    if len(key + SUFFIX) + PART_CHARS <= MOST_NAME_BYTES:
        return key + SUFFIX
    return f"{key[:KEPT_OF_NAME]}%-{hashlib.sha256(key.encode()).hexdigest()}{SUFFIX}"
