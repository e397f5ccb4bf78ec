"""The event model of a chain: when each rank finishes each layer, for many splits at once.

No loop steps through events: waiting is a maximum and working a sum, so a queue is a running maximum of (arrival -
work before it), which numpy computes for whole arrays. The results are exact up to rounding; the tests compare them
with a plain loop.

Arrays named `splits` have the slice lengths in tokens, (splits, ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvr_mpi.costs.layer_costs import Array, Costs


def cut_through(costs: Costs, splits: Array) -> Array:
    """Seconds to the first token (splits,) if every segment is forwarded as it arrives (our engine).

    A rank sends its segment as soon as it is computed, attends to its own slice, then to each segment of the prefix,
    nearest first, as they arrive. It never waits for a later rank (receives are posted ahead), so one pass over the
    ranks computes all layers of each rank together. In the last layer, the last rank attends only from the last token,
    which takes negligible time.
    """
    count, ranks = splits.shape
    layer = np.arange(costs.layers)
    floors = costs.launch_floor_s * layer
    stops = np.cumsum(splits, axis=1)
    link = Link(costs, splits, stops)
    ends = np.zeros((count, costs.layers))
    for rank, speed in enumerate(costs.speeds or (1.0,) * ranks):
        own, before = splits[:, rank, None], stops[:, rank, None] - splits[:, rank, None]
        qkv_s, rest_s = costs.around_attention(own, speed, ranks)
        pair_s = np.full(costs.layers, costs.pair_s / speed)
        if rank == ranks - 1 > 0:
            pair_s[-1] = 0.0
        prefix_s = own * pair_s + costs.copy_token_s / speed  # per token of the prefix
        own_s = own * own * pair_s / 2
        spent = np.cumsum(qkv_s + own_s + before * prefix_s + rest_s, axis=1)
        spent_before = np.concatenate([np.zeros((count, 1)), spent[:, :-1]], axis=1)
        # A layer cannot start before its kernels are launched ...
        waits = floors - spent_before
        if rank:
            # ... nor end before each segment has arrived, and it and the segments after it have been attended to.
            waits = np.maximum(waits, link.served(rank, prefix_s) + rest_s - spent)
            if costs.has_states:  # ... nor begin before the previous rank has ended it
                waits = np.maximum(waits, ends + costs.link_latency_s - spent_before)
        ends = np.maximum.accumulate(waits, axis=1) + spent
        if rank < ranks - 1:
            starts = np.maximum(np.concatenate([np.zeros((count, 1)), ends[:, :-1]], axis=1), floors)
            link.put(rank, starts + qkv_s)
    return np.maximum(ends[:, -1], costs.layers * costs.launch_floor_s) + costs.head_s


class Link:
    """The links of a chain: when each segment of each layer arrives at a rank.

    A link carries one segment at a time, layer after layer, nearest segment first. Let S be the time it is busy with a
    layer, and B(l, j) = l S + (segments j and nearer of layer l) the time it is busy up to segment j. Segment j has
    crossed the link at B(l, j) + the running maximum of (time it was ready - time to carry the segments before it).
    `late` has this maximum, minus `less` per layer; the segment of rank j has column -1 - j, so the last columns are
    the segments that a rank receives, nearest first. Passes over large arrays take most of a simulation's time, so
    there are as few as possible.
    """

    def __init__(self, costs: Costs, splits: Array, stops: Array) -> None:
        count, ranks = splits.shape
        per_token_s = costs.kv_bytes / costs.link_bytes_per_s
        self.latency_s = costs.link_latency_s
        self.layer = np.arange(costs.layers)
        self.segment_s = splits * per_token_s
        self.carried_s = stops * per_token_s  # S of the link after each rank
        self.reversed_s = self.segment_s[:, None, ::-1]
        self.starts_s = (self.carried_s - self.segment_s)[:, None, ::-1]
        self.stops = stops[:, None, ::-1]
        self.late = np.zeros((count, costs.layers, ranks))
        self.scratch = np.empty_like(self.late)
        self.less = np.zeros((count, costs.layers))

    def put(self, rank: int, ready: Array) -> None:
        """Send a rank's own segment, ready at (splits, layers), and everything received, over the next link."""
        own_s, carried_s = self.segment_s[:, rank, None], self.carried_s[:, rank, None]
        if rank:
            self.late[:, :, -rank:] += self.reversed_s[:, :, -rank:]
            self.less += self.latency_s - (self.layer + 1) * own_s
        late = self.late[:, :, -rank - 1 :]
        late[:, :, 0] = ready - self.layer * carried_s - self.less
        np.maximum.accumulate(late, axis=2, out=late)
        # The link may still be busy with the previous layer.
        busy = np.maximum.accumulate(late[:, :-1, -1] + self.less[:, :-1], axis=1) - self.less[:, 1:]
        if (busy > late[:, 1:, 0]).any():
            np.maximum(late[:, 1:], busy[:, :, None], out=late[:, 1:])

    def served(self, rank: int, prefix_s: Array) -> Array:
        """Return when each layer's last segment has been attended to (splits, layers), at `prefix_s` per token."""
        late, scratch = self.late[:, :, -rank:], self.scratch[:, :, -rank:]
        starts_s, stops = self.starts_s[:, :, -rank:], self.stops[:, :, -rank:]
        np.add(late, stops * prefix_s[:, :1, None] - starts_s, out=scratch)
        if prefix_s[0, -1] != prefix_s[0, 0]:
            scratch[:, -1] = late[:, -1] + stops[:, 0] * prefix_s[:, -1:] - starts_s[:, 0]
        carried_s = self.carried_s[:, rank - 1, None]
        found: Array = scratch.max(axis=2) + self.less + (self.layer + 1) * carried_s + self.latency_s
        return found


def busy_seconds(costs: Costs, lengths: Sequence[float]) -> Array:
    """Return the computing time of every rank of a chain with slices of these lengths (ranks,).

    All ranks except the last stop once the last layer's keys and values are computed; in that layer, the last
    rank computes attention for its last token only.
    """
    own = np.asarray(lengths, dtype=float)
    before = np.cumsum(own) - own
    speeds = np.ones(len(own)) if costs.speeds is None else np.asarray(costs.speeds)
    pairs = own * before + own * own / 2
    qkv_s, rest_s = costs.around_attention(own, speeds, len(own))
    attention_s = (pairs * costs.pair_s + before * costs.copy_token_s) / speeds
    busy_s = (costs.layers - 1) * np.maximum(qkv_s + attention_s + rest_s, costs.launch_floor_s) + qkv_s
    busy_s[-1] += rest_s[-1] + costs.head_s
    return np.asarray(busy_s)
