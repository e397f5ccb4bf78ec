"""Zigzag ring attention's way between ranks: two stretches a rank, and segments go round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvr_mpi.kv.attention import PartialAttention, attend
from kvr_mpi.kv.exchange import SegmentedLayer
from kvr_mpi.kv.transfers import LayerTransfers, Range
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import Partition
from kvr_mpi.topology import following, others_before, preceding


class Ring:
    """Zigzag ring attention: rank r owns the r-th stretch from the front and from the back, segments go round.

    Every rank computes the same in every step, without tuning; every segment crosses every link but one.
    Segments are passed on as they arrive, and attended to in the order of their coming. What nobody reads of the last
    layer is left out if that is lent to it.

    It takes no chunks: a rank's last tokens see those of all others, so the ranks would wait for each other's chunks in
    turn, and one of them compute at a time.
    """

    in_order = takes_chunks = False
    decode_rank = 0  # owns the last stretch
    slots = 4  # both stretches of two ranks: what comes in can wait for nothing but what came in before

    def __init__(
        self,
        partition: Partition,
        rank: int,
        prefix_tokens: int = 0,
        *,
        sends_all: bool = True,
        chunk_tokens: int | None = None,
        saves_last_layer: bool = False,
    ) -> None:
        self.saves_last_layer, self.prefix_tokens = saves_last_layer, prefix_tokens
        self.partition, self.size, self.rank = partition, partition.size // 2, rank
        self.segments = partition.size
        self.halves = [(max(partition.start(i), prefix_tokens), partition.stop(i)) for i in range(partition.size)]
        self.owned = self._halves_of(rank)
        self.chunks = [self.owned]
        self.capacity = partition.tokens
        self.forwards = self.size > 2

    def post(self, layer: LayerTransfers) -> None:
        """Receive every other rank's two stretches from the rank before, nearest first."""
        for half, bounds in zip((self.rank, 2 * self.size - 1 - self.rank), self.owned, strict=True):
            layer.announce(following(self.rank, self.size), half, bounds)
        for source in self._sources():
            passes_on = following(self.rank, self.size) != source
            for half, bounds in zip((source, 2 * self.size - 1 - source), self._halves_of(source), strict=True):
                to = following(self.rank, self.size) if passes_on else None
                layer.receive(bounds, preceding(self.rank, self.size), half, to)

    def share(self, layer: LayerTransfers, ranges: Sequence[Range]) -> None:
        """Send both own stretches to the next rank."""
        for half, bounds in zip((self.rank, 2 * self.size - 1 - self.rank), self.owned, strict=True):
            layer.send(bounds, following(self.rank, self.size), half)

    def attend(
        self,
        layer: SegmentedLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
    ) -> PartialAttention:
        """Own stretches first, then each source's as it comes: from both, or to both, whichever is before the other."""
        near = self.owned[0]
        cut = near[1] - near[0]
        # The far stretch sees all of the near one: together they are causal.
        whole = attend(query, keys, values, params, causal=True).in_float32()
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
                whole.merge_after(cut, attend(query[:, :, cut:], *layer.rows(*bounds), params))
        return whole

    def longest_segment(self) -> int:
        """Of all."""
        return max(last - first for first, last in self.halves)

    def first_held(self, visibility: Visibility) -> int:
        """All are sent, whatever is seen."""
        return 0

    def _sources(self) -> list[int]:
        return list(others_before(self.rank, self.size))

    def _halves_of(self, rank: int) -> list[Range]:
        return [self.halves[rank], self.halves[2 * self.size - 1 - rank]]
