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
from kvr_mpi.kv.attention import attend, attend_heads, takes_varlen
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Heads next to each other that keep equally many tokens, and so lie as one tensor.

    keys, values : views (1, heads, capacity, dim).
    """

    first: int  # of the heads held
    heads: tuple[int, ...]  # their places among those the model gives
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
    """

    def __init__(
        self,
        flat: torch.Tensor,
        shape: LayerShape,
        kept: Sequence[int],
        slack: int,
        origin: int,
        heads: Sequence[int] | None = None,
    ) -> None:
        self.heads = tuple(range(shape.num_kv_heads) if heads is None else heads)
        assert len(kept) == len(self.heads), "one count for each head held"
        self.kept, self.slack, self.origin, self._shape = tuple(kept), slack, origin, shape
        capacities = [count + slack for count in kept]
        rows = sum(capacities)
        self.flat, cut = flat, rows * shape.key_dim
        self._keys = flat[:cut].view(rows, shape.key_dim)
        self._values = flat[cut : cut + rows * shape.value_dim].view(rows, shape.value_dim)
        self._offsets = [0, *itertools.accumulate(capacities)][: len(capacities)]
        # Where each head's next token goes, but for those appended before it.
        self._ends = torch.tensor(
            [offset + count for offset, count in zip(self._offsets, kept, strict=True)], device=flat.device
        )
        self._begins = torch.tensor([*self._offsets, rows], dtype=torch.int32, device=flat.device)
        self._counts = torch.tensor(kept, dtype=torch.int32, device=flat.device)
        self._places = torch.tensor(self.heads, device=flat.device)
        self._runs = list(self._find_runs())

    @property
    def holds_all(self) -> bool:
        """Whether all heads of the layer are here."""
        return len(self.heads) == self._shape.num_kv_heads

    @property
    def held_bytes(self) -> int:
        """Memory it takes."""
        return self.flat.nbytes

    def head_rows(self, at: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one of the heads held, as views (tokens, dim), in a document of so many tokens."""
        stretch = slice(self._offsets[at], self._offsets[at] + self.kept[at] + length - self.origin)
        return self._keys[stretch], self._values[stretch]

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append keys and values (1, kv_heads, tokens, dim) of all heads, from a position on."""
        before, tokens = first - self.origin, keys.shape[2]
        if not self.heads:
            return
        if not 0 <= before <= self.slack - tokens:
            raise ValueError(
                f"tokens {first} to {first + tokens} do not fit: the heads kept what they keep of {self.origin} tokens "
                f"and have room for {self.slack} more"
            )
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
        shape, appended = self._shape, length - self.origin
        grouped = query.view(1, shape.num_kv_heads, -1, fresh, shape.key_dim)
        out = query.new_empty(*grouped.shape[:-1], shape.value_dim)
        if not self.holds_all:
            out.zero_()
        if self.heads and fresh == 1 and takes_varlen(query, self._values, params):
            out[0, self._places, :, 0] = self._attend_at_once(grouped[0, self._places, :, 0], appended, params)
        else:
            for run in self._runs:
                _attend_run(run, grouped, out, appended, fresh, params)
        return out.view(*query.shape[:3], shape.value_dim)

    def _attend_at_once(self, query: torch.Tensor, appended: int, params: AttentionParams) -> torch.Tensor:
        """Attend from one token (held heads, group, head_dim) on a GPU: every head is a sequence of its own."""
        longest = max(self.kept) + appended
        part = attend_heads(query, self._keys, self._values, params, self._begins, self._counts + appended, longest)
        sinks = _sinks_of(params, self._places, self._shape.num_kv_heads)
        return part.finish(replace(params, sinks=sinks)).view(query.shape).to(query.dtype)

    def _find_runs(self) -> Iterator[_Run]:
        at = 0
        for kept, group in itertools.groupby(self.kept):
            count = len(list(group))
            rows = slice(self._offsets[at], self._offsets[at] + count * (kept + self.slack))
            keys, values = (
                held[rows].view(1, count, kept + self.slack, held.shape[1]) for held in (self._keys, self._values)
            )
            yield _Run(at, self.heads[at : at + count], kept, keys, values)
            at += count


def _attend_run(
    run: _Run, query: torch.Tensor, out: torch.Tensor, appended: int, fresh: int, params: AttentionParams
) -> None:
    """Attend from (1, kv_heads, group, fresh, head_dim) with the heads of a run, into the same place of `out`."""
    first, last = run.heads[0], run.heads[-1] + 1
    length = run.kept + appended
    if fresh == 1 and last - first == 1 and _is_short_way(query, params):
        # One head, one token: two products and a softmax take less than the flash kernel.
        scores = torch.mm(query[0, first, :, 0], run.keys[0, 0, :length].t()).mul_(params.scale)
        torch.mm(torch.softmax(scores, -1), run.values[0, 0, :length], out=out[0, first, :, 0])
        return
    places: slice | list[int] = slice(first, last) if last - first == len(run.heads) else list(run.heads)
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


def _is_short_way(query: torch.Tensor, params: AttentionParams) -> bool:
    return params.is_plain and params.sinks is None and query.dtype == torch.float32 and query.device.type == "cpu"


def _sinks_of(params: AttentionParams, places: torch.Tensor | slice | list[int], kv_heads: int) -> torch.Tensor | None:
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
