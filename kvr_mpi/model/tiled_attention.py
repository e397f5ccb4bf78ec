"""Attention on a processor by a kernel of our own, where that is faster than torch's.

torch's flash attention multiplies blocks by general products of matrices; ours keeps a tile of queries in registers and
computes little above the diagonal (``tiled_attention.cpp``). It is compiled once for a processor
(`tuning.compiled_attention`), and taken for the numbers of queries at which it was measured to be faster
(`tuning.kernels`). Without a compiler torch's goes on.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from kvr_mpi.model.kernels import ATTENTION_SLOT, PLAIN, Ways, way_for

SOURCE = Path(__file__).with_name("tiled_attention.cpp")
TILED = "tiled"
# Sizes and strides, in the order of the C++ structure's fields.
_SIZES = "group queries keys dim query_head query_row key_row value_row out_head out_row".split()


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int32),
        ("window", ctypes.c_int64),
    )


class AttentionLibrary:
    """The compiled kernel.

    Parameters
    ----------
    file : Path
        A shared library made of `SOURCE`.

    Raises
    ------
    OSError
        If it cannot be loaded.
    AttributeError
        If it is another library.
    """

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        self._attend, self._room = library.kvr_attention, library.kvr_attention_room
        self._attend.restype, self._attend.argtypes = None, [ctypes.c_void_p] * 7 + [ctypes.c_int64]
        self._room.restype, self._room.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
        self.multiple = int(library.kvr_attention_multiple())

    def takes(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the kernel can attend from these to those, whatever their lengths."""
        tensors, dim = (query, keys, values), query.shape[-1]
        if any(type(each) is not torch.Tensor for each in tensors):  # one whose memory is no tensor's, or nobody's
            return False
        if any(each.dtype != torch.float32 or each.device.type != "cpu" or each.stride(-1) != 1 for each in tensors):
            return False
        same = keys.shape == values.shape and keys.shape[-1] == dim and query.shape[0] == keys.shape[0] == 1
        return same and dim % self.multiple == 0 and query.shape[1] % keys.shape[1] == 0 and min(keys.shape) > 0

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        *,
        causal: bool,
        window: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to all keys, or (`causal`) to those up to each query, where the last query stands at the last key.

        Parameters
        ----------
        query : torch.Tensor
            (1, heads, queries, head_dim) in float32, the features of each together, as of the others.
        keys, values : torch.Tensor
            (1, kv_heads, keys, head_dim).
        window : int or None
            If `causal`: see only the last so many of the keys up to each query.

        Returns
        -------
        torch.Tensor, torch.Tensor
            Output (1, heads, queries, head_dim), by queries, and log-sum-exp (1, heads, queries).
        """
        (_, heads, queries, dim), (_, kv_heads, count, _) = query.shape, keys.shape
        assert self.takes(query, keys, values) and (queries <= count if causal else window is None)
        group, threads = heads // kv_heads, torch.get_num_threads()
        out = torch.empty(1, queries, heads, dim).transpose(1, 2)
        lse = torch.empty(1, heads, queries)
        room = torch.empty(self._room(dim, count, threads))
        strides = query.stride(1), query.stride(2), keys.stride(2), values.stride(2), out.stride(1), out.stride(2)
        shape = _Shape(group, queries, count, dim, *strides, scale, causal, window or count)
        with torch.profiler.record_function("tiled attention"):
            for head in range(kv_heads):
                of_group = slice(head * group, head * group + group)
                tensors = query[:, of_group], keys[:, head], values[:, head], out[:, of_group], lse[:, of_group], room
                self._attend(ctypes.byref(shape), *(each.data_ptr() for each in tensors), threads)
        return out, lse


class TiledAttention:
    """Attention of a model's layers, by our kernel for some numbers of queries.

    Parameters
    ----------
    library : AttentionLibrary
    ways : Ways
    """

    slot, nbytes = ATTENTION_SLOT, 0

    def __init__(self, library: AttentionLibrary, ways: Ways) -> None:
        self._library, self.ways = library, ways

    def takes(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether it can attend from these to those, and was measured to be faster."""
        return way_for(self.ways, query.shape[2]) != PLAIN and self._library.takes(query, keys, values)

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        *,
        causal: bool,
        window: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend (`AttentionLibrary.attend`)."""
        return self._library.attend(query, keys, values, scale, causal=causal, window=window)


def attention_kernel(model: Any) -> TiledAttention | None:
    """Return what a model's attention is computed with as it runs now, if that is not torch's."""
    kernel: TiledAttention | None = vars(model).get(ATTENTION_SLOT)
    return kernel
