"""Norms, gates and rotary embeddings on CPUs, each in one pass over its rows.

torch uses six operations for a norm, and passes over memory as often. Next to products at the speed of AMX, that takes
a quarter of a prefill. Our functions (``row_functions.cpp``) round where the models' code rounds, and their results
have the same bits (`fused`, `norms`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kvr_mpi.model.kernels import named

# Numbers in the vectors in which torch adds, with AVX2 and with AVX-512.
WIDTHS = (8, 16)


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("features", "width")),
        ("scale", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("rounds", ctypes.c_int32),
    )


class _Rotary(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in "tokens heads dim rotated row_token row_head angle_token wide_angles".split()
    )


class RowFunctions:
    """The functions in the compiled library.

    dtypes : the dtypes of rows, in the order of `Kind` in ``halves.h``.
    """

    def __init__(self, library: ctypes.CDLL, dtypes: Sequence[torch.dtype]) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._kinds = {dtype: kind for kind, dtype in enumerate(dtypes)}
        self._norm, self._gate, self._rotate = library.kvr_norm, library.kvr_gate, library.kvr_rotate
        self._norm.restype, self._norm.argtypes = None, [size, pointer, pointer, size, pointer, size]
        self._gate.restype, self._gate.argtypes = None, [size, *[pointer] * 3, size, pointer, size]
        self._rotate.restype, self._rotate.argtypes = None, [size, *[pointer] * 5, size]

    def takes(self, *tensors: Any) -> bool:
        """Whether these are plain tensors of one supported dtype on the CPU, with adjacent features."""
        dtype = tensors[0].dtype
        return dtype in self._kinds and all(
            type(each) is torch.Tensor and each.dtype == dtype and each.device.type == "cpu" and each.stride(-1) == 1
            for each in tensors
        )

    def norm(self, rows: torch.Tensor, scale: torch.Tensor, eps: float, width: int, *, rounds: bool) -> torch.Tensor:
        """Divide rows (..., features) by the root of their mean square, and multiply by a scale (features,), float32.

        width : numbers in the vectors in which torch adds, one of `WIDTHS`.
        rounds : round to the dtype of the rows before the multiplication, too.
        """
        features, rows = len(scale), rows.contiguous()
        how, out = _Norm(features, width, scale.data_ptr(), eps, rounds), torch.empty_like(rows)
        pointers = self._kinds[rows.dtype], ctypes.byref(how), rows.data_ptr()
        with named("norm"):
            self._norm(*pointers, rows.numel() // features, out.data_ptr(), torch.get_num_threads())
        return out

    def gate(self, results: torch.Tensor, gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
        """Look up the results of gates (..., features) of 16 bits, and multiply them by `ups`, of the same shape.

        results : of all 16-bit numbers, in the order of their bits (65536,).
        """
        gates, ups = gates.contiguous(), ups.contiguous()
        out, tables = torch.empty_like(ups), (results.data_ptr(), gates.data_ptr(), ups.data_ptr())
        with named("gate"):
            self._gate(self._kinds[ups.dtype], *tables, ups.numel(), out.data_ptr(), torch.get_num_threads())
        return out

    def rotate(self, rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Rotate the first features of rows (1, heads, tokens, head_dim) by angles (1, tokens, rotated).

        Cosines and sines have the dtype of the rows or float32, the same strides, and an even number of features. The
        result's memory is ordered by token.
        """
        (_, heads, tokens, dim), rotated = rows.shape, cosines.shape[-1]
        out = torch.empty(1, tokens, heads, dim, dtype=rows.dtype)
        strides = rows.stride(2), rows.stride(1), cosines.stride(1)
        how = _Rotary(tokens, heads, dim, rotated, *strides, cosines.dtype != rows.dtype)
        tensors = (each.data_ptr() for each in (rows, cosines, sines, out))
        with named("rotary embedding"):
            self._rotate(self._kinds[rows.dtype], ctypes.byref(how), *tensors, torch.get_num_threads())
        return out.transpose(1, 2)
