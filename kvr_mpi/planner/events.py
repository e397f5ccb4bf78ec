"""The event models of a chain: when each rank has finished each layer, for many splits at once.

Stands under the cost model. Nothing is stepped event by event: waiting is a maximum and working a sum, so a queue
is a running maximum of (arrival - work before it), and numpy has that. Exact up to rounding; the tests hold both
models to plain loops.

In what follows, for one layer and rank i: c tokens in its slice, P tokens before it; `splits` are (splits, ranks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvr_mpi.planner.costmodel import Costs

    Array = NDArray[np.float64]


def cut_through(costs: Costs, splits: Array) -> Array:
    """Seconds to the first token where every segment is passed on as it arrives (our engine).

    A rank sends its segment as soon as it has it, attends to its own slice, then to each segment of the prefix,
    nearest first, as they come. It never waits for a rank behind it (receives are posted ahead), so the chain is
    gone through once, rank by rank, all layers of a rank together. Of the last layer's attention the last rank
    computes what the last token needs, which is next to nothing.

    Returns
    -------
    array of float
        (splits,).
    """
    count, ranks = splits.shape
    layers = costs.layers
    speeds = np.ones(ranks) if costs.speeds is None else np.asarray(costs.speeds)
    floors = costs.launch_floor_s * np.arange(layers)
    overhead_s = costs.layer_s if ranks > 1 else 0.0
    bounds = np.cumsum(splits, axis=1)
    link_s = splits * (costs.kv_bytes / costs.link_bytes_per_s)
    here = np.empty((count, layers, 0))  # when each segment was at the rank before, nearest first
    ends = np.zeros((count, layers))
    for rank in range(ranks):
        own = splits[:, rank, None]
        before_s = overhead_s / 2 + own * costs.qkv_token_s / speeds[rank]
        after_s = overhead_s / 2 + own * costs.rest_token_s / speeds[rank]
        pair_s = np.full((count, layers), costs.pair_s / speeds[rank])
        if rank == ranks - 1 and ranks > 1:
            pair_s[:, -1] = 0.0
        prefix_s = pair_s * own + costs.copy_token_s / speeds[rank]  # of one token of the prefix
        own_s = pair_s * own * own * (1.0 if costs.eager else 0.5)
        before = bounds[:, rank, None] - own
        total = np.cumsum(before_s + own_s + prefix_s * before + after_s, axis=1)
        # A layer starts when the one before has ended and its kernels are launched ...
        ready = floors - np.concatenate([np.zeros((count, 1)), total[:, :-1]], axis=1)
        if rank:
            here = _through_link(here, link_s[:, rank - 1 :: -1] if rank > 1 else link_s[:, :1])
            here += costs.link_latency_s
            # ... and cannot end before a segment has come and it and those behind it are attended to.
            left = here + prefix_s[:, :, None] * bounds[:, None, rank - 1 :: -1][:, :, :rank]
            ready = np.maximum(ready, left.max(axis=2) + after_s - total)
        ends = np.maximum.accumulate(ready, axis=1) + total
        starts = np.maximum(np.concatenate([np.zeros((count, 1)), ends[:, :-1]], axis=1), floors)
        if rank < ranks - 1:
            here = np.concatenate([(starts + before_s)[:, :, None], here], axis=2)
    return np.maximum(ends[:, -1], layers * costs.launch_floor_s) + costs.head_s


def _through_link(ready: Array, link_s: Array) -> Array:
    """When segments have crossed a link that carries one at a time, in order, layer after layer.

    Parameters
    ----------
    ready : array
        (splits, layers, segments) when each is at the link.
    link_s : array
        (splits, segments) how long each occupies it.
    """
    count, layers, segments = ready.shape
    layer_s = np.cumsum(link_s, axis=1)
    busy = layer_s[:, None, :] + np.arange(layers)[None, :, None] * layer_s[:, None, -1:]
    waits = ready - busy
    waits += link_s[:, None, :]
    crossed = np.maximum.accumulate(waits.reshape(count, -1), axis=1).reshape(count, layers, segments)
    return np.add(crossed, busy, out=crossed)


def store_and_forward(costs: Costs, splits: Array) -> Array:
    """Seconds to the first token where a rank passes the whole prefix on at once (the paper's section 4.1).

    A message starts when the sender has the prefix and its own keys and values, and the receiver has posted its
    receive, at the start of its layer. Attention waits for the prefix; a layer ends when its message is sent.

    Returns
    -------
    array of float
        (splits,).
    """
    count, ranks = splits.shape
    speeds = np.ones(ranks) if costs.speeds is None else np.asarray(costs.speeds)
    overhead_s = costs.layer_s if ranks > 1 else 0.0
    bounds = np.cumsum(splits, axis=1)
    before = bounds - splits
    pairs = splits * (bounds if costs.eager else before + splits / 2)
    before_s = overhead_s / 2 + splits * costs.qkv_token_s / speeds
    after_s = overhead_s / 2 + splits * costs.rest_token_s / speeds
    attention_s = pairs * costs.pair_s / speeds
    copy_s = bounds * costs.copy_token_s / speeds
    copy_s[:, 0] = 0.0
    message_s = costs.link_latency_s + before * costs.kv_bytes / costs.link_bytes_per_s
    message_s[:, 0] = 0.0
    hops_s = np.cumsum(message_s + copy_s, axis=1)
    ends = np.zeros((count, ranks))
    for layer in range(costs.layers):
        starts = np.maximum(ends, layer * costs.launch_floor_s)
        # Rank i has all keys and values when it has its own and those of rank i - 1 have come: a running maximum.
        alone = np.maximum(starts + before_s, starts + message_s) + copy_s
        complete = np.maximum.accumulate(alone - hops_s, axis=1) + hops_s
        ends = complete + attention_s
        sent = np.maximum(complete[:, :-1], starts[:, 1:]) + message_s[:, 1:]
        ends[:, :-1] = np.maximum(ends[:, :-1], sent)
        ends += after_s
    head_s = costs.head_s * (splits[:, -1] if costs.eager else 1.0)
    return np.maximum(ends[:, -1], costs.layers * costs.launch_floor_s) + head_s
