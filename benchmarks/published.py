"""Strategies of others, as rivals: the paper's all-gather (TSP), and zigzag ring attention as its authors run it.

`PUBLISHED` has all strategies without the cut of the last layer, which is ours; `LENT` has them with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from benchmarks.equations import tsp_seconds
from kvr_mpi.costs.costmodel import ring_seconds
from kvr_mpi.kv.attention import PartialAttention, _attend_blocks
from kvr_mpi.kv.route import Hop, Route, Step
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.registry import STRATEGIES, Forecast, Strategy
from kvr_mpi.prefill.routes import ring
from kvr_mpi.topology import others_after


def all_gather(
    partition: Partition,
    position: int,
    known: int = 0,
    *,
    chunk_tokens: int | None = None,
    is_dense: bool,
    saves_last_layer: bool = False,
) -> Route:
    """Send each slice to all ranks; a rank receives all keys and values before it attends (TSP, section 3, Fig. 4).

    With `is_dense`, as in the paper, a rank computes its slice against the whole prompt, and masks the tokens after it.
    Otherwise it does not compute these and, with `saves_last_layer`, no output of the last layer that is not used.
    Chunks are not supported, since a rank attends only after it has received everything.
    """
    size, slices = partition.size, partition.slices(known)
    own = slices[position]
    others = [Hop(rank, slices[rank], rank, None) for rank in range(size) if rank != position]
    before = ((0, own[0]),) if own[0] else ()
    return Route(
        partition,
        position,
        size - 1,
        size,
        owned=(own,),
        chunks=((own,),),
        hops=(*(Hop(position, own, None, dest) for dest in others_after(position, size)), *others),
        steps=(Step(tuple(hop.segment for hop in others), before),),
        saves_last_layer=saves_last_layer,
        attend=attend_masked if is_dense else None,
        slots=2 * (size - 1),
    )


def attend_masked(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, offset: int
) -> PartialAttention:
    """Attend causally by masking; the first query is aligned with key `offset`.

    All scores of queries x keys are computed, as in the paper.
    """
    if params.is_plain and keys.shape[-1] == values.shape[-1] and query.device.type in ("cpu", "meta"):
        after = torch.arange(keys.shape[2], device=query.device) > torch.arange(
            offset, offset + query.shape[2], device=query.device
        ).unsqueeze(1)
        mask = torch.zeros(after.shape, dtype=query.dtype, device=query.device).masked_fill_(after, float("-inf"))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=params.scale
        )
        return PartialAttention(out, lse.float())
    return _attend_blocks(query, keys, values, params, offset=offset, window=None, dense=True)


def _ring(partition: Partition, position: int, known: int = 0, *, chunk_tokens: int | None = None) -> Route:
    return replace(ring(partition, position, known, chunk_tokens=chunk_tokens), saves_last_layer=False)


def _tsp(dense: bool) -> Forecast:
    return lambda costs, lengths: tsp_seconds(costs, sum(lengths), len(lengths), dense=dense)


_DENSE = Strategy("tsp-dense", partial(all_gather, is_dense=True), _tsp(True))
_CAUSAL = Strategy("tsp-causal", partial(all_gather, is_dense=False), _tsp(False))
_LENT_CAUSAL = replace(_CAUSAL, make=partial(all_gather, is_dense=False, saves_last_layer=True))
_SINGLE, _RING, _KVR = (STRATEGIES[name] for name in ("single", "ring", "kvr"))
_PUBLISHED_RING = replace(
    _RING,
    make=_ring,
    forecast=lambda costs, lengths: ring_seconds(costs, sum(lengths), len(lengths) // 2),
)
LENT: Mapping[str, Strategy] = {one.name: one for one in (_SINGLE, _DENSE, _LENT_CAUSAL, _RING, _KVR)}
PUBLISHED: Mapping[str, Strategy] = {one.name: one for one in (_SINGLE, _DENSE, _CAUSAL, _PUBLISHED_RING, _KVR)}
