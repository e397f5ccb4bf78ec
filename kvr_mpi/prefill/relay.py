"""KV-Runahead's way between ranks: segments go down the chain (section 4.1, Fig. 5)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from kvr_mpi.kv.attention import PartialAttention, attend, attend_up_to
from kvr_mpi.kv.exchange import SegmentedLayer
from kvr_mpi.kv.transfers import LayerTransfers, Range
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import Partition, cut_range

# Devices on which the prefix is attended to in two groups: one call and one merge per segment would cost more time than
# is gained by overlapping with segments that are still on their way.
GROUPING = ("cuda",)


class Relay:
    """KV-Runahead: segments go down the chain, each passed on as it arrives (section 4.1; cut-through is ours).

    A rank attends to its own slice while the prefix is on its way, and then to each segment of the prefix, nearest
    first, since that has the shortest way. In a layer with a window or chunks, only those tokens are sent that the next
    rank, or a later one, can attend to.

    Parameters
    ----------
    prefix_tokens : int
        Number of first tokens that every rank has already; the first slice begins after them.
    sends_all : bool
        Send all tokens of all layers, because they are to be kept, or because the model's own mask hides them.
    chunk_tokens : int or None
        Slices are computed in chunks that end at multiples of this. Each chunk is a segment, sent as soon as it is
        computed. The first chunk that attends waits for everything before the slice; later ones find it there.
    """

    in_order = takes_chunks = True
    saves_last_layer = True
    slots = 1

    def __init__(
        self,
        partition: Partition,
        rank: int,
        prefix_tokens: int = 0,
        *,
        sends_all: bool = False,
        chunk_tokens: int | None = None,
    ) -> None:
        self.partition, self.rank, self.decode_rank = partition, rank, partition.size - 1
        self.prefix_tokens, self.sends_all = prefix_tokens, sends_all
        self.owned = [self._bounds(rank)]
        self.capacity = partition.stop(rank)
        self.forwards = 0 < rank < self.decode_rank
        parts = [list(cut_range(*self._bounds(place), chunk_tokens)) for place in range(partition.size)]
        ends = list(itertools.accumulate(map(len, parts)))
        self.segments = ends[-1]
        self.chunks = [[part] for part in parts[rank]]
        # Of each rank up to this one, its segments: number and tokens.
        self._segments = [
            list(enumerate(some, start=end - len(some)))
            for some, end in zip(parts[: rank + 1], ends[: rank + 1], strict=True)
        ]

    def post(self, layer: LayerTransfers) -> None:
        """Receive every predecessor's segments from the rank before, nearest rank first."""
        for segment, whole in self._segments[self.rank]:
            if own := self._seen_after(whole, self.rank, layer.visibility):
                layer.announce(self.rank + 1, segment, own)
        for segment, whole in itertools.chain.from_iterable(reversed(self._segments[: self.rank])):
            onward = self._seen_after(whole, self.rank, layer.visibility)
            if bounds := self._seen_after(whole, self.rank - 1, layer.visibility):
                to, first = (self.rank + 1, onward[0]) if onward else (None, None)
                layer.receive(bounds, self.rank - 1, segment, to, first)

    def share(self, layer: LayerTransfers, ranges: Sequence[Range]) -> None:
        """Send the own segments in these ranges to the next rank."""
        for segment, bounds in self._segments[self.rank]:
            is_made = any(first <= bounds[0] and bounds[1] <= last for first, last in ranges)
            if is_made and (own := self._seen_after(bounds, self.rank, layer.visibility)):
                layer.send(own, self.rank + 1, segment)

    def first_held(self, visibility: Visibility) -> int:
        """Position of the first token from which on this rank has all keys and values of such a layer."""
        first = 0 if self.sends_all or not self.rank else visibility.first_key(self.owned[0][0])
        return 0 if first <= self.prefix_tokens else first

    def _seen_after(self, bounds: Range, rank: int, visibility: Visibility) -> Range | None:
        """Which tokens of a segment `rank` hands to the next rank; None if that one, and those after it, see none."""
        if rank >= self.decode_rank:
            return None
        first, last = bounds
        if not self.sends_all:
            first = max(first, visibility.first_key(self._bounds(rank + 1)[0]))
        return (first, last) if first < last else None

    def attend(
        self,
        layer: SegmentedLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
    ) -> PartialAttention:
        """Own slice first, then what all prompts begin with, then what comes, segment by segment."""
        if layer.fresh_ranges[0][0] > self.owned[0][0]:
            if layer.segments is not None:  # the first chunk has waited for them, unless nobody reads what it gives
                layer.segments.collect()
            return attend_up_to(query, *layer.rows(0, layer.fresh_ranges[-1][1]), params)
        part = attend(query, keys, values, params, causal=query.shape[2] > 1)
        if self.prefix_tokens:
            part = part.merge(attend(query, *layer.rows(0, self.prefix_tokens), params))
        arrivals: Iterable[Range] = layer.segments.arrivals() if layer.segments is not None else ()
        if query.device.type in GROUPING:
            arrivals = in_two_groups(arrivals, self.owned[0][0] - self.prefix_tokens)
        for first, last in arrivals:
            part = part.merge(attend(query, *layer.rows(first, last), params))
        return part

    def longest_segment(self) -> int:
        """Of its own and of those before."""
        return max(last - first for some in self._segments for _, (first, last) in some)

    def _bounds(self, rank: int) -> Range:
        return max(self.partition.start(rank), self.prefix_tokens), self.partition.stop(rank)


def in_two_groups(arrivals: Iterable[Range], tokens: int) -> Iterator[Range]:
    """Join ranges that come one before the other into two, each yielded when all of it is here.

    Parameters
    ----------
    arrivals : iterable of (int, int)
        The nearest first.
    tokens : int
        Of all of them; the first group has at least half.
    """
    group, seen = None, 0
    for first, last in arrivals:
        if group is not None and last != group[0]:  # no neighbours
            yield group
            group = None
        group = (first, last if group is None else group[1])
        before, seen = seen, seen + last - first
        if 2 * before < tokens <= 2 * seen:
            yield group
            group = None
    if group is not None:
        yield group
