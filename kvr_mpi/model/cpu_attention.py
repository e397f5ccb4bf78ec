"""Attention on CPUs with our own kernels, where they are faster than torch's.

torch's flash attention multiplies blocks with general matrix products. Our prefill kernel keeps a tile of queries in
registers and computes little above the diagonal (``tiled_attention.cpp``). Another one computes bfloat16 with AMX, if
the processor has it and the operating system permits it (``amx_attention.cpp``). Our decode kernel reads keys and
values once, at nearly memory bandwidth (``decode_attention.cpp``). The kernels are compiled once per processor
(`tuning.compiled_attention`), and used for the numbers of queries at which they were measured to be faster
(`tuning.kernels`). Without a compiler, torch's attention is used.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvr_mpi.model.kernels import ATTENTION_SLOT, PLAIN, Ways, way_for
from kvr_mpi.model.kernels import named as _named
from kvr_mpi.model.narrow_product import BLOCK, LAYOUTS, LEAST_OUTS, NarrowWeights
from kvr_mpi.model.row_functions import RowFunctions
from kvr_mpi.model.unit_table import Integers, Unit, UnitTable

# All sources form one library, together with the matrix products.
_NAMES = (
    "tiled_attention decode_attention narrow_product panel_product half_product row_functions amx_attention".split()
)
SOURCES = [Path(__file__).with_name(f"{name}.cpp") for name in _NAMES]
_NAMES = "lanes halves tiles panels threads attention amx_tiles".split()
HEADERS = [Path(__file__).with_name(f"{name}.h") for name in _NAMES]
OWN, AMX = "own kernel", "AMX tiles"
# The dtypes of keys and values, in the order of `Kind` in ``halves.h``; and those of weights that are widened.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = DTYPES[1:]
# Sizes and strides, in the order of the C++ structure's fields.
_SIZES = "group queries keys dim query_head query_row key_row value_row out_head out_row".split()
_STEP_SIZES = "units documents heads group dim query_head query_row key_head key_row value_head value_row kind".split()


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int32),
        ("window", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        *((name, ctypes.c_int64) for name in ("outs", "features", "row")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in "query keys values out lse edges lengths firsts".split()),
        *((name, ctypes.c_int64) for name in _STEP_SIZES),
        ("scale", ctypes.c_float),
    )


class PrefillAttention:
    """One of the prefill kernels of a shared library.

    name : of its function, such as ``kvr_attention``.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._attend, self._room = getattr(library, name), getattr(library, f"{name}_room")
        self._attend.restype, self._attend.argtypes = None, [ctypes.c_void_p] * 7 + [ctypes.c_int64]
        self._room.restype, self._room.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3

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
        """Attend as in `KernelLibrary.attend`."""
        (_, heads, queries, dim), (_, kv_heads, count, _) = query.shape, keys.shape
        assert queries <= count if causal else window is None
        group, threads = heads // kv_heads, torch.get_num_threads()
        out = torch.empty(1, queries, heads, dim).transpose(1, 2)
        lse = torch.empty(1, heads, queries)
        room = torch.empty(self._room(dim, count, threads))
        strides = query.stride(1), query.stride(2), keys.stride(2), values.stride(2), out.stride(1), out.stride(2)
        shape = _Shape(group, queries, count, dim, *strides, scale, causal, window or count, DTYPES.index(query.dtype))
        with _named("tiled attention"):
            for head in range(kv_heads):
                of_group = slice(head * group, head * group + group)
                tensors = query[:, of_group], keys[:, head], values[:, head], out[:, of_group], lse[:, of_group], room
                self._attend(ctypes.byref(shape), *(each.data_ptr() for each in tensors), threads)
        return out, lse


def amx_attention(library: ctypes.CDLL) -> PrefillAttention | None:
    """Return the kernel for AMX; None if it was not compiled, or this process may not use AMX."""
    if not hasattr(library, "kvr_amx_allowed") or not library.kvr_amx_allowed():
        return None
    return PrefillAttention(library, "kvr_amx_attention")


class KernelLibrary:
    """The compiled kernels: a shared library made of `SOURCES`.

    identity : the name of its folder, unique for its code and processor.
    multiple : head_dim must be a multiple of this.
    amx : attention in bfloat16 on AMX tiles, for any head_dim; None where this process may not use them.
    rows : its norms, gates and rotary embeddings.

    Raises `OSError` if the library cannot be loaded; `AttributeError` if it lacks one of the functions.
    """

    def __init__(self, file: Path) -> None:
        library, self.identity = ctypes.CDLL(str(file)), file.parent.name
        self._tiled = PrefillAttention(library, "kvr_attention")
        self.amx = amx_attention(library)
        self._decode = library.kvr_decode_attention
        self._decode.restype, self._decode.argtypes = ctypes.c_int64, [ctypes.c_void_p] * 2 + [ctypes.c_int64]
        self.multiple = int(library.kvr_attention_multiple())
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._narrow: dict[torch.dtype, Any] = {}
        self._multiply: dict[torch.dtype, Any] = {}
        for dtype, (name, _, _) in LAYOUTS.items():
            self._narrow[dtype] = narrow = getattr(library, f"kvr_narrow_to_{name}")
            narrow.restype, narrow.argtypes = size, [pointer, size, pointer, pointer, size]
            self._multiply[dtype] = multiply = getattr(library, f"kvr_product_of_{name}")
            multiply.restype, multiply.argtypes = None, [pointer, pointer, size, size, pointer, size, pointer, size]
        self._panel_outs, self._panel_room = int(library.kvr_panel_outs()), library.kvr_panel_room
        self._panel_room.restype, self._panel_room.argtypes = size, [size]
        self._lay_panels, self._multiply_panels = library.kvr_lay_panels, library.kvr_product_of_panels
        self._lay_panels.restype, self._lay_panels.argtypes = None, [pointer, size, size, pointer, size]
        self._multiply_panels.restype = None
        self._multiply_panels.argtypes = [pointer, pointer, size, size, pointer, size, pointer, pointer, size]
        self._halves_room, self._multiply_halves = library.kvr_halves_room, dict[torch.dtype, Any]()
        self._halves_room.restype, self._halves_room.argtypes = size, [size] * 4
        for dtype in HALVES:
            multiply = getattr(library, f"kvr_product_of_{str(dtype).removeprefix('torch.')}")
            multiply.restype, multiply.argtypes = None, [pointer, pointer, size, pointer, pointer, size]
            self._multiply_halves[dtype] = multiply
        self.rows = RowFunctions(library, DTYPES)

    def takes(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the kernel supports these queries and keys, whatever their lengths."""
        return query.shape[-1] % self.multiple == 0 and query.dtype in DTYPES and _fit(query, keys, values)

    def takes_amx(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the kernel for AMX supports these queries and keys, whatever their lengths."""
        return self.amx is not None and query.dtype == torch.bfloat16 and _fit(query, keys, values)

    def takes_units(self, query: torch.Tensor, table: UnitTable) -> bool:
        """Whether the kernel supports these queries of several documents."""
        dim, dtype = query.shape[-1], query.dtype
        if type(query) is not torch.Tensor or query.device.type != "cpu" or query.stride(-1) != 1:
            return False
        return table.dtype == dtype and table.dim == dim and dim % self.multiple == 0 and dtype in DTYPES

    def takes_new(self, keys: torch.Tensor, values: torch.Tensor, table: UnitTable) -> bool:
        """Whether the kernel writes these keys and values of new tokens."""
        return (
            type(keys) is type(values) is torch.Tensor
            and keys.dtype == values.dtype == table.dtype
            and keys.shape[-1] == values.shape[-1] == table.dim
            and keys.stride(-1) == values.stride(-1) == 1
            and keys.is_cpu
            and values.is_cpu
        )

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
        """Attend to all keys or, if `causal`, to those up to each query; the last query is aligned with the last key.

        query : (1, heads, queries, head_dim); `takes` must be True.
        keys, values : (1, kv_heads, keys, head_dim).
        window : if `causal`, attend only to the last `window` keys up to each query.

        Returns the output (1, heads, queries, head_dim), whose memory is ordered by query, and log-sum-exp (1, heads,
        queries), both float32.
        """
        (_, heads, queries, dim), (_, kv_heads, count, _) = query.shape, keys.shape
        if queries == 1:
            assert causal or window is None
            firsts = None if window is None else np.array([max(0, count - window)])
            pairs = enumerate(zip(keys[0].unbind(0), values[0].unbind(0), strict=True))
            table = UnitTable(1, kv_heads, [Unit(0, head, *pair) for head, pair in pairs])
            one, lse = self.attend_units(query, table, np.array([count]), scale, firsts)
            return one.view(1, heads, 1, dim), lse.view(1, heads, 1)
        return self._tiled.attend(query, keys, values, scale, causal=causal, window=window)

    def attend_units(
        self,
        query: torch.Tensor,
        table: UnitTable,
        lengths: Integers,
        scale: float,
        firsts: Integers | None = None,
        edges: Integers | None = None,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from one query per head of several documents, or from several, each KV head to its units.

        query : (1, heads, queries, head_dim).
        table : `takes_units` must be True.
        lengths : of each query's document (queries,), which determine the units' rows; ascending within a document.
        firsts : first position that each query attends to (queries,); None: all positions.
        edges : the range of each document's queries (documents + 1,); None: one query of each document.
        new : keys and values of the queries' own tokens (1, kv_heads, queries, head_dim), written to the last row of
            their units that grow; `takes_new` must be True. None: they are there.

        Returns the output (queries, heads, head_dim) and log-sum-exp (queries, heads), float32; zero and minus
        infinity for heads without a unit. Raises `ValueError` if a unit has no rows, or more rows than its capacity.
        """
        (_, heads, queries, dim), kv_heads, (_, by_head, by_query, _) = query.shape, table.kv_heads, query.stride()
        edges = np.arange(queries + 1) if edges is None else edges
        assert len(edges) == table.documents + 1 and edges[-1] == queries == len(lengths), "a length of each query"
        out, lse = torch.empty(queries, heads, dim), torch.empty(queries, heads)
        keys, values = (None, None) if new is None else new
        pointers = (
            query.data_ptr(),
            keys if keys is None else keys.data_ptr(),
            values if values is None else values.data_ptr(),
        )
        arrays = edges.ctypes.data, lengths.ctypes.data, None if firsts is None else firsts.ctypes.data
        strides = (0,) * 4 if keys is None or values is None else (*keys.stride()[1:3], *values.stride()[1:3])
        sizes = len(table.rows), table.documents, kv_heads, heads // kv_heads, dim
        how = *sizes, by_head, by_query, *strides, DTYPES.index(query.dtype), scale
        step = _Step(*pointers, out.data_ptr(), lse.data_ptr(), *arrays, *how)
        with _named("decode attention"):
            wrong = self._decode(ctypes.byref(step), table.rows.ctypes.data, torch.get_num_threads())
        if wrong:
            unit = table.units[wrong - 1]
            rows = f"{unit.filled} rows{' and as many as its document has tokens' if unit.grows else ''}"
            raise ValueError(f"a unit of {rows} with room for {len(unit.keys)}, of documents of {lengths.tolist()}")
        return out, lse

    def multiply(self, rows: torch.Tensor, weights: NarrowWeights) -> torch.Tensor:
        """Multiply (..., features) to (..., outs), both float32; raises a `ValueError` for unsupported rows."""
        outs = weights.packed.shape[0]
        rows = _checked(rows, weights.features)
        out = torch.empty(*rows.shape[:-1], outs)
        sizes = outs, weights.features, rows.data_ptr(), _count(rows), out.data_ptr(), torch.get_num_threads()
        with _named("narrow product"):
            self._multiply[weights.packed.dtype](weights.packed.data_ptr(), weights.scales.data_ptr(), *sizes)
        return out

    def lay_panels(self, weight: torch.Tensor) -> torch.Tensor:
        """Copy weights (outs, features), float32, to panels (panels, features, outs of a panel)."""
        (outs, features), weight = weight.shape, weight.detach().contiguous()
        panels = torch.empty(-(-outs // self._panel_outs), features, self._panel_outs)
        self._lay_panels(weight.data_ptr(), outs, features, panels.data_ptr(), torch.get_num_threads())
        return panels

    def multiply_panels(
        self, rows: torch.Tensor, panels: torch.Tensor, outs: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply (..., features) by weights in panels and add a bias (outs,), if any: (..., outs), all float32.

        Raises `ValueError` if the kernels do not support the rows.
        """
        rows, threads = _checked(rows, panels.shape[1]), torch.get_num_threads()
        out, room = torch.empty(*rows.shape[:-1], outs), torch.empty(self._panel_room(threads))
        weights = panels.data_ptr(), None if bias is None else bias.data_ptr(), outs, panels.shape[1]
        with _named("panel product"):
            self._multiply_panels(*weights, rows.data_ptr(), _count(rows), out.data_ptr(), room.data_ptr(), threads)
        return out

    def multiply_halves(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply (..., features) by 16-bit weights (outs, features) and add a bias (outs,), if any: (..., outs).

        All have the dtype of the weights, whose features are adjacent. Sums are float32. Raises `ValueError` if the
        kernels do not support the rows.
        """
        (outs, features), threads = weight.shape, torch.get_num_threads()
        rows = _checked(rows, features, weight.dtype)
        count, out = _count(rows), torch.empty(*rows.shape[:-1], outs, dtype=weight.dtype)
        room = torch.empty(self._halves_room(outs, features, count, threads), dtype=torch.float32)
        pointers = weight.data_ptr(), None if bias is None else bias.data_ptr()
        layer = ctypes.byref(_Layer(*pointers, outs, features, weight.stride(0)))
        with _named("widened product"):
            self._multiply_halves[weight.dtype](layer, rows.data_ptr(), count, out.data_ptr(), room.data_ptr(), threads)
        return out

    def narrow(self, weight: torch.Tensor) -> NarrowWeights | None:
        """Copy weights (outs, features) in fewer bits; None if that is lossy, or the kernels do not support them."""
        outs, features = weight.shape
        if weight.dtype != torch.float32 or weight.device.type != "cpu" or features % BLOCK or outs < LEAST_OUTS:
            return None
        weight, blocks = weight.detach().contiguous(), features // BLOCK
        for dtype, (_, per_element, scales) in LAYOUTS.items():
            found = NarrowWeights(
                torch.empty(outs, features // per_element, dtype=dtype), torch.empty(outs, blocks, scales)
            )
            tensors = weight.data_ptr(), outs * blocks, found.packed.data_ptr(), found.scales.data_ptr()
            if self._narrow[dtype](*tensors, torch.get_num_threads()):
                return found
        return None


def _fit(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether these are plain tensors of one dtype, whose shapes fit each other."""
    for each in (query, keys, values):  # subclasses may have no memory of their own
        if type(each) is not torch.Tensor or each.dtype != query.dtype or each.device.type != "cpu":
            return False
        if each.stride(-1) != 1:
            return False
    (batch, heads, _, dim), shape = query.shape, keys.shape
    fits = shape == values.shape and batch == shape[0] == 1 and dim == shape[3] and heads % max(shape[1], 1) == 0
    return fits and min(shape) > 0


def _checked(rows: torch.Tensor, features: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return rows (..., features) that the products support, one after the other in memory."""
    if rows.dtype != dtype or rows.device.type != "cpu" or type(rows) is not torch.Tensor:
        raise ValueError(f"rows of {rows.dtype} on {rows.device}; expected plain ones of {dtype} on the CPU")
    if features != rows.shape[-1]:
        raise ValueError(f"rows of {rows.shape[-1]} features do not fit the weights")
    return rows.contiguous()


def _count(rows: torch.Tensor) -> int:
    return rows.numel() // rows.shape[-1]


class CpuAttention:
    """Our attention kernels for a model's layers, used for the numbers of queries at which they are faster."""

    slot, nbytes = ATTENTION_SLOT, 0

    def __init__(self, library: KernelLibrary, ways: Ways) -> None:
        self.library, self.ways = library, ways

    def takes(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the kernel supports these queries and keys, and was measured to be faster."""
        way = way_for(self.ways, query.shape[2])
        takes = self.library.takes_amx if way == AMX else self.library.takes
        return way != PLAIN and takes(query, keys, values)

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
        """Attend as in `KernelLibrary.attend`, with the kernel for this number of queries."""
        way = way_for(self.ways, query.shape[2])
        kernel = self.library.amx if way == AMX and self.library.amx is not None else self.library
        return kernel.attend(query, keys, values, scale, causal=causal, window=window)

    def takes_units(self, query: torch.Tensor, table: UnitTable) -> bool:
        """Whether the kernel supports one query per head of several documents, and was measured to be faster."""
        return self.ways[0] != PLAIN and self.library.takes_units(query, table)
