"""The cache that a model sees for new tokens of some sequences: a row of tokens (1, tokens) in one forward pass.

Decoding is one new token of each sequence, a packed prefill many tokens of many sequences; questions about a stored
document are tokens after shared ones. Each layer writes new keys and values where decoding reads them (``sequence``)
and attends. A step, one token of each sequence or a few, attends with one call for all of them where a kernel supports
it.

The slice of a prompt on a chain of ranks is the other cache (``chain``).
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.attention import PartialAttention, attend, attend_range, takes_flash
from kvr_mpi.kv.layer import RowCache, RowLayer
from kvr_mpi.kv.pool import Block
from kvr_mpi.kv.sequence import RowSpan, SequenceKV
from kvr_mpi.kv.states import StateLayer
from kvr_mpi.kv.table import PageTable
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.layer_chunks import UnreadError
from kvr_mpi.model.masks import Visibility
from kvr_mpi.model.unit_table import Integers, Unit, UnitTable

Reads = Literal["all", "last", "nothing"]
Merge = Callable[[PartialAttention], PartialAttention]
# A span, and from which to which sequence of a row it is common.
Run = tuple[RowSpan, int, int]
# Common rows from which on several sequences attend to them together, instead of each for itself.
COMMON_ROWS = 512


class Row(RowCache):
    """New tokens of some sequences.

    A model with its own attention, or with states, runs rows of one sequence only. A row of the same sequences can run
    again and again: call `begin` before the model, and `advance` after it.

    sequences : with room for their new tokens.
    tokens : number of new tokens of each.
    merge : merges this rank's attention with that of other ranks, which keep other tokens or heads.
    table : of paged sequences; only for a step that is recorded: the only table that is read.
    reads : which tokens' output is used: of all of them, of each sequence's last one, or of none.
    bounds : range of each sequence's tokens in the row.
    lengths : of the sequences before the row.
    before : for each token of the row, the tokens of its sequence before it.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceKV],
        tokens: Sequence[int] | None = None,
        *,
        merge: Merge | None = None,
        table: PageTable | None = None,
        reads: Reads = "all",
    ) -> None:
        self.sequences, self.merge, self._reads = list(sequences), merge, reads
        self.take([1] * len(self.sequences) if tokens is None else tokens)
        loaded = sequences[0].loaded
        self.in_parts = loaded.attends_in_parts
        self.is_step = self.in_parts and max(self.tokens) == 1
        first = self.sequences[0]
        self.device, self.dtype, self._is_rolling = loaded.device, loaded.dtype, first.rolling is not None
        assert len(self.sequences) == 1 or self.in_parts, "the model's own attention attends to one sequence"
        self._is_recorded, self._table, self.is_paged = table is not None, table, first.pool.is_paged
        assert not (self.is_paged and self._is_rolling), "rolling caches move their rows, which tables do not follow"
        self._units: dict[int, UnitTable] = {}
        self._runs: dict[int, list[Run]] = {}
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None  # keys and values that are not written yet
        kept = [idx for idx, shape in enumerate(first.shapes) if shape.elements]
        self._last_layer = kept[-1] if kept else -1
        super().__init__(
            [
                StateLayer(self, idx, shape) if shape.states else RowLayer(self, idx, shape)
                for idx, shape in enumerate(first.shapes)
            ]
        )
        self.begin()

    def take(self, tokens: Sequence[int]) -> None:
        """Change the number of new tokens of each sequence, from the next `begin` on."""
        self.tokens, self._table = list(tokens), None
        self.bounds = list(itertools.pairwise(itertools.accumulate(self.tokens, initial=0)))
        self._numbers = np.repeat(np.arange(len(self.tokens)), self.tokens)
        self._bounds = np.array([0, *(last for _, last in self.bounds)])
        self.__dict__.pop("_edges", None)

    def begin(self) -> Sequence[int]:
        """Read the sequences' current lengths, and return for each token the tokens of its sequence before it.

        Raises `ValueError` if one has no room for its new tokens.
        """
        self.current, self._new = None, None
        self.lengths = [sequence.length for sequence in self.sequences]
        pairs = zip(self.lengths, self.tokens, strict=True)
        self.before = [length + at for length, tokens in pairs for at in range(tokens)]
        self._whole, self._firsts = np.array(self.before) + 1, dict[Visibility, Integers]()
        # All that its tokens see is in the row.
        self._begins = self.merge is None and not self._is_rolling and not any(self.lengths)
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.set_states(self.sequences[0].states[layer.layer_idx])
        for sequence, tokens in zip(self.sequences, self.tokens, strict=True):
            if sequence.length + tokens > sequence.capacity:
                raise ValueError(f"a cache of {sequence.length} tokens is full; reserve room for the tokens to be run")
        return self.before

    def advance(self) -> None:
        """Count the new tokens, after the model has run."""
        for sequence, length, tokens in zip(self.sequences, self.lengths, self.tokens, strict=True):
            sequence.length = length + tokens

    @property
    def length(self) -> int:
        """Tokens before the row; 0 for several sequences, since models then get explicit positions."""
        return self.lengths[0] if len(self.lengths) == 1 else 0

    @property
    def prefilling(self) -> bool:
        """Whether some sequence has several new tokens, and this is no step."""
        return max(self.tokens) > 1 and not self.is_step

    @property
    def needs_positions(self) -> bool:
        """Whether the model cannot count the positions of the new tokens from `length`."""
        return len(self.sequences) > 1 or self._is_recorded

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """For each sequence, or each token of a step, the tokens and the length with them; 1 for empty slots."""
        rows = [(count, length + count) for count, length in zip(self.tokens, self.lengths, strict=True)]
        if self.is_step:  # each token as in a step of its own
            rows = [(1, before + 1) for before in self.before]
        return rows + [(1, 1)] * (tokens - self.bounds[-1][1])

    @property
    def slots(self) -> list[SequenceKV]:
        """The sequence of each token of a step."""
        return [self.sequences[number] for number in self._numbers]

    @functools.cached_property
    def table_sizes(self) -> tuple[int, bool]:
        """Pages of a unit that a table of these sequences needs, and whether all units have rows."""
        return PageTable.sizes_for(self.sequences)

    @functools.cached_property
    def _edges(self) -> torch.Tensor:
        return torch.tensor(self._bounds, dtype=torch.int32, device=self.device)

    def begin_on_device(self, before: torch.Tensor) -> None:
        """Continue `begin`, given `before` (tokens,), int64 on the device."""
        if not (self.is_step and self.is_paged):
            return
        if self._table is None:
            width, is_complete = self.table_sizes
            self._table = PageTable(self.sequences[0], len(self._numbers), width, is_complete=is_complete)
        if self._table.moves != self._table.pool.moves and not self._is_recorded:
            self._table.fill(self.slots)
        self._table.advance(before)

    def append(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = layer.layer_idx
        if self.is_step and self.is_paged:
            assert self._table is not None, "the step has begun"
            self._table.write(at, keys, values)
        else:
            self._new = keys, values
            if not self.is_step:
                self._write(at)
        if self.in_parts:
            return keys, values
        self.current = None
        return self.sequences[0].rows(at, 0, self.lengths[0] + self.tokens[0])

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from each sequence's tokens to those up to them.

        Raises `ModelError` if a step is recorded, and the layer cannot use paged attention; `UnreadError` in the last
        layer if nothing of its output is used.
        """
        if self._reads == "nothing" and layer.layer_idx == self._last_layer:
            self._write(layer.layer_idx)
            raise UnreadError
        shape, dim, seen = query.shape, layer.shape.out_dim, layer.shape.visibility
        if self.bounds[-1][1] == 1:  # heads may come folded into the query length
            query = query.reshape(1, -1, 1, shape[-1])
        part: PartialAttention | None = None
        if self.is_step:
            if self.is_paged and seen.chunk is None and takes_flash(query, query.new_empty(0, dim), params):
                assert self._table is not None, "the step has begun"
                part = self._table.attend(layer.layer_idx, query, params, seen.window)
            elif self._is_recorded:
                raise ModelError(f"layer {layer.layer_idx} does not attend by pages, but sequence by sequence")
            else:
                part = self._attend_units(layer, query, params)
                self._write(layer.layer_idx)
        elif query.shape[2] != self.bounds[-1][1]:
            raise ModelError(f"layer {layer.layer_idx}: {query.shape[2]} queries for {self.bounds[-1][1]} tokens")
        elif self._begins and seen.chunk is None and takes_flash(query, values, params):
            part = self._attend_packed(query, keys, values, params, seen.window)
        if part is None:
            part = self._attend_apart(layer, query, keys, values, params)
        if self.merge is not None:
            part = self.merge(part)
        return part.finish(params).to(query.dtype).reshape(*shape[:-1], dim)

    def _write(self, at: int) -> None:
        """Write new tokens sequence by sequence, unless that is done."""
        if self._new is None:
            return
        (keys, values), self._new = self._new, None
        for sequence, length, (first, last) in zip(self.sequences, self.lengths, self.bounds, strict=True):
            sequence.open(at)
            if sequence.rolling is not None:
                sequence.make_room(at, last - first)
            sequence.write(at, length, keys[:, :, first:last], values[:, :, first:last])

    def _attend_units(self, layer: RowLayer, query: torch.Tensor, params: AttentionParams) -> PartialAttention | None:
        """Write the new tokens of a step and attend with our kernel; None if it does not support the layer."""
        at, seen, kernel = layer.layer_idx, layer.shape.visibility, params.kernel
        if kernel is None or not params.is_plain or self.is_paged or self._is_rolling:
            return None
        table = self._units.get(at)
        if table is None:
            units = [
                Unit(begin, head, keys, values, span.filled, span.grows, span.first, end - begin)
                for span, begin, end in self._spans(at)
                for head, keys, values in zip(range(span.head, span.heads.stop), *span.pair, strict=True)
            ]
            table = self._units[at] = UnitTable(len(self.sequences), layer.shape.num_kv_heads, units)
        if not kernel.takes_units(query, table):
            return None
        if self._new is not None and not kernel.library.takes_new(*self._new, table):
            self._write(at)
        firsts = None
        if seen.size is not None and (firsts := self._firsts.get(seen)) is None:
            firsts = self._firsts[seen] = np.array([seen.first_key(before) for before in self.before])
        of_step = self._whole, params.scale, firsts, self._bounds, self._new
        (out, lse), self._new = kernel.library.attend_units(query, table, *of_step), None
        return PartialAttention(out.transpose(0, 1).unsqueeze(0), lse.transpose(0, 1).unsqueeze(0))

    def _spans(self, at: int) -> list[Run]:
        """Spans of a layer that this rank attends to, each for the adjacent sequences that continue it."""
        if at not in self._runs:
            found, latest = list[Run](), dict[tuple[Block, int, int], int]()
            for number, sequence in enumerate(self.sequences):
                for span in sequence.open(at) if sequence.attends(at) else ():
                    rows = span.block, span.at, -1 - number if span.grows else span.filled
                    run = latest.get(rows)
                    if run is not None and found[run][2] == number:
                        found[run] = found[run][0], found[run][1], number + 1
                    else:
                        latest[rows] = len(found)
                        found.append((span, number, number + 1))
            self._runs[at] = found
        return self._runs[at]

    def _attend_packed(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, window: int | None
    ) -> PartialAttention:
        """Attend within sequences that begin with the row, with one call for all of them, on a GPU."""
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        out, lse = varlen_attn(
            query[0].transpose(0, 1),
            keys[0].transpose(0, 1),
            values[0].transpose(0, 1),
            self._edges,
            self._edges,
            max(self.tokens),
            max(self.tokens),
            return_aux=AuxRequest(lse=True),
            scale=params.scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
        )
        # The log-sum-exp is (heads, queries); varlen_attn's own documentation is wrong.
        return PartialAttention(out.transpose(0, 1).unsqueeze(0), lse.view(1, *query.shape[1:3]).float())

    def _attend_apart(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> PartialAttention:
        """Attend sequence by sequence, but to rows that adjacent ones have in common only once."""
        parts, shared = list[PartialAttention](), defaultdict[int, list[tuple[RowSpan, PartialAttention]]](list)
        for span, begin, end in self._spans(layer.layer_idx) if layer.shape.visibility.size is None else ():
            if end - begin > 1 and span.filled * len(span.keys) >= COMMON_ROWS:
                start, stop = self.bounds[begin][0], self.bounds[end - 1][1]
                of_all = attend_spans(query[:, :, start:stop], [span], 0, params, layer.shape)
                assert of_all is not None, "it has rows"
                for number in range(begin, end):
                    first, last = self.bounds[number]
                    shared[number].append((span, of_all.cut(first - start, last - start)))
        for number, (first, last) in enumerate(self.bounds):
            some = query[:, :, first:last], keys[:, :, first:last], values[:, :, first:last]
            part = self._attend_own(layer, number, *some, params, [span for span, _ in shared[number]])
            for _, before in shared[number]:
                part = before if part is None else part.merge(before)
            if part is None:
                sizes = (1, query.shape[1], last - first, layer.shape.out_dim)
                part = PartialAttention.of_nothing(sizes, self.device)
            parts.append(part)
        return PartialAttention.join(parts)

    def _attend_own(
        self,
        layer: RowLayer,
        number: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
        skipped: Sequence[RowSpan],
    ) -> PartialAttention | None:
        """Attend from the new tokens of one sequence, except to some spans; None if this rank has nothing they see."""
        at, shape, seen, sequence = layer.layer_idx, layer.shape, layer.shape.visibility, self.sequences[number]
        others = {(span.block, span.at) for span in skipped}
        spans = [span for span in sequence.open(at) if (span.block, span.at) not in others]
        if not sequence.attends(at):
            return None
        if sequence.rolling is not None:
            return self._attend_rolling(layer, number, query, params)
        length, tokens = self.lengths[number], self.tokens[number]
        reads_last = self._reads == "last" and self.merge is None and at == self._last_layer
        whole, unread = length + tokens, tokens - 1 if reads_last else 0
        if tokens - unread == 1:  # all that the last token sees are rows by now
            first = seen.first_key(whole - 1)
            part = attend_spans(query[:, :, unread:], spans, whole, params, shape, first)
            return part if part is None or not unread else part.pad(unread)
        if not seen.sees_all(whole):
            return attend_range(query, (length, whole), lambda *bounds: sequence.rows(at, *bounds), seen, params)
        part = attend_spans(query, spans, length, params, shape)
        if not sequence.is_last:
            return part
        own = attend(query, keys, values, params, causal=True)
        return own if part is None else own.merge(part)

    def _attend_rolling(
        self, layer: RowLayer, number: int, query: torch.Tensor, params: AttentionParams
    ) -> PartialAttention:
        """Attend from the new tokens of a sequence to its first and last tokens."""
        sequence, seen = self.sequences[number], layer.shape.visibility
        (*first_spans, last), length = sequence.open(layer.layer_idx), self.lengths[number]
        assert sequence.rolling is not None
        sinks, seen = sequence.rolling.sinks_of(seen), sequence.rolling.seen(seen)
        whole, parts = length + self.tokens[number], list[PartialAttention]()
        among = max(0, min(whole, sinks) - length)  # new tokens that are sinks
        if among:
            parts.append(attend(query[:, :, :among], *first_spans[0].cut(0, length + among), params, causal=True))
        if length + among < whole:
            some, bounds = query[:, :, among:], (length + among - sinks, whole - sinks)
            part = attend_range(some, bounds, lambda first, stop: last.cut(first + sinks, stop + sinks), seen, params)
            parts.append(part.merge(attend(some, *first_spans[0].cut(0, sinks), params)) if sinks else part)
        return PartialAttention.join(parts)


def attend_spans(
    query: torch.Tensor,
    spans: Sequence[RowSpan],
    length: int,
    params: AttentionParams,
    shape: LayerShape,
    first: int = 0,
) -> PartialAttention | None:
    """Attend to all rows of a layer from some position on, which every query sees; None if there are none.

    query : (1, heads, tokens, head_dim).
    length : of the sequence, which determines how many rows growing spans have.
    """
    group, part = query.shape[1] // max(1, shape.num_kv_heads), None
    for span in spans:
        stop = span.rows(length)
        start = min(max(0, first - span.first), stop) if first else 0
        if start == stop:
            continue
        keys, values = (each[None, :, start:stop] for each in span.pair)
        if keys.shape[1] == shape.num_kv_heads:
            found = attend(query, keys, values, params)
            part = found if part is None else part.merge(found)
            continue
        heads = slice(span.head * group, span.heads.stop * group)
        if part is None:
            part = PartialAttention.of_nothing((*query.shape[:-1], shape.out_dim), query.device)
        before = PartialAttention(part.out[:, heads], part.lse[:, heads])
        after = before.merge(attend(query[:, heads], keys, values, params))
        part.out[:, heads], part.lse[:, heads] = after.out, after.lse
    return part
