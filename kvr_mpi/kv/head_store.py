"""The store that decoding reads: for each KV head a run of rows, with room for the answer at its end.

The longest possible answer is known after the prefill. So each KV head of a layer gets one run of rows, and decoding
appends to it without copying. Heads may hold different tokens after compression: keys already contain their rotary
embedding, so a dropped token leaves no gap. A rank may hold only some heads of a layer, and only some rows of a head
(``decode.head_parallel``).

A document's rows are its own memory, freed when the document is answered, or on GPUs pages of an ``arena``. Prompts
with a common prefix reference one copy of its rows, which is freed with the last of these prompts, and have their own
runs for the tokens after it. ``units`` runs a decode step over the rows of many documents.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.arena import PAGE_ROWS, RowMemory, capacity_of, pages_for
from kvr_mpi.kv.attention import PartialAttention, attend, attend_up_to
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams

Rows = npt.NDArray[np.int32]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Adjacent KV heads that hold the same number of rows.

    head : index of the first one, among the heads that the model computes on this rank.
    first : position of the first row, if rows are in the order of positions.
    count : rows that each head holds, without appended tokens.
    keys, values : views (heads, capacity, dim).
    row : row of the memory or extent at which the first head's rows begin.
    owner : the store that owns these rows, if other prompts share them.
    """

    head: int
    first: int
    count: int
    keys: torch.Tensor
    values: torch.Tensor
    row: int = 0
    owner: HeadStore | None = None

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.keys)

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.first + self.count

    def cut(self, first: int, last: int) -> Pair:
        """Keys and values of a range of positions, as views (1, heads, tokens, dim)."""
        rows = slice(first - self.first, last - self.first)
        return self.keys[None, :, rows], self.values[None, :, rows]


class HeadStore:
    """Keys and values of one layer of one document.

    Parameters
    ----------
    memory : RowMemory
        Memory of the runs.
    shape : LayerShape
        Its `num_kv_heads` is the number of heads of the keys that `write` receives.
    runs : sequence of Run
    room : int
        Tokens that can be appended.
    origin : int
        Position of the first token to be appended.
    appends : bool
        Whether this store keeps new tokens; otherwise another rank keeps them, and `write` does nothing.
    is_whole : bool
        Every head holds all tokens: rows are in the order of positions.
    shared : sequence of Run
        Shared runs of the first tokens, in order; `runs` hold the tokens after them.
    start : int, optional
        Position of the runs' first row, if every head holds all tokens from there on; by default the end of `shared`.
    buffer : Tensor, optional
        The token-major memory (capacity, elements of K and V of all heads), while rows are in it.

    Attributes
    ----------
    positions : list of Tensor or None
        Positions in the prompt that each held head keeps, (tokens,) int32 on the host; None if they are not known.
    """

    def __init__(
        self,
        memory: RowMemory,
        shape: LayerShape,
        runs: Sequence[Run],
        room: int,
        origin: int,
        *,
        appends: bool = True,
        is_whole: bool = False,
        shared: Sequence[Run] = (),
        start: int | None = None,
        buffer: torch.Tensor | None = None,
    ) -> None:
        assert is_whole or not shared, "shared runs hold all heads"
        self.shared, self.buffer = shared, buffer
        self.start = self.shared_tokens if start is None else start
        self.memory, self.shape, self.runs, self.room, self.origin = memory, shape, runs, room, origin
        self.appends, self.is_whole = appends, is_whole
        self.positions: list[torch.Tensor] | None = None
        # Per head: (head, rows of the prompt, keys, values). None if one run has all heads of the layer.
        self.lines: list[tuple[int, int, torch.Tensor, torch.Tensor]] | None = None
        if len(runs) != 1 or runs[0].heads < shape.num_kv_heads:
            self.lines = [
                (run.head + at, run.count, *rows)
                for run in runs
                for at, rows in enumerate(zip(run.keys.unbind(0), run.values.unbind(0), strict=True))
            ]

    @classmethod
    def by_heads(
        cls,
        memory: RowMemory,
        shape: LayerShape,
        counts: Sequence[int],
        room: int,
        origin: int,
        heads: Sequence[int] | None = None,
        *,
        appends: bool = True,
        is_whole: bool = False,
        shared: Sequence[Run] = (),
        start: int | None = None,
    ) -> HeadStore:
        """Make a store in which the rows of each head are contiguous, head after head.

        Parameters
        ----------
        memory : RowMemory
            From `arena.make_rows`, for these counts and room.
        counts : sequence of int
            Rows that each head holds.
        heads : sequence of int, optional
            Which heads of the layer are held, ascending; by default all.
        """
        room = room if appends else 0
        held = tuple(range(shape.num_kv_heads) if heads is None else heads)
        assert len(counts) == len(held), "one count for each head held"
        first = (shared[-1].stop if shared else 0) if start is None else start
        runs, at, row = list[Run](), 0, 0
        for _, group in itertools.groupby(range(len(held)), lambda i: (counts[i], held[i] - i)):
            many = len(list(group))
            capacity = capacity_of(counts[at] + room, memory.extent)
            stretch = slice(row, row + many * capacity)
            keys, values = (each[stretch].view(many, capacity, each.shape[1]) for each in (memory.keys, memory.values))
            runs.append(Run(held[at], first, counts[at], keys, values, memory.first + row))
            at, row = at + many, stretch.stop
        return cls(memory, shape, runs, room, origin, appends=appends, is_whole=is_whole, shared=shared, start=first)

    @classmethod
    def by_tokens(cls, buffer: torch.Tensor, shape: LayerShape, start: int = 0) -> HeadStore:
        """View a token-major buffer (capacity, elements of K and V of all heads) as an empty store.

        A range of tokens is contiguous: it is received in place, attended to as a view, and sent without packing.

        Parameters
        ----------
        start : int
            Position of the buffer's first row.
        """
        keys, values = _by_head(buffer, shape)
        run = Run(0, start, 0, keys, values)
        return cls(RowMemory(keys, values), shape, [run], len(buffer), start, is_whole=True, start=start, buffer=buffer)

    def laid_by_heads(self, length: int) -> HeadStore:
        """Reorder the buffer in place so that each head's tokens are contiguous: CPU attention is then twice as fast.

        Parameters
        ----------
        length : int
            Tokens of the document.
        """
        assert self.buffer is not None, "rows are by token"
        tokens, capacity, shape = length - self.start, len(self.buffer), self.shape
        old = [rows.clone(memory_format=torch.contiguous_format) for rows in _by_head(self.buffer[:tokens], shape)]
        memory = RowMemory.in_flat(self.buffer.view(-1), capacity * shape.num_kv_heads, shape)
        counts, room = [tokens] * shape.num_kv_heads, capacity - tokens
        store = HeadStore.by_heads(
            memory, shape, counts, room, length, is_whole=True, shared=self.shared, start=self.start
        )
        for place, rows in zip((store.runs[0].keys, store.runs[0].values), old, strict=True):
            place[:, :tokens] = rows
        return store

    @property
    def shared_tokens(self) -> int:
        """How many of the first tokens are shared."""
        return self.shared[-1].stop if self.shared else 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.memory.nbytes

    def count(self, run: Run, length: int) -> int:
        """Rows of each head of a run, without shared ones, for a document of `length` tokens."""
        return run.count + (length - self.origin if self.appends else 0)

    def counts(self, length: int) -> list[int]:
        """Rows of each held head, including shared rows."""
        return [self.shared_tokens + self.count(run, length) for run in self.runs for _ in range(run.heads)]

    def own_rows(self, at: int, length: int) -> Pair:
        """Keys and values of one held head, without shared rows, as views (rows, dim), for a document of `length`."""
        for run in self.runs:
            if at < run.heads:
                count = self.count(run, length)
                return run.keys[at, :count], run.values[at, :count]
            at -= run.heads
        raise IndexError(at)

    def head_rows(self, at: int, length: int) -> Pair:
        """Keys and values of one held head (rows, dim), for a document of `length` tokens.

        They are views unless rows are shared.
        """
        own = self.own_rows(at, length)
        if not self.shared:
            return own
        pieces = [*((each.keys[at], each.values[at]) for each in self.shared), own]
        return torch.cat([keys for keys, _ in pieces]), torch.cat([values for _, values in pieces])

    def pieces(self, first: int, last: int) -> list[Pair]:
        """Keys and values of a range of tokens that all heads hold, in order, as views (1, kv_heads, tokens, dim).

        Raises
        ------
        ModelError
            If heads hold different tokens, so that no range of tokens is complete.
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

    def as_shared(self, length: int) -> tuple[Run, ...]:
        """Return the rows that prompts continuing this document may share; on GPUs only whole pages."""
        (run,) = self.runs
        own, extent = length - self.start, self.memory.extent
        own = own if extent is None else own // PAGE_ROWS * PAGE_ROWS
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
            filled = self.shared_tokens + run.count - (self.origin if self.appends else 0)
            whole = np.concatenate(pages, axis=1).astype(np.int32)
            found.append((run.head, (own - self.shared_tokens).astype(np.int32), filled, whole))
        return found

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values (1, kv_heads, tokens, dim) of all heads, beginning at position `first`.

        Raises
        ------
        ValueError
            If they do not fit.
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
            rows, heads = self.count(run, first), slice(run.head, run.head + run.heads)
            run.keys[:, rows : rows + tokens] = keys[0, heads]
            run.values[:, rows : rows + tokens] = values[0, heads]

    def attend(self, query: torch.Tensor, length: int, params: AttentionParams, first: int = 0) -> PartialAttention:
        """Attend from the last tokens of a document to the rows that each head holds up to them.

        Parameters
        ----------
        query : Tensor
            (1, heads, tokens, head_dim).
        length : int
            Tokens of the document, including the queries'.
        first : int
            First position that the queries see, the same for all of them.

        Returns
        -------
        PartialAttention
            Of (1, heads, tokens, value_dim); heads without rows have a log-sum-exp of -inf.
        """
        shape, tokens = self.shape, query.shape[2]
        group = query.shape[1] // shape.num_kv_heads
        part: PartialAttention | None = None
        own_first = max(0, first - self.start)
        for run in self.runs:
            count, heads = self.count(run, length), slice(run.head * group, (run.head + run.heads) * group)
            keys, values = run.keys[None, :, own_first:count], run.values[None, :, own_first:count]
            found = (attend if tokens == 1 else attend_up_to)(query[:, heads], keys, values, params)
            if run.heads == shape.num_kv_heads:
                part = found
                break
            part = _nothing(query, shape.value_dim) if part is None else part
            part.out[:, heads], part.lse[:, heads] = found.out, found.lse
        if part is None:
            return _nothing(query, shape.value_dim)
        for rows in self.shared:
            if first < rows.stop:
                part = part.merge(attend(query, *rows.cut(max(first, rows.first), rows.stop), params))
        return part

    @property
    def heads(self) -> list[int]:
        """Indices of the held heads, ascending, among those that the model computes on this rank."""
        return [run.head + at for run in self.runs for at in range(run.heads)]


def _by_head(rows: torch.Tensor, shape: LayerShape) -> Pair:
    """Keys and values (kv_heads, tokens, dim) of token-major rows (tokens, elements), as views."""
    heads, cut = shape.num_kv_heads, shape.num_kv_heads * shape.key_dim
    keys, values = rows[:, :cut].view(-1, heads, shape.key_dim), rows[:, cut:].view(-1, heads, shape.value_dim)
    return keys.transpose(0, 1), values.transpose(0, 1)


def _nothing(query: torch.Tensor, value_dim: int) -> PartialAttention:
    return PartialAttention.of_nothing((*query.shape[:-1], value_dim), query.device)


def check_retained(retained: Sequence[torch.Tensor], shape: LayerShape, length: int, layer_idx: int) -> None:
    """Check the positions that the heads of a layer are to keep; synchronises with a GPU once.

    Raises
    ------
    ModelError
        If the layer has a window or chunks: it drops tokens by position.
    ValueError
        If a head keeps nothing, or positions are not ascending within the prompt.
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
        if positions.ndim != 1 or positions.dtype != torch.int64:
            raise ValueError(
                f"{about} {head}: expected positions (tokens,) int64, got {positions.dtype} {positions.shape}"
            )
        if not len(positions):
            raise ValueError(f"{about} {head} would keep nothing; expected at least one token")
    edge = torch.tensor([length], device=retained[0].device)
    ascends = [(torch.cat([one, edge]).diff() > 0).all() & (one[0] >= 0) for one in retained]
    for head, is_right in enumerate(torch.stack(ascends).tolist()):
        if not is_right:
            raise ValueError(f"{about} {head}: positions have to ascend from 0 to {length - 1}, each at most once")
