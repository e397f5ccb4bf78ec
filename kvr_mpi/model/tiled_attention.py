"""Attention on a processor by kernels of our own, where they are faster than torch's.

torch's flash attention multiplies blocks by general products of matrices. Ours keeps a tile of queries in registers and
computes little above the diagonal (``tiled_attention.cpp``); for the one query of a step of decoding it reads keys and
values once, nearly as fast as memory gives them (``decode_attention.cpp``). They are compiled once for a processor
(`tuning.compiled_attention`), and taken for the numbers of queries at which they were measured to be faster
(`tuning.kernels`). Without a compiler torch's goes on.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from kvr_mpi.model.kernels import ATTENTION_SLOT, PLAIN, Ways, way_for

SOURCES = [Path(__file__).with_name(name) for name in ("tiled_attention.cpp", "decode_attention.cpp")]
HEADERS = [Path(__file__).with_name(name) for name in ("lanes.h", "threads.h")]
TILED = "tiled"
# Sizes and strides, in the order of the C++ structure's fields.
_SIZES = "group queries keys dim query_head query_row key_row value_row out_head out_row".split()
_SIZES_OF_ONE = "kv_heads group keys dim query_head key_head key_row value_head value_row out_head".split()


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int32),
        ("window", ctypes.c_int64),
    )


def _named(what: str) -> AbstractContextManager[Any]:
    """Name what is done for a profiler, if one is at work: a name costs as much as a call."""
    at_work = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    return torch.profiler.record_function(what) if at_work else nullcontext()


class _OneQuery(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES_OF_ONE),
        ("scale", ctypes.c_float),
        ("half", ctypes.c_int32),
    )


class AttentionLibrary:
    """The compiled kernels.

    Parameters
    ----------
    file : Path
        A shared library made of `SOURCES`.

    Attributes
    ----------
    identity : str
        The name of its folder, which another code or processor has another of.
    multiple : int
        Heads it takes have a multiple of so many features.

    Raises
    ------
    OSError
        If it cannot be loaded.
    AttributeError
        If it is another library.
    """

    def __init__(self, file: Path) -> None:
        library, self.identity = ctypes.CDLL(str(file)), file.parent.name
        self._attend, self._room = library.kvr_attention, library.kvr_attention_room
        self._attend.restype, self._attend.argtypes = None, [ctypes.c_void_p] * 7 + [ctypes.c_int64]
        self._room.restype, self._room.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
        self._decode, self._decode_room = library.kvr_decode_attention, library.kvr_decode_room
        self._decode.restype, self._decode.argtypes = None, [ctypes.c_void_p] * 7 + [ctypes.c_int64]
        self._decode_room.restype, self._decode_room.argtypes = ctypes.c_int64, [ctypes.c_int64] * 4
        self.multiple = int(library.kvr_attention_multiple())

    def takes(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the kernel can attend from these to those, whatever their lengths."""
        dtype = query.dtype
        if dtype != torch.float32 and (dtype != torch.bfloat16 or query.shape[2] > 1):
            return False
        for each in (query, keys, values):  # a type of its own: one whose memory is no tensor's, or nobody's
            if type(each) is not torch.Tensor or each.dtype != dtype or each.device.type != "cpu":
                return False
            if each.stride(-1) != 1:
                return False
        (batch, heads, _, dim), shape = query.shape, keys.shape
        fits = shape == values.shape and batch == shape[0] == 1 and dim == shape[3] and heads % max(shape[1], 1) == 0
        return fits and dim % self.multiple == 0 and min(shape) > 0

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
            (1, heads, queries, head_dim) in float32, or one query in bfloat16. What a kernel cannot read (`takes`)
            must not be given to it.
        keys, values : torch.Tensor
            (1, kv_heads, keys, head_dim).
        window : int or None
            If `causal`: see only the last so many of the keys up to each query.

        Returns
        -------
        torch.Tensor, torch.Tensor
            Output (1, heads, queries, head_dim) of the query's type, by queries, and log-sum-exp (1, heads, queries) in
            float32.
        """
        (_, heads, queries, dim), (_, kv_heads, count, _) = query.shape, keys.shape
        assert queries <= count if causal else window is None
        if queries == 1:
            if window is not None and window < count:
                keys, values = keys[:, :, -window:], values[:, :, -window:]
            return self._attend_one(query, keys, values, scale)
        group, threads = heads // kv_heads, torch.get_num_threads()
        out = torch.empty(1, queries, heads, dim).transpose(1, 2)
        lse = torch.empty(1, heads, queries)
        room = torch.empty(self._room(dim, count, threads))
        strides = query.stride(1), query.stride(2), keys.stride(2), values.stride(2), out.stride(1), out.stride(2)
        shape = _Shape(group, queries, count, dim, *strides, scale, causal, window or count)
        with _named("tiled attention"):
            for head in range(kv_heads):
                of_group = slice(head * group, head * group + group)
                tensors = query[:, of_group], keys[:, head], values[:, head], out[:, of_group], lse[:, of_group], room
                self._attend(ctypes.byref(shape), *(each.data_ptr() for each in tensors), threads)
        return out, lse

    def _attend_one(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (_, heads, _, dim), (_, kv_heads, count, _) = query.shape, keys.shape
        group = heads // kv_heads
        out, lse = torch.empty(1, heads, 1, dim), torch.empty(1, heads, 1)
        room = torch.empty(self._decode_room(kv_heads, group, count, dim))
        strides = query.stride(1), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2), out.stride(1)
        shape = _OneQuery(kv_heads, group, count, dim, *strides, scale, query.dtype == torch.bfloat16)
        tensors = [each.data_ptr() for each in (query, keys, values, out, lse, room)]
        with _named("decode attention"):
            self._decode(ctypes.byref(shape), *tensors, torch.get_num_threads())
        return out.to(query.dtype), lse


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
