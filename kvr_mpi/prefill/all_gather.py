"""Tensor and sequence parallelism's way between ranks, the paper's baseline: an all-gather (section 3, Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvr_mpi.kv.attention import PartialAttention, attend, attend_masked
from kvr_mpi.kv.exchange import SegmentedLayer
from kvr_mpi.kv.transfers import LayerTransfers, Range
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import Partition
from kvr_mpi.topology import others_after


class AllGather:
    """TSP: even slices, and every rank is sent all keys and values before it attends (section 3, Fig. 4).

    ``dense`` as in the paper: every rank computes its slice against the whole prompt and masks what lies after.
    Otherwise causal: what lies after a slice is not computed. What nobody reads of the last layer is left out if
    that is lent to it. It takes no chunks: a rank attends when it has been sent everything.
    """

    in_order = takes_chunks = False

    def __init__(
        self,
        partition: Partition,
        rank: int,
        prefix_tokens: int = 0,
        *,
        sends_all: bool = True,
        chunk_tokens: int | None = None,
        dense: bool,
        saves_last_layer: bool = False,
    ) -> None:
        self.partition, self.rank, self.decode_rank = partition, rank, partition.size - 1
        self.segments = partition.size
        self.prefix_tokens = prefix_tokens
        self.owned = [self._bounds(rank)]
        self.chunks = [self.owned]
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

    def share(self, layer: LayerTransfers, ranges: Sequence[Range]) -> None:
        """Send the own segment to every other rank, the next one first."""
        for dest in self._others():
            layer.send(self.owned[0], dest, self.rank)

    def attend(
        self,
        layer: SegmentedLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
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
        return list(others_after(self.rank, self.partition.size))

    def _bounds(self, rank: int) -> Range:
        return max(self.partition.start(rank), self.prefix_tokens), self.partition.stop(rank)
