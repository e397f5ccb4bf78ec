"""The store that decoding reads: for each KV head a run of rows, with room for the answer at its end.

The longest possible answer is known after the prefill. So each KV head of a layer gets one run of rows, and decoding
appends to it without copying. Heads may hold different tokens after compression: keys already contain their rotary
embedding, so a dropped token leaves no gap. A rank may hold only some heads of a layer, and only some rows of a head
(``decode.head_parallel``).

A document's rows are its own memory, freed when the document is answered, or on GPUs pages of an ``arena``. Prompts
with a common prefix reference one copy of its rows, which is freed with the last of these prompts, and have their own
runs for the tokens after it. ``decode_cache`` runs a step over the rows of many documents.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.arena import PAGE_ROWS, Arena, Run, in_flat, pages_for
from kvr_mpi.kv.attention import PartialAttention, attend
from kvr_mpi.kv.buffers import make_flat
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams

Rows = npt.NDArray[np.int32]
Pair = tuple[torch.Tensor, torch.Tensor]


class HeadStore:
    """Keys and values of one layer of one document.

    runs : rows of the held heads; of all heads, if every head holds all tokens from the first row on.
    shape : its `num_kv_heads` is the number of heads of the keys that `write` receives.
    room : tokens that can be appended.
    origin : position of the first token to be appended.
    appends : whether this store keeps new tokens; otherwise another rank keeps them, and `write` does nothing.
    is_whole : every head holds all tokens: rows are in the order of positions.
    shared : shared runs of the first tokens, in order; `runs` hold the tokens after them.
    buffer : the token-major memory (capacity, elements of K and V of all heads), while rows are in it (`by_tokens`).
    start : position of the first row of `runs`.
    positions : positions in the prompt that each held head keeps, (tokens,) int32 on its device; None if they are not
        known.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        shape: LayerShape,
        room: int,
        origin: int,
        *,
        appends: bool = True,
        is_whole: bool = False,
        shared: Sequence[Run] = (),
        buffer: torch.Tensor | None = None,
    ) -> None:
        assert not shared or (is_whole and runs[0].first == shared[-1].stop), "all heads go on after shared rows"
        self.runs, self.shared, self.buffer, self.shape = runs, shared, buffer, shape
        self.start = runs[0].first if runs else 0
        self.extent = runs[0].extent if runs else None
        self.room, self.origin, self.appends, self.is_whole = room, origin, appends, is_whole
        self.positions: list[torch.Tensor] | None = None
        self.is_one_run = len(runs) == 1 and runs[0].heads == shape.num_kv_heads

    @classmethod
    def reserve(
        cls,
        shape: LayerShape,
        counts: Sequence[int],
        room: int,
        origin: int,
        dtype: torch.dtype,
        device: torch.device,
        arena: Arena | None = None,
        *,
        heads: Sequence[int] | None = None,
        start: int = 0,
        shared: Sequence[Run] = (),
        appends: bool = True,
        is_whole: bool = False,
    ) -> HeadStore:
        """Allocate uninitialised rows, head after head; adjacent heads with the same count are one run.

        counts : own rows of each head.
        arena : where to allocate pages, if possible in the extent of the shared rows; otherwise the store also gets
            its own rows for these tokens. None: separate memory.
        heads : which heads of the layer these are, ascending; by default all.
        start : position of the first own row.

        Raises `MemoryError` or `torch.OutOfMemoryError` if there is no memory for them.
        """
        held = range(shape.num_kv_heads) if heads is None else heads
        assert len(counts) == len(held), "one count for each head held"
        runs, at, row, capacities = list[Run](), 0, 0, [count + room for count in counts]
        if not counts:
            return cls(runs, shape, room, origin, appends=appends)
        if arena is None:
            rows = sum(capacities)
            flat = make_flat(rows * (shape.key_dim + shape.value_dim), dtype, device)
            whole = Run(0, 0, 0, *in_flat(flat, 1, rows, shape))
        else:
            capacities = [PAGE_ROWS * pages_for(capacity) for capacity in capacities]
            whole = arena.take(shape, sum(capacities) // PAGE_ROWS, shared[0].extent if shared else None)
        if shared and whole.extent is not shared[0].extent:  # it is full
            counts, start = [start - shared[0].first + count for count in counts], shared[0].first
            return cls.reserve(
                shape, counts, room, origin, dtype, device, arena, start=start, appends=appends, is_whole=is_whole
            )
        for _, group in itertools.groupby(range(len(held)), lambda i: (counts[i], held[i] - i)):
            many = len(list(group))
            stop, sizes = row + many * capacities[at], (many, capacities[at])
            keys, values = (each[0, row:stop].view(*sizes, each.shape[2]) for each in (whole.keys, whole.values))
            runs.append(Run(held[at], start, counts[at], keys, values, whole.row + row, whole.extent))
            at, row = at + many, stop
        return cls(runs, shape, room, origin, appends=appends, is_whole=is_whole, shared=shared)

    @classmethod
    def by_tokens(cls, buffer: torch.Tensor, shape: LayerShape, start: int = 0) -> HeadStore:
        """View a token-major buffer (capacity, elements of K and V of all heads) as an empty store.

        A range of tokens is contiguous: it is received in place, attended to as a view, and sent without packing.

        start : position of the buffer's first row.
        """
        heads, cut = shape.num_kv_heads, shape.num_kv_heads * shape.key_dim
        keys, values = buffer[:, :cut].view(-1, heads, shape.key_dim), buffer[:, cut:].view(-1, heads, shape.value_dim)
        run = Run(0, start, 0, keys.transpose(0, 1), values.transpose(0, 1))
        return cls([run], shape, len(buffer), start, is_whole=True, buffer=buffer)

    @classmethod
    def of_rows(
        cls, rows: torch.Tensor, shape: LayerShape, device: torch.device, arena: Arena | None = None, start: int = 0
    ) -> HeadStore:
        """Copy token-major rows (tokens, elements of K and V of all heads), the first at position `start`, by heads."""
        tokens, stop = len(rows), start + len(rows)
        counts = [tokens] * shape.num_kv_heads
        store = cls.reserve(shape, counts, 0, stop, rows.dtype, device, arena, start=start, is_whole=True)
        store.write(start, *cls.by_tokens(rows.to(device, non_blocking=True), shape, start).rows(start, stop))
        return store

    @functools.cached_property
    def lines(self) -> list[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Each held head, its own rows without appended ones, and their keys and values (capacity, dim)."""
        return [
            (run.head + at, run.count, *rows)
            for run in self.runs
            for at, rows in enumerate(zip(run.keys.unbind(0), run.values.unbind(0), strict=True))
        ]

    @property
    def shared_tokens(self) -> int:
        """How many of the first tokens are shared."""
        return self.shared[-1].stop if self.shared else 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(run.nbytes for run in self.runs)

    def appended(self, length: int) -> int:
        """Rows that each held head has received since the prefill, for a document of `length` tokens."""
        return length - self.origin if self.appends else 0

    def counts(self, length: int) -> list[int]:
        """Rows of each held head, including shared rows."""
        more = self.shared_tokens + self.appended(length)
        return [run.count + more for run in self.runs for _ in range(run.heads)]

    def own_rows(self, at: int, length: int) -> Pair:
        """Keys and values of one held head, without shared rows, as views (rows, dim), for a document of `length`."""
        _, count, keys, values = self.lines[at]
        rows = slice(count + self.appended(length))
        return keys[rows], values[rows]

    def fill(self, heads: Iterable[Pair], kept: Sequence[torch.Tensor] | None = None) -> None:
        """Copy keys and values (rows, dim) of each held head, or only the `kept` rows of each, to its own rows.

        Nothing has been appended yet.
        """
        for at, pair in enumerate(heads):
            for place, rows in zip(self.own_rows(at, self.origin), pair, strict=True):
                if kept is None:
                    place.copy_(rows)
                else:
                    torch.index_select(rows, 0, kept[at].to(rows.device), out=place)

    def head_pieces(self, at: int, length: int) -> list[Pair]:
        """Keys and values of one held head, shared rows first, as views (rows, dim), for a document of `length`."""
        return [*((each.keys[at], each.values[at]) for each in self.shared), self.own_rows(at, length)]

    def head_rows(self, at: int, length: int) -> Pair:
        """Keys and values of one held head (rows, dim), for a document of `length` tokens.

        They are views unless rows are shared.
        """
        pieces = self.head_pieces(at, length)
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([keys for keys, _ in pieces]), torch.cat([values for _, values in pieces])

    def pieces(self, first: int, last: int) -> list[Pair]:
        """Keys and values of a range of tokens that all heads hold, in order, as views (1, kv_heads, tokens, dim).

        Raises `ModelError` if heads hold different tokens, so that no range of tokens is complete.
        """
        if not self.is_whole:
            raise ModelError("its heads keep different tokens, so a range of tokens does not exist")
        held = [each for each in self.shared if first < each.stop and each.first < last]
        pieces = [each.cut(max(first, each.first), min(last, each.stop)) for each in held]
        return [*pieces, self.runs[0].cut(max(first, self.start), last)] if last > self.start else pieces

    def rows(self, first: int, last: int) -> Pair:
        """Keys and values of a range of tokens that all heads hold (1, kv_heads, tokens, dim).

        They are views unless rows are shared.
        """
        pieces = self.pieces(first, last)
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([keys for keys, _ in pieces], 2), torch.cat([values for _, values in pieces], 2)

    def rows_by_token(self, first: int, last: int) -> Pair:
        """Keys and values of a range of tokens that all heads hold, each (tokens, kv_heads, dim)."""
        keys, values = self.rows(first, last)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def as_shared(self, length: int) -> tuple[Run, ...]:
        """Return the rows that prompts continuing this document may share; on GPUs only whole pages."""
        (run,) = self.runs
        own = length - self.start
        own = own if self.extent is None else own // PAGE_ROWS * PAGE_ROWS
        return (*self.shared, replace(run, count=own, owner=self)) if own else tuple(self.shared)

    @functools.cached_property
    def paged(self) -> list[tuple[int, Rows, int, Rows]]:
        """Locate each run of heads in the extent.

        For each run: its first head; per head (heads,) the row at which it would begin if its shared rows lay before
        its own; a head's rows, minus the document's tokens if it appends; the pages (heads, pages), shared ones first.
        """
        found = []
        for run in self.runs:
            heads, capacity = np.arange(run.heads, dtype=np.int32), run.keys.shape[1]
            own = run.row + heads * capacity
            parts = [(rows.row + (run.head + heads) * rows.keys.shape[1], rows.count) for rows in self.shared]
            pages = [
                first[:, None] // PAGE_ROWS + np.arange(pages_for(rows)) for first, rows in [*parts, (own, capacity)]
            ]
            filled = self.shared_tokens + run.count + self.appended(0)
            whole = np.concatenate(pages, axis=1).astype(np.int32)
            found.append((run.head, (own - self.shared_tokens).astype(np.int32), filled, whole))
        return found

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values (1, kv_heads, tokens, dim) of all heads, beginning at position `first`.

        Raises `ValueError` if they do not fit.
        """
        if not self.runs or not self.appends:
            return
        tokens = keys.shape[2]
        if not (self.is_whole or first >= self.origin) or first + tokens > self.origin + self.room:
            raise ValueError(
                f"tokens {first} to {first + tokens} do not fit: the heads end at token {self.origin}, and have "
                f"room for {self.room} more"
            )
        for run in self.runs:
            rows, heads = run.count + self.appended(first), slice(run.head, run.head + run.heads)
            run.keys[:, rows : rows + tokens] = keys[0, heads]
            run.values[:, rows : rows + tokens] = values[0, heads]

    def attend(self, query: torch.Tensor, length: int, params: AttentionParams, first: int = 0) -> PartialAttention:
        """Attend from the last tokens of a document to the rows that each head holds up to them.

        query : (1, heads, tokens, head_dim).
        length : tokens of the document, including the queries'.
        first : first position that the queries see, the same for all of them.

        Returns attention (1, heads, tokens, value_dim); heads without rows have a log-sum-exp of -inf.
        """
        group, causal = query.shape[1] // self.shape.num_kv_heads, query.shape[2] > 1
        own_first, appended = max(0, first - self.start), self.appended(length)

        def attend_to(run: Run, heads: slice) -> PartialAttention:
            keys, values = (rows[None, :, own_first : run.count + appended] for rows in (run.keys, run.values))
            return attend(query[:, heads], keys, values, params, causal=causal)

        if self.is_one_run:
            part = attend_to(self.runs[0], slice(None))
        else:
            part = PartialAttention.of_nothing((*query.shape[:-1], self.shape.value_dim), query.device)
            for run in self.runs:
                heads = slice(run.head * group, (run.head + run.heads) * group)
                found = attend_to(run, heads)
                part.out[:, heads], part.lse[:, heads] = found.out, found.lse
        for rows in self.shared:
            if first < rows.stop:
                part = part.merge(attend(query, *rows.cut(max(first, rows.first), rows.stop), params))
        return part


def bytes_of_stores(stores: Iterable[HeadStore]) -> int:
    """Bytes of several stores, and of the rows that they share with others; shared memory counts once."""
    held = {id(one): one for store in stores for one in (store, *(rows.owner for rows in store.shared))}
    return sum(one.nbytes for one in held.values())


def check_retained(retained: Sequence[torch.Tensor], shape: LayerShape, layer_idx: int) -> None:
    """Check the positions that the heads of a layer are to keep, without their values: the host would wait for a GPU.

    Raises `ModelError` if the layer has a window or chunks: it drops tokens by position; `ValueError` if a head keeps
    nothing.
    """
    if shape.visibility.size is not None:
        raise ModelError(
            f"layer {layer_idx} sees {shape.visibility}: its heads cannot keep tokens of their own; expected None for "
            f"this layer, which then keeps all it has"
        )
    if len(retained) != shape.num_kv_heads:
        raise ValueError(f"layer {layer_idx} has {shape.num_kv_heads} KV heads, and {len(retained)} are to keep tokens")
    about = f"layer {layer_idx}, KV head"
    for head, positions in enumerate(retained):
        assert positions.ndim == 1 and positions.dtype == torch.int64, f"{about} {head}: positions are integers"
        if not len(positions):
            raise ValueError(f"{about} {head} would keep nothing; expected at least one token")
