"""How the ranks of a chain come to each other's keys and values, one class a strategy, side by side.

Each fills a layer's buffer with segments of other ranks and attends from this rank's tokens to what is there.
All are exact; they differ in who computes what, who waits for whom, and what crosses the links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kvr_mpi.kv.attention import AttentionParams, PartialAttention, attend, attend_masked
from kvr_mpi.kv.transfers import LayerTransfers, Range
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import Partition

if TYPE_CHECKING:
    from kvr_mpi.kv.layer import SliceLayer


class Exchange(Protocol):
    """One strategy on one rank.

    Ranks are numbered in the order of the prompt's slices, which need not be that of the chain.
    """

    rank: int
    partition: Partition  # of the prompt
    owned: list[Range]  # the tokens this rank computes
    decode_rank: int  # the rank that ends with all keys and values, and the last token
    capacity: int  # tokens a layer's buffer holds
    forwards: bool  # whether this rank passes segments on
    saves_last_layer: bool  # whether what nobody reads of the last layer is left out
    slots: int  # segments a rank without buffers has to have room for, so that no rank waits for ever (``failure``)

    def post(self, layer: LayerTransfers) -> None:
        """Announce the layer's sends and post its receives, before it computes."""

    def share(self, layer: LayerTransfers) -> None:
        """Send this rank's own segment, which is in the buffer now."""

    def attend(
        self, layer: SliceLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> PartialAttention:
        """Attend from the owned tokens to all tokens up to each."""

    def longest_segment(self) -> int:
        """Tokens of the longest segment that this rank sends or receives."""

    def first_held(self, visibility: Visibility) -> int:
        """Position of the first token from which on this rank has all keys and values of such a layer."""


class MakeExchange(Protocol):
    """How a strategy is made for the rank at one place of a prompt's slices."""

    def __call__(self, partition: Partition, rank: int, prefix_tokens: int = 0, *, sends_all: bool = False) -> Exchange:
        """Make it.

        Parameters
        ----------
        prefix_tokens : int
            The first tokens, which every rank has already; they are within the first slice.
        sends_all : bool
            Send all tokens of layers with a window or chunks, too.
        """


class Relay:
    """KV-Runahead: segments go down the chain, each passed on as it arrives (section 4.1; cut-through is ours).

    A rank attends to its own slice while the prefix is on its way, and then to each segment of the prefix, the
    nearest first: it has the shortest way. Of a layer with a window or chunks only those tokens travel that the rank
    behind, or one behind that, still sees.

    Parameters
    ----------
    prefix_tokens : int
        The first tokens, which every rank has already; the first slice begins behind them.
    sends_all : bool
        Send all tokens of all layers: they are kept, or the model's own mask is to hide them.
    """

    saves_last_layer = True
    slots = 1

    def __init__(self, partition: Partition, rank: int, prefix_tokens: int = 0, *, sends_all: bool = False) -> None:
        self.partition, self.rank, self.decode_rank = partition, rank, partition.size - 1
        self.prefix_tokens, self.sends_all = prefix_tokens, sends_all
        self.owned = [self._bounds(rank)]
        self.capacity = partition.stop(rank)
        self.forwards = 0 < rank < self.decode_rank

    def post(self, layer: LayerTransfers) -> None:
        """Receive every predecessor's segment from the rank before, nearest first."""
        if own := self._seen_behind(self.rank, self.rank, layer.visibility):
            layer.announce(self.rank + 1, self.rank, own)
        for segment in reversed(range(self.rank)):
            onward = self._seen_behind(segment, self.rank, layer.visibility)
            if bounds := self._seen_behind(segment, self.rank - 1, layer.visibility):
                to, first = (self.rank + 1, onward[0]) if onward else (None, None)
                layer.receive(bounds, self.rank - 1, segment, to, first)

    def share(self, layer: LayerTransfers) -> None:
        """Send the own segment to the rank behind."""
        if own := self._seen_behind(self.rank, self.rank, layer.visibility):
            layer.send(own, self.rank + 1, self.rank)

    def first_held(self, visibility: Visibility) -> int:
        """Position of the first token from which on this rank has all keys and values of such a layer."""
        first = 0 if self.sends_all or not self.rank else visibility.first_key(self.owned[0][0])
        return 0 if first <= self.prefix_tokens else first

    def _seen_behind(self, segment: int, rank: int, visibility: Visibility) -> Range | None:
        """Which tokens of a segment `rank` hands to the next rank; None if that one, and those after it, see none."""
        if rank >= self.decode_rank:
            return None
        first, last = self._bounds(segment)
        if not self.sends_all:
            first = max(first, visibility.first_key(self._bounds(rank + 1)[0]))
        return (first, last) if first < last else None

    def attend(
        self, layer: SliceLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> PartialAttention:
        """Own slice first, then what all prompts begin with, then what comes, segment by segment."""
        part = attend(query, keys, values, params, causal=query.shape[2] > 1)
        if self.prefix_tokens:
            part = part.merge(attend(query, *layer.rows(0, self.prefix_tokens), params))
        for first, last in layer.segments.arrivals() if layer.segments is not None else ():
            part = part.merge(attend(query, *layer.rows(first, last), params))
        return part

    def longest_segment(self) -> int:
        """Of its own and of those before."""
        return max(last - first for first, last in map(self._bounds, range(self.rank + 1)))

    def _bounds(self, rank: int) -> Range:
        return max(self.partition.start(rank), self.prefix_tokens), self.partition.stop(rank)


class AllGather:
    """TSP: even slices, and every rank is sent all keys and values before it attends (section 3, Fig. 4).

    ``dense`` as in the paper: every rank computes its slice against the whole prompt and masks what lies behind.
    Otherwise causal: what lies behind a slice is not computed. What nobody reads of the last layer is left out if
    that is lent to it.
    """

    def __init__(
        self,
        partition: Partition,
        rank: int,
        prefix_tokens: int = 0,
        *,
        sends_all: bool = True,
        dense: bool,
        saves_last_layer: bool = False,
    ) -> None:
        self.partition, self.rank, self.decode_rank = partition, rank, partition.size - 1
        self.prefix_tokens = prefix_tokens
        self.owned = [self._bounds(rank)]
        self.capacity = partition.tokens
        self.forwards = False
        self.slots = 2 * (partition.size - 1)
        self.dense = dense
        self.saves_last_layer = saves_last_layer and not dense

    def post(self, layer: LayerTransfers) -> None:
        """Receive every other rank's segment from itself."""
        for dest in self._others():
            layer.announce(dest, self.rank, self.owned[0])
        for segment in range(self.partition.size):
            if segment != self.rank:
                layer.receive(self._bounds(segment), segment, segment)

    def share(self, layer: LayerTransfers) -> None:
        """Send the own segment to every other rank, the next one first."""
        for dest in self._others():
            layer.send(self.owned[0], dest, self.rank)

    def attend(
        self, layer: SliceLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> PartialAttention:
        """Everything has to be here first."""
        if layer.segments is not None:
            layer.segments.collect()
        start = self.owned[0][0]
        if self.dense:
            return attend_masked(query, *layer.rows(0, self.capacity), params, start)
        part = attend(query, keys, values, params, causal=query.shape[2] > 1)
        return part.merge(attend(query, *layer.rows(0, start), params)) if start else part

    def longest_segment(self) -> int:
        """Of all."""
        return max(self.partition.lengths)

    def first_held(self, visibility: Visibility) -> int:
        """All are sent, whatever is seen."""
        return 0

    def _others(self) -> list[int]:
        return [(self.rank + step) % self.partition.size for step in range(1, self.partition.size)]

    def _bounds(self, rank: int) -> Range:
        return max(self.partition.start(rank), self.prefix_tokens), self.partition.stop(rank)


class Ring:
    """Zigzag ring attention: rank r owns the r-th stretch from the front and from the back, segments go round.

    Every rank computes the same in every step, without tuning; every segment crosses every link but one.
    Segments are passed on as they arrive, and attended to in the order of their coming. What nobody reads of the last
    layer is left out if that is lent to it.
    """

    decode_rank = 0  # owns the last stretch
    slots = 4  # both stretches of two ranks: what comes in can wait for nothing but what came in before

    def __init__(
        self,
        partition: Partition,
        rank: int,
        prefix_tokens: int = 0,
        *,
        sends_all: bool = True,
        saves_last_layer: bool = False,
    ) -> None:
        self.saves_last_layer, self.prefix_tokens = saves_last_layer, prefix_tokens
        self.partition, self.size, self.rank = partition, partition.size // 2, rank
        self.halves = [(max(partition.start(i), prefix_tokens), partition.stop(i)) for i in range(partition.size)]
        self.owned = self._halves_of(rank)
        self.capacity = partition.tokens
        self.forwards = self.size > 2

    def post(self, layer: LayerTransfers) -> None:
        """Receive every other rank's two stretches from the rank before, nearest first."""
        for half, bounds in zip((self.rank, 2 * self.size - 1 - self.rank), self.owned, strict=True):
            layer.announce((self.rank + 1) % self.size, half, bounds)
        for source in self._sources():
            passes_on = (self.rank + 1) % self.size != source
            for half, bounds in zip((source, 2 * self.size - 1 - source), self._halves_of(source), strict=True):
                to = (self.rank + 1) % self.size if passes_on else None
                layer.receive(bounds, (self.rank - 1) % self.size, half, to)

    def share(self, layer: LayerTransfers) -> None:
        """Send both own stretches to the rank behind."""
        for half, bounds in zip((self.rank, 2 * self.size - 1 - self.rank), self.owned, strict=True):
            layer.send(bounds, (self.rank + 1) % self.size, half)

    def attend(
        self, layer: SliceLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> PartialAttention:
        """Own stretches first, then each source's as it comes: from both, or to both, whichever is before the other."""
        near = self.owned[0]
        cut = near[1] - near[0]
        # The far stretch sees all of the near one: together they are causal.
        whole = attend(query, keys, values, params, causal=True)
        if self.prefix_tokens:
            whole = whole.merge(attend(query, *layer.rows(0, self.prefix_tokens), params))
        for source in self._sources():
            assert layer.segments is not None
            layer.segments.wait_for(source)
            layer.segments.wait_for(2 * self.size - 1 - source)
            first, second = self._halves_of(source)
            if source < self.rank:
                whole = whole.merge(attend(query, *layer.rows(*first), params))
                continue
            for bounds in [(first[0], second[1])] if first[1] == second[0] else [first, second]:
                whole.merge_behind(cut, attend(query[:, :, cut:], *layer.rows(*bounds), params))
        return whole

    def longest_segment(self) -> int:
        """Of all."""
        return max(last - first for first, last in self.halves)

    def first_held(self, visibility: Visibility) -> int:
        """All are sent, whatever is seen."""
        return 0

    def _sources(self) -> list[int]:
        return [(self.rank - step) % self.size for step in range(1, self.size)]

    def _halves_of(self, rank: int) -> list[Range]:
        return [self.halves[rank], self.halves[2 * self.size - 1 - rank]]
