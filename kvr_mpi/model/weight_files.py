"""A model's safetensors files, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvr_mpi.errors import ModelError

# What reading raises of files that are gone, cut off or damaged.
UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The tensors of a folder's files.

    files : which file has a tensor of this name.
    dtype : what is read becomes this, if it is a floating type.
    """

    files: dict[str, Path]
    dtype: torch.dtype

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read tensors into memory of their own: what the system has mapped of a file, it may forget."""
        found: dict[str, torch.Tensor] = {}
        for file in dict.fromkeys(self.files[name] for name in names):
            with safe_open(file, framework="pt") as opened:
                for name in names:
                    if self.files[name] == file:
                        found[name] = self._own(opened.get_tensor(name))
        return found

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def find_weights(folder: Path, dtype: torch.dtype | None) -> WeightFiles:
    """List the tensors that transformers would load of a folder; a dtype that is None is that of the first of them.

    Raises
    ------
    ModelError
        If the files cannot be read.
    """
    try:
        return _find_weights(folder, dtype)
    except UNREADABLE as error:
        raise ModelError(f"its weights cannot be read: {error}; copy them again") from error


def _find_weights(folder: Path, dtype: torch.dtype | None) -> WeightFiles:
    files: dict[str, Path] = {}
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    wanted = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {single.name}
    found = sorted(folder.glob("*.safetensors"))
    for file in [file for file in found if file.name in wanted] or found:
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
            dtype = dtype or _floating_dtype(opened)
    return WeightFiles(files, dtype or torch.float32)


def _floating_dtype(opened: Any) -> torch.dtype | None:
    tensors = (opened.get_tensor(name) for name in opened.keys())  # noqa: SIM118  (it is no dictionary)
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
