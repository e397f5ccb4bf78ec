"""Where keys and values lie when every head keeps tokens of its own, as compression leaves them.

Beside `layout.UniformLayout`. A layer has one flat buffer of keys and one of values. Each head has a stretch of both,
with the tokens it keeps and room for those to come: a new token is written where it stays, and nothing is copied. Keys
carry their rotary embedding already: what a head dropped leaves no gap, and positions stay the true ones.

A rank need not hold all heads of a layer (``decode.head_parallel``): for those it does not hold it gives zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.attention import PartialAttention, attend, attend_held, takes_flash
from kvr_mpi.kv.varlen import attend_heads
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams, HeldHead


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """One head that is held.

    keys, values : views (capacity, dim); transposed_keys (dim, capacity).
    """

    head: int  # its place among those the model gives
    kept: int
    keys: torch.Tensor
    values: torch.Tensor
    transposed_keys: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Heads next to each other that keep equally many tokens, and so lie as one tensor.

    keys, values : views (1, heads, capacity, dim).
    """

    heads: tuple[int, ...]  # their places among those the model gives
    places: slice | torch.Tensor  # the same, to index by: a list would be copied to a GPU every time
    kept: int
    keys: torch.Tensor
    values: torch.Tensor


class RaggedLayout:
    """One layer's keys and values, each head with its own tokens.

    Parameters
    ----------
    flat : torch.Tensor
        Memory for all of them, of `elements_needed`.
    shape : LayerShape
        Its number of heads is that of the keys that `write` is given.
    kept : sequence of int
        Tokens that each head held keeps.
    slack : int
        Tokens that can be appended to each.
    origin : int
        Length of the prompt: the position of the first token that is appended.
    heads : sequence of int, optional
        Which heads of the layer are held, ascending; by default all.
    appends : bool
        Whether tokens to come are kept here; else another rank has room for them, and `write` does nothing.

    Attributes
    ----------
    positions : list of Tensor or None
        Which tokens of the prompt each head held keeps, (tokens,) int32 on the host; None where that is not known.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        shape: LayerShape,
        kept: Sequence[int],
        slack: int,
        origin: int,
        heads: Sequence[int] | None = None,
        *,
        appends: bool = True,
    ) -> None:
        slack = slack if appends else 0
        self.appends = appends
        self.heads = tuple(range(shape.num_kv_heads) if heads is None else heads)
        assert len(kept) == len(self.heads), "one count for each head held"
        self.kept, self.slack, self.origin, self.shape = tuple(kept), slack, origin, shape
        capacities = [count + slack for count in kept]
        rows = sum(capacities)
        self.positions: list[torch.Tensor] | None = None
        self.flat, cut = flat, rows * shape.key_dim
        self._keys = flat[:cut].view(rows, shape.key_dim)
        self._values = flat[cut : cut + rows * shape.value_dim].view(rows, shape.value_dim)
        self._offsets = [0, *itertools.accumulate(capacities)][: len(capacities)]
        # Where each head's next token goes, but for those appended before it.
        self._ends = torch.tensor(
            [offset + count for offset, count in zip(self._offsets, kept, strict=True)],
            dtype=torch.int64,
            device=flat.device,
        )
        self._begins = torch.tensor([*self._offsets, rows], dtype=torch.int32, device=flat.device)
        self._counts = torch.tensor(kept, dtype=torch.int32, device=flat.device)
        self._places = torch.tensor(self.heads, dtype=torch.int64, device=flat.device)
        self._runs = list(self._find_runs())
        self.units = [
            _Unit(head, count, keys, values, keys.t())
            for head, count, keys, values in zip(
                self.heads,
                kept,
                torch.split(self._keys, capacities),
                torch.split(self._values, capacities),
                strict=True,
            )
        ]

    @property
    def holds_all(self) -> bool:
        """Whether all heads of the layer are here."""
        return len(self.heads) == self.shape.num_kv_heads

    @property
    def held_bytes(self) -> int:
        """Memory it takes."""
        return self.flat.nbytes

    def head_rows(self, at: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one of the heads held, as views (tokens, dim), in a document of so many tokens."""
        stretch = slice(self._offsets[at], self._offsets[at] + self.kept[at] + length - self.origin)
        return self._keys[stretch], self._values[stretch]

    def check_room(self, first: int, tokens: int) -> int:
        """Say how many tokens were appended before the one at a position.

        Raises
        ------
        ValueError
            If so many from there on do not fit.
        """
        before = first - self.origin
        if not 0 <= before <= self.slack - tokens:
            raise ValueError(
                f"tokens {first} to {first + tokens} do not fit: the heads keep what they keep of {self.origin} tokens "
                f"and have room for {self.slack} more"
            )
        return before

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append keys and values (1, kv_heads, tokens, dim) of all heads, from a position on."""
        tokens = keys.shape[2]
        if not self.heads or not self.appends:
            return
        before = self.check_room(first, tokens)
        if not self.holds_all:
            keys, values = keys.index_select(1, self._places), values.index_select(1, self._places)
        for token in range(tokens):
            ends = self._ends + (before + token)
            self._keys.index_copy_(0, ends, keys[0, :, token])
            self._values.index_copy_(0, ends, values[0, :, token])

    def attend(self, query: torch.Tensor, length: int, fresh: int, params: AttentionParams) -> torch.Tensor:
        """Attend from the last tokens of a document to what each head holds up to them.

        Parameters
        ----------
        query : Tensor
            (1, heads, fresh, head_dim); of a single token the group may come folded, (1, kv_heads, group, head_dim).
        length : int
            Tokens of the document, those last appended included.
        fresh : int
            How many these are.

        Returns
        -------
        Tensor
            The query's shape but for the last dimension, which is value_dim; zeros of heads that are not held.
        """
        shape, appended = self.shape, length - self.origin
        if fresh == 1 and _is_short_way(query, params):
            row = attend_row([self], query.view(1, -1, 1, shape.key_dim), [length], params)
            return row.view(*query.shape[:3], shape.value_dim)
        grouped = query.view(1, shape.num_kv_heads, -1, fresh, shape.key_dim)
        out = query.new_zeros(*grouped.shape[:-1], shape.value_dim)
        if self.heads and fresh == 1 and takes_flash(query, self._values, params):
            out[0, self._places, :, 0] = self._attend_at_once(grouped[0, self._places, :, 0], appended, params)
        else:
            for run in self._runs:
                _attend_run(run, grouped, out, appended, fresh, params)
        return out.view(*query.shape[:3], shape.value_dim)

    def attend_part(self, query: torch.Tensor, length: int, params: AttentionParams) -> PartialAttention:
        """Attend from one token to what is held here of each head, where other ranks hold the rest of it.

        Parameters
        ----------
        query : Tensor
            (1, heads, 1, head_dim).
        length : int
            Tokens of the document, that one included.

        Returns
        -------
        PartialAttention
            Of (1, heads, 1, value_dim); of heads of which nothing is held the log-sum-exp is minus infinity.
        """
        shape, appended = self.shape, length - self.origin
        grouped = query.view(1, shape.num_kv_heads, -1, 1, shape.key_dim)
        out = torch.zeros(*grouped.shape[:-1], shape.value_dim, device=query.device)
        lse = torch.full(grouped.shape[:-1], float("-inf"), device=query.device)
        for run in self._runs:
            places, held = run.places, run.kept + (appended if self.appends else 0)
            part = attend(grouped[:, places].flatten(1, 2), run.keys[:, :, :held], run.values[:, :, :held], params)
            out[:, places] = part.out.float().view(1, len(run.heads), *out.shape[2:])
            lse[:, places] = part.lse.view(1, len(run.heads), *lse.shape[2:])
        return PartialAttention(out.flatten(1, 2), lse.flatten(1, 2))

    def _attend_at_once(self, query: torch.Tensor, appended: int, params: AttentionParams) -> torch.Tensor:
        """Attend from one token (held heads, group, head_dim) on a GPU: every head is a sequence of its own."""
        longest = max(self.kept) + appended
        part = attend_heads(query, self._keys, self._values, params, self._begins, self._counts + appended, longest)
        sinks = _sinks_of(params, self._places, self.shape.num_kv_heads)
        return part.finish(replace(params, sinks=sinks)).view(query.shape).to(query.dtype)

    def _find_runs(self) -> Iterator[_Run]:
        at = 0
        for kept, group in itertools.groupby(self.kept):
            count = len(list(group))
            rows = slice(self._offsets[at], self._offsets[at] + count * (kept + self.slack))
            keys, values = (
                held[rows].view(1, count, kept + self.slack, held.shape[1]) for held in (self._keys, self._values)
            )
            heads = self.heads[at : at + count]
            is_row = heads[-1] - heads[0] == count - 1
            places = slice(heads[0], heads[-1] + 1) if is_row else self._places[at : at + count]
            yield _Run(heads, places, kept, keys, values)
            at += count


def _attend_run(
    run: _Run, query: torch.Tensor, out: torch.Tensor, appended: int, fresh: int, params: AttentionParams
) -> None:
    """Attend from (1, kv_heads, group, fresh, head_dim) with the heads of a run, into the same place of `out`."""
    length, places = run.kept + appended, run.places
    mine = query[:, places].flatten(1, 2)
    keys, values = run.keys[:, :, :length], run.values[:, :, :length]
    if fresh == 1:
        part = attend(mine, keys, values, params)
    else:
        before = length - fresh
        part = attend(mine, keys[:, :, before:], values[:, :, before:], params, causal=True)
        if before:
            part = part.merge(attend(mine, keys[:, :, :before], values[:, :, :before], params))
    sinks = _sinks_of(params, places, query.shape[1])
    finished = part.finish(replace(params, sinks=sinks)).to(out.dtype)
    out[:, places] = finished.view(1, len(run.heads), *out.shape[2:])


def write_row(
    layouts: Sequence[RaggedLayout], keys: torch.Tensor, values: torch.Tensor, lengths: Sequence[int]
) -> None:
    """Append one token to each of several documents of so many tokens (1, kv_heads, documents, dim)."""
    places, tokens = [], []
    by_document = zip(layouts, lengths, keys[0].unbind(1), values[0].unbind(1), strict=True)
    for layout, length, token_keys, token_values in by_document:
        if not layout.appends:
            continue
        appended = layout.check_room(length, 1)
        of_heads, of_values = token_keys.unbind(0), token_values.unbind(0)
        for unit in layout.units:
            end = unit.kept + appended
            places += [unit.keys.select(0, end), unit.values.select(0, end)]
            tokens += [of_heads[unit.head], of_values[unit.head]]
    if places:
        torch._foreach_copy_(places, tokens)


def attend_row(
    layouts: Sequence[RaggedLayout], query: torch.Tensor, lengths: Sequence[int], params: AttentionParams
) -> torch.Tensor:
    """Attend from one token of each of several documents, whose lengths include it.

    Parameters
    ----------
    query : Tensor
        (1, heads, documents, head_dim).

    Returns
    -------
    Tensor
        (1, heads, documents, value_dim).
    """
    if not _is_short_way(query, params):
        tokens = zip(layouts, query.chunk(len(layouts), dim=2), lengths, strict=True)
        return torch.cat([layout.attend(token, length, 1, params) for layout, token, length in tokens], dim=2)
    shape, documents = layouts[0].shape, len(layouts)
    if params.kernel is not None:
        every = [
            HeldHead(at, unit.head, unit.keys, unit.values, 0, unit.kept + length - layout.origin)
            for at, (layout, length) in enumerate(zip(layouts, lengths, strict=True))
            for unit in layout.units
        ]
        if params.kernel.takes_heads(query, every):
            return attend_held(query, every, shape.num_kv_heads, params).out  # zeros of heads that are not held
    # Two products and a softmax for a head take less than a flash kernel of several heads, or of padded ones.
    kv_heads = shape.num_kv_heads
    scaled = (query[0] * params.scale).view(kv_heads, -1, documents, shape.key_dim).permute(2, 0, 1, 3)
    out = query.new_zeros(documents * kv_heads, scaled.shape[2], shape.value_dim)
    queries, outs = scaled.flatten(0, 1).unbind(0), out.unbind(0)
    for document, (layout, length) in enumerate(zip(layouts, lengths, strict=True)):
        appended, first = length - layout.origin, document * kv_heads
        for unit in layout.units:
            held = unit.kept + appended
            scores = torch.mm(queries[first + unit.head], unit.transposed_keys.narrow(1, 0, held))
            torch.mm(torch.softmax(scores, -1), unit.values.narrow(0, 0, held), out=outs[first + unit.head])
    by_document = out.view(documents, kv_heads, -1, shape.value_dim)
    return by_document.permute(1, 2, 0, 3).reshape(1, -1, documents, shape.value_dim)


def _is_short_way(query: torch.Tensor, params: AttentionParams) -> bool:
    return params.is_plain and params.sinks is None and query.dtype == torch.float32 and query.device.type == "cpu"


def _sinks_of(params: AttentionParams, places: torch.Tensor | slice, kv_heads: int) -> torch.Tensor | None:
    """Sinks of the query heads of some KV heads."""
    return None if params.sinks is None else params.sinks.view(kv_heads, -1)[places].flatten()


def elements_needed(shape: LayerShape, kept: Sequence[int], slack: int) -> int:
    """How many elements a layer's heads take."""
    return (sum(kept) + slack * len(kept)) * (shape.key_dim + shape.value_dim)


def check_retained(retained: Sequence[torch.Tensor], shape: LayerShape, length: int, layer_idx: int) -> None:
    """Refuse what cannot be what the heads of a layer keep.

    Raises
    ------
    ModelError
        If the layer does not see all tokens: it forgets by position.
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
    for head, positions in enumerate(retained):
        about = f"layer {layer_idx}, KV head {head}"
        if positions.ndim != 1 or positions.dtype != torch.int64:
            raise ValueError(f"{about}: expected positions (tokens,) int64, got {positions.dtype} {positions.shape}")
        if not len(positions):
            raise ValueError(f"{about} would keep nothing; expected at least one token")
        if int(positions[0]) < 0 or int(positions[-1]) >= length or not bool((positions.diff() > 0).all()):
            raise ValueError(f"{about}: positions have to ascend from 0 to {length - 1}, each at most once")
