"""The keys and values of one sequence on one rank, where decoding reads them.

Keys already contain their rotary embedding, so rows need no order: after compression, heads may hold different tokens.
The longest possible answer is known before it is decoded. So each KV head of a layer gets rows for it, and decoding
appends to them without copying. Sequences that begin alike refer to one copy of their first rows (`SequenceKV.fork`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvr_mpi.errors import DataError, ModelError
from kvr_mpi.kv.pool import PAGE_ROWS, Block, Pool, pages_for
from kvr_mpi.kv.rolling import Rolling
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams

Pair = tuple[torch.Tensor, torch.Tensor]
# States of a layer: by kind and index.
States = dict[str, dict[int, torch.Tensor | None]]
# What is read of a stored layer: rows (tokens, elements of K and V of all heads); or after compression each KV head's
# keys and values (rows, dim); None if it has none.
StoredRows = torch.Tensor | Sequence[Pair] | None
# Layers of a stored sequence to read ahead.
READ_AHEAD = 3


@dataclass(slots=True, eq=False)
class RowSpan:
    """Rows of adjacent KV heads of a layer that hold the same number of rows.

    head : index of the first one, among the heads that the model computes on this rank.
    first : position of the first row, if rows are in the order of positions.
    filled : rows that each head holds; if it grows, that number minus the length of the sequence.
    grows : whether each new token of the sequence adds a row.
    views : keys and values (heads, capacity, dim), where the block was when it began at `row`.
    at : the first head's first row in the block; in a paged pool at the beginning of a page.
    """

    block: Block
    head: int
    first: int
    filled: int
    grows: bool
    views: Pair
    row: int
    at: int = 0

    @property
    def keys(self) -> torch.Tensor:
        """Keys (heads, capacity, dim)."""
        return self.pair[0]

    @property
    def values(self) -> torch.Tensor:
        """Values (heads, capacity, dim)."""
        return self.pair[1]

    @property
    def pair(self) -> Pair:
        """Keys and values, each (heads, capacity, dim)."""
        return self.views if self.row == self.block.row else self._follow()

    def _follow(self) -> Pair:
        """View the rows where the block is now."""
        moved = self.block.row - self.row
        keys, values = (
            torch.as_strided(each, each.shape, each.stride(), each.storage_offset() + moved * each.shape[2])
            for each in self.views
        )
        self.views, self.row = (keys, values), self.block.row
        return self.views

    @property
    def heads(self) -> slice:
        """The heads, among those of the layer."""
        return slice(self.head, self.head + len(self.views[0]))

    def rows(self, length: int) -> int:
        """Rows that each head holds of a sequence of `length` tokens."""
        return min(self.filled + length, self.views[0].shape[1]) if self.grows else self.filled

    def cut(self, first: int, last: int) -> Pair:
        """Keys and values of a range of positions, as views (1, heads, tokens, dim)."""
        rows = slice(first - self.first, last - self.first)
        return self.keys[None, :, rows], self.values[None, :, rows]


class SequenceKV:
    """The keys and values of a sequence on this rank, and its states.

    Whoever has a sequence releases it. Only `length` changes from token to token: rows beyond it are not read, so a
    step that failed needs no undoing.

    loaded : the model.
    pool : where its rows lie.
    shapes : of the layers, with the heads that this rank computes.
    rolling : keep only the last tokens, and the first few; None: all.
    length : tokens of the sequence on all ranks together.
    capacity : largest length.
    start, stop : bounds of the tokens that this rank keeps, if the sequence is sharded; `stop` without new tokens.
    is_last : whether this rank keeps new tokens.
    longest : of a sharded sequence, and of those that continue it: the largest length (`first_kept`).
    layers : for each layer its spans, for each head in order, the last of which may grow; None: not opened yet.
    ragged : layers whose heads keep different tokens.
    positions : of these, the positions in the prompt that each held head keeps, (tokens,) int32 on its device, if they
        are known.
    states : of recurrent layers.
    observed : the window's queries and the parameters of attention, by layer, if compression comes later.
    ids : its tokens, if prompts continue it.
    failure : why it cannot be continued: it could not be read or computed, on this or another rank.
    compression, source, read : of a stored sequence: how it was compressed, where it is stored, and what reads a layer.
        A thread calls `read`, also for the next layers; `open` raises its errors.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: Pool,
        capacity: int,
        *,
        shapes: Sequence[LayerShape] | None = None,
        rolling: Rolling | None = None,
        length: int = 0,
        start: int = 0,
        stop: int = 0,
        is_last: bool = True,
        longest: int | None = None,
        source: Hashable = None,
        read: Callable[[int], StoredRows] | None = None,
        ids: Sequence[int] = (),
        compression: str = "",
    ) -> None:
        self.loaded, self.shapes = loaded, loaded.shape.layers if shapes is None else shapes
        self.pool, self.capacity, self.length, self.rolling = pool, capacity, length, rolling
        self.start, self.stop, self.is_last, self.longest = start, stop, is_last, longest
        self.layers: list[list[RowSpan] | None] = [None] * len(self.shapes)
        self.ragged: set[int] = set()
        self.positions: dict[int, list[torch.Tensor]] = {}
        self.states: dict[int, States] = {}
        self.observed: dict[int, tuple[torch.Tensor, AttentionParams]] = {}
        self.ids, self.compression, self.source = tuple(ids), compression, source
        self.failure: str | None = None
        self._read, self._parent_tokens, self._shares, self._origin = read, 0, True, 0
        self._parent: SequenceKV | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[StoredRows]] = {}

    # What it holds

    @property
    def blocks(self) -> Iterator[Block]:
        """Blocks that it holds, one for each span."""
        return (span.block for spans in self.layers for span in spans or ())

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that it holds, including shared ones."""
        return bytes_of([self])

    @property
    def is_stored(self) -> bool:
        """Whether its rows are read from a file."""
        return self.source is not None

    def first_kept(self, layer_idx: int) -> int:
        """Position of the first token of a layer that this rank keeps.

        If a window or chunk ends before the sequence does, the rank with the last tokens has all that are visible.
        """
        if not self.is_last or self.attends_everywhere(layer_idx):
            return self.start
        return min(self.start, self.shapes[layer_idx].visibility.first_key(self.stop))

    def first_new(self, layer_idx: int) -> int:
        """Position of the first token of a layer that is not shared with the sequence that this one continues."""
        return self.first_kept(layer_idx) if self._parent is None else self._parent_tokens

    def attends_everywhere(self, layer_idx: int) -> bool:
        """Whether every rank attends to its own tokens in a layer; otherwise only the rank with the last tokens."""
        return self.longest is None or self.shapes[layer_idx].visibility.sees_all(self.longest)

    def attends(self, layer_idx: int) -> bool:
        """Whether this rank attends to its tokens in a layer."""
        return self.is_last or self.attends_everywhere(layer_idx)

    def counts(self, layer_idx: int) -> list[int]:
        """Rows of each held head."""
        found: dict[int, int] = {}
        for span in self.layers[layer_idx] or ():
            for head in range(span.head, span.heads.stop):
                found[head] = found.get(head, 0) + span.rows(self.length)
        return [found[head] for head in sorted(found)]

    def kept_positions(self, layer_idx: int) -> list[torch.Tensor]:
        """Positions that each KV head of a ragged layer holds, (tokens,) int32 on the host."""
        kept = self.positions[layer_idx]
        decoded = torch.arange(self._origin, self.length, dtype=torch.int32)
        return [torch.cat([each.cpu(), decoded]) for each in kept]

    # Memory

    def open(self, layer_idx: int, first: int = 0) -> list[RowSpan]:
        """Return a layer's spans; if it was not opened before, share, read or allocate its rows.

        first : position before which no token is needed any more, if it is after those of the sequence continued.

        Raises `DataError` if a stored layer cannot be read; `MemoryError` or `torch.OutOfMemoryError`.
        """
        spans = self.layers[layer_idx]
        if spans is not None:
            return spans
        shape = self.shapes[layer_idx]
        if not shape.elements:
            spans = []
        elif self._parent is not None and first <= self._parent_tokens:
            spans = self._fork_layer(layer_idx, self._parent)
        elif self._read is not None:
            spans = self._load(layer_idx)
        elif self.rolling is not None:
            spans = self._reserve_rolling(shape, self.rolling)
        else:
            first = max(first, self.first_kept(layer_idx))
            room = (self.capacity if self.is_last else self.stop) - first
            spans = self._reserve([0] * shape.num_kv_heads, shape, room, first)
        self.layers[layer_idx] = spans
        return spans

    def reserve(self, layer_idx: int, counts: Sequence[int], heads: Sequence[int] | None = None) -> list[RowSpan]:
        """Allocate uninitialized rows of heads that keep different tokens, and room for new tokens if it keeps them.

        counts : rows of each head, apart from new tokens.
        heads : which heads of the layer these are, ascending; by default all.
        """
        shape, room = self.shapes[layer_idx], self.capacity - self.length if self.is_last else 0
        spans = self._reserve(counts, shape, room, self.length, heads)
        self.layers[layer_idx] = spans
        self.ragged.add(layer_idx)
        self._origin = self.length
        return spans

    def _reserve(
        self, counts: Sequence[int], shape: LayerShape, room: int, first: int, heads: Sequence[int] | None = None
    ) -> list[RowSpan]:
        """Allocate rows of heads, which are adjacent to each other; adjacent heads with the same count are one span.

        counts : rows before position `first`.
        room : rows from there on.
        """
        held = range(shape.num_kv_heads) if heads is None else heads
        assert len(counts) == len(held), "one count for each head held"
        capacities = [count + room for count in counts]
        if self.pool.is_paged:
            capacities = [PAGE_ROWS * pages_for(capacity) for capacity in capacities]
        if not (total := sum(capacities)):
            return []
        block, spans, at, row = self.pool.allocate((shape.key_dim, shape.value_dim), total), list[RowSpan](), 0, 0
        for _, group in itertools.groupby(range(len(held)), lambda i: (counts[i], held[i] - i)):
            many, capacity = len(list(group)), capacities[at]
            stop = row + many * capacity
            if capacity:
                views = (each[row:stop].view(many, capacity, each.shape[1]) for each in (block.keys, block.values))
                filled = counts[at] - first if self.is_last else counts[at]
                begin = first - counts[at]
                keys, values = views
                spans.append(RowSpan(block, held[at], begin, filled, self.is_last, (keys, values), block.row, row))
            at, row = at + many, stop
        for _ in spans[1:]:
            block.hold()
        return spans

    def _reserve_rolling(self, shape: LayerShape, rolling: Rolling) -> list[RowSpan]:
        """Allocate rows for the sinks, if there are any, and for the last tokens of a rolling cache."""
        (span,) = self._reserve([0] * shape.num_kv_heads, shape, rolling.rows, 0)
        if not (sinks := rolling.sinks_of(shape.visibility)):
            return [span]
        keys, values, block = span.keys, span.values, span.block.hold()
        first = RowSpan(block, 0, 0, 0, True, (keys[:, :sinks], values[:, :sinks]), block.row)
        rest = RowSpan(block, 0, sinks, -sinks, True, (keys[:, sinks:], values[:, sinks:]), block.row, sinks)
        return [first, rest]

    def make_room(self, layer_idx: int, tokens: int) -> None:
        """Drop what the next token does not see of a rolling cache, if there is no room for some new tokens.

        Raises `ModelError` if these are too many for a step.
        """
        assert self.rolling is not None, "others have room for all tokens"
        if tokens > self.rolling.step_tokens:
            raise ModelError(f"layer {layer_idx}: {tokens} tokens in a step of {self.rolling.step_tokens}")
        last = self.open(layer_idx)[-1]
        held, dropped = last.filled + self.length, self._first_seen(layer_idx, self.length) - last.first
        if held + tokens > last.keys.shape[1] and dropped > 0:
            for rows in (last.keys, last.values):
                rows[:, : held - dropped] = rows[:, dropped:held].clone()
            last.first += dropped
            last.filled -= dropped

    def _first_seen(self, layer_idx: int, position: int) -> int:
        """Position of the first token after the sinks that a token of a rolling cache sees."""
        assert self.rolling is not None
        visibility = self.shapes[layer_idx].visibility
        sinks = self.rolling.sinks_of(visibility)
        return sinks + self.rolling.seen(visibility).first_key(max(0, position - sinks))

    def _read_layer(self, layer_idx: int) -> StoredRows:
        """Return the rows of a stored layer, and begin to read the next ones."""
        device, read = self.pool.device, self._read
        assert read is not None, "it is stored"
        if self._reader is None:  # a thread would use GPU 0, and create a context there
            begin = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
            self._reader = ThreadPoolExecutor(1, "kvr-loading", *begin)
        read = partial(_read_locked, read) if device.type == "cuda" else read
        for each in range(layer_idx, min(layer_idx + 1 + READ_AHEAD, len(self.shapes))):
            if self.layers[each] is None and self.shapes[each].elements and each not in self._ahead:
                self._ahead[each] = self._reader.submit(read, each)
        return self._ahead.pop(layer_idx).result()

    def _load(self, layer_idx: int) -> list[RowSpan]:
        """Read a stored layer, which gets no room for new tokens."""
        shape, first, rows = self.shapes[layer_idx], self.first_kept(layer_idx), self._read_layer(layer_idx)
        if rows is None or (isinstance(rows, torch.Tensor) and len(rows) != self.stop - first):
            found = 0 if rows is None else len(rows)
            raise DataError(f"layer {layer_idx} has keys and values of {found} tokens, expected {self.stop - first}")
        if isinstance(rows, torch.Tensor):
            (span,) = self._reserve([0] * shape.num_kv_heads, shape, len(rows), first)
            moved = rows.to(self.pool.device, non_blocking=True)
            for to, rows_of in zip((span.keys, span.values), by_head(moved, shape), strict=True):
                to[:, : len(rows)] = rows_of
            span.filled, span.grows = len(rows), False
            return [span]
        if shape.visibility.size is None:
            self.ragged.add(layer_idx)
        spans = self._reserve([len(keys) for keys, _ in rows], shape, 0, self.stop)
        for span in spans:
            count = span.rows(self.stop)
            span.filled, span.grows = count, False
            for head, pair in zip(range(len(span.keys)), rows[span.heads], strict=True):
                for to, some in zip((span.keys, span.values), pair, strict=True):
                    to[head, :count].copy_(some)
        return spans

    def _fork_layer(self, layer_idx: int, parent: SequenceKV) -> list[RowSpan]:
        """Refer to a layer's rows of the sequence that this one continues; on GPUs only whole pages are shared."""
        shape, tokens, shared = self.shapes[layer_idx], self._parent_tokens, list[RowSpan]()
        counts, copied = [0] * shape.num_kv_heads, list[tuple[RowSpan, int, int]]()  # rows of a span that are copied
        for span in parent.open(layer_idx):
            rows = common = span.rows(tokens)
            if not self._shares:
                common = 0
            elif self.pool.is_paged:
                common = rows // PAGE_ROWS * PAGE_ROWS
            if common:
                shared.append(replace(span, filled=common, grows=False))
            copied.append((span, common, rows))
            for head in range(span.head, span.heads.stop):
                counts[head] += rows - common
        stop = self.capacity if self.is_last else max(tokens, self.stop)
        own, filled = self._reserve(counts, shape, stop - tokens, tokens), [0] * shape.num_kv_heads
        for span, common, rows in copied if any(counts) else ():
            for head in range(span.head, span.heads.stop):
                at, filled[head] = filled[head], filled[head] + rows - common
                for mine in own:
                    if mine.head <= head < mine.heads.stop:
                        for to, each in zip(mine.views, (span.keys, span.values), strict=True):
                            to[head - mine.head, at : filled[head]] = each[head - span.head, common:rows]
        for span in shared:
            span.block.hold()
        if layer_idx in parent.ragged:
            self.ragged.add(layer_idx)
        return [*shared, *own]

    def lends_rows(self, capacity: int) -> bool:
        """Whether sequences of this capacity that continue this one share its rows; otherwise they copy them.

        A model's own attention copies shared rows in every step, so few of them are not worth sharing.
        """
        return self.loaded.attends_in_parts or 2 * self.length > capacity

    def fork(self, capacity: int, pool: Pool | None = None) -> SequenceKV:
        """Make a sequence that continues this one, and shares its rows; this one must not change while it is opened.

        capacity : of the new sequence.
        pool : of the new sequence; in another pool than this one's, rows are copied.
        """
        if capacity < self.length or (self.longest is not None and capacity > self.longest):
            raise ValueError(f"a sequence of {capacity} tokens after {self.length}; at most {self.longest}")
        found = SequenceKV(
            self.loaded,
            pool or self.pool,
            capacity,
            shapes=self.shapes,
            length=self.length,
            start=self.start,
            stop=self.stop,
            is_last=self.is_last,
            longest=self.longest,
            compression=self.compression,
        )
        found._parent, found._parent_tokens = self, self.length
        found._shares = found.pool is self.pool and self.lends_rows(capacity)
        found.states = copy_states(self.states)
        return found

    def close(self, layer_idx: int) -> None:
        """Give up the rows of one layer; those of a stored sequence are read again when they are needed."""
        for span in self.layers[layer_idx] or ():
            span.block.release()
        self.layers[layer_idx] = None

    def release(self) -> None:
        """Give up all rows and states. It can be called again."""
        for layer_idx in range(len(self.layers)):
            self.close(layer_idx)
        for future in self._ahead.values():
            future.cancel()
        self.states, self.positions, self.observed, self._ahead = {}, {}, {}, {}
        self._parent = self._read = self._reader = None

    # Rows

    def admit(
        self,
        layer_idx: int,
        first: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Take a layer's keys and values (1, kv_heads, tokens, dim), from position `first` on; not rows of its pool.

        kept : positions that each head keeps of the sequence, (tokens,) int64, ascending; `first` is then 0. None: all
            of them.
        """
        if kept is None:
            (*_, span), tokens = self.open(layer_idx, first), keys.shape[2]
            rows = slice(first - span.first, first - span.first + tokens)
            span.keys[:, rows], span.values[:, rows] = keys[0], values[0]
            if not span.grows:
                span.filled = rows.stop
            return
        assert not first, "heads choose among all tokens"
        before = self.layers[layer_idx] or []
        spans = self.reserve(layer_idx, list(map(len, kept)))
        for span in spans:
            for head in range(len(span.keys)):
                positions = kept[span.head + head].to(keys.device)
                for to, whole in zip((span.keys, span.values), (keys, values), strict=True):
                    torch.index_select(whole[0, span.head + head], 0, positions, out=to[head, : len(positions)])
        self.positions[layer_idx] = [positions.to(torch.int32) for positions in kept]
        for span in before:
            span.block.release()

    def write(self, layer_idx: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values (1, kv_heads, tokens, dim) of all heads, beginning at position `first`.

        Raises `ValueError` if they do not fit.
        """
        tokens = keys.shape[2]
        if first + tokens > self.capacity:
            raise ValueError(f"tokens {first} to {first + tokens} do not fit: there is room for {self.capacity}")
        for span in self.open(layer_idx):
            if span.grows:
                row = span.filled + first
                some, skipped = slice(max(row, 0), max(row + tokens, 0)), max(-row, 0)  # before it: sinks
                places = span.keys[:, some], span.values[:, some]
                rows = slice(skipped, skipped + places[0].shape[1])
                for to, each in zip(places, (keys, values), strict=True):
                    to[:] = each[0, span.heads, rows]

    def pieces(self, layer_idx: int, first: int, last: int) -> list[Pair]:
        """Keys and values of a range of tokens that all heads hold, in order, as views (1, kv_heads, tokens, dim).

        Raises `ModelError` if heads hold different tokens, so that no range of tokens is complete.
        """
        if layer_idx in self.ragged:
            raise ModelError("its heads keep different tokens, so a range of tokens does not exist")
        found, spans = list[Pair](), self.open(layer_idx)
        for span, after in itertools.zip_longest(spans, spans[1:]):
            stop = last if span.grows or after is None else min(last, span.first + span.filled)
            if max(first, span.first) < stop:
                found.append(span.cut(max(first, span.first), stop))
        return found

    def rows(self, layer_idx: int, first: int, last: int) -> Pair:
        """Keys and values of a range of tokens that all heads hold (1, kv_heads, tokens, dim); views if possible."""
        return join_pieces(self.pieces(layer_idx, first, last))

    def head_pieces(self, layer_idx: int, head: int) -> list[Pair]:
        """Keys and values of one held head, as views (rows, dim)."""
        found = []
        for span in self.layers[layer_idx] or ():
            if span.head <= head < span.heads.stop:
                rows = slice(span.rows(self.length))
                found.append((span.keys[head - span.head, rows], span.values[head - span.head, rows]))
        return found

    def first_whole(self, layer_idx: int) -> int:
        """Position from which on all tokens of a layer are held without a gap."""
        first = self.length if self.is_last else self.stop
        for span in reversed(self.layers[layer_idx] or []):
            if span.first + span.rows(self.length) != first:
                break
            first = span.first
        return first

    def truncate(self, length: int) -> None:
        """Drop the tokens after the first `length`.

        Raises `ModelError` if a rolling cache has dropped some that the next token would see.
        """
        for layer_idx, spans in enumerate(self.layers if self.rolling is not None else ()):
            if spans and spans[-1].first > (needed := self._first_seen(layer_idx, length)):
                raise ModelError(
                    f"layer {layer_idx}: tokens from {needed} on are needed, but only those from {spans[-1].first} on "
                    f"are held"
                )
        self.length = length

    def check(self, ids: Sequence[int]) -> None:
        """Check that a prompt begins with this sequence and continues after it.

        Raises `ValueError` if it does not, since the answer would belong to another prompt.
        """
        if len(ids) <= self.length or tuple(ids[: self.length]) != self.ids:
            raise ValueError(
                f"a prompt of {len(ids)} tokens does not begin with the shared prefix of {self.length} tokens, or "
                "ends with it"
            )


def _read_locked(read: Callable[[int], StoredRows], layer_idx: int) -> StoredRows:
    """Read a layer into page-locked memory, from which copies to a GPU do not wait for all queued work."""
    rows = read(layer_idx)
    if rows is None or isinstance(rows, torch.Tensor):
        return None if rows is None else rows.pin_memory()
    return [(keys.pin_memory(), values.pin_memory()) for keys, values in rows]


def join_pieces(pieces: Sequence[Pair]) -> Pair:
    """Concatenate keys and values (1, kv_heads, tokens, dim); views if there is one piece."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([keys for keys, _ in pieces], 2), torch.cat([values for _, values in pieces], 2)


def copy_states(states: Mapping[int, States]) -> dict[int, States]:
    """Copy the states of layers."""
    return {
        layer_idx: {
            kind: {at: None if each is None else each.clone() for at, each in of_kind.items()}
            for kind, of_kind in layer.items()
        }
        for layer_idx, layer in states.items()
    }


def bytes_of(sequences: Sequence[SequenceKV]) -> int:
    """Bytes that sequences hold; shared memory counts once."""
    return sum({block: block.nbytes for sequence in sequences for block in sequence.blocks}.values())


def by_head(rows: torch.Tensor, shape: LayerShape) -> Pair:
    """View token-major rows (tokens, elements of K and V of all heads) as keys and values (kv_heads, tokens, dim)."""
    heads, cut = shape.num_kv_heads, shape.num_kv_heads * shape.key_dim
    keys, values = rows[:, :cut].view(-1, heads, shape.key_dim), rows[:, cut:].view(-1, heads, shape.value_dim)
    return keys.transpose(0, 1), values.transpose(0, 1)


def bytes_to_read(sequence: SequenceKV) -> int:
    """Bytes of the rows that this rank keeps of a stored sequence, whether they have been read or not."""
    layers = enumerate(sequence.shapes)
    elements = sum((sequence.stop - sequence.first_kept(idx)) * layer.elements for idx, layer in layers)
    return elements * sequence.pool.dtype.itemsize


def check_retained(kept: Sequence[torch.Tensor], shape: LayerShape, layer_idx: int) -> None:
    """Check the positions that the heads of a layer are to keep, without their values: the host would wait for a GPU.

    Raises `ModelError` if the layer has a window or chunks: it drops tokens by position; `ValueError` if a head keeps
    nothing.
    """
    if shape.visibility.size is not None:
        raise ModelError(
            f"layer {layer_idx} sees {shape.visibility}: its heads cannot keep tokens of their own; expected None for "
            f"this layer, which then keeps all it has"
        )
    if len(kept) != shape.num_kv_heads:
        raise ValueError(f"layer {layer_idx} has {shape.num_kv_heads} KV heads, and {len(kept)} are to keep tokens")
    about = f"layer {layer_idx}, KV head"
    for head, positions in enumerate(kept):
        assert positions.ndim == 1 and positions.dtype == torch.int64, f"{about} {head}: positions are integers"
        if not len(positions):
            raise ValueError(f"{about} {head} would keep nothing; expected at least one token")
