"""Strategies of others, as rivals: the paper's all-gather (TSP), and zigzag ring attention.

`PUBLISHED` has all strategies without the cut of the last layer, which is ours; `LENT` has them with it.

Rivals do not run over NCCL: all ranks send and receive at once, on streams that CUDA does not promise to run side by
side (NVIDIA/nccl#783). On an H200, `kvr verify` hung where it ran a ring: of two ranks, and later of four.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from kvr_mpi.costs.costmodel import single_seconds
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.kv.attention import PartialAttention, _attend_blocks, attend
from kvr_mpi.kv.relay import Hop, MakeRoute, Range, Route, relay
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.partition import Partition
from kvr_mpi.topology import following, others_after, others_before, preceding
from kvr_mpi.transport import Transport


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to prefill a prompt.

    name : in rows, tables and plots.
    make : makes its routes; None: plain transformers on one rank.
    stretches : slices of each rank.
    in_order : each rank's tokens follow those of the rank before. Then slices are tuned; otherwise they are even.
    """

    name: str
    make: MakeRoute | None
    stretches: int = 1
    in_order: bool = False

    def cut_evenly(self, tokens: int, ranks: int, known: int = 0) -> Partition:
        """Cut a prompt into slices of the same length, after the known tokens."""
        return Partition.even(tokens - known, self.stretches * ranks).after(known)

    def routes(self, partition: Partition, known: int = 0) -> list[Route]:
        """Make the route of every position, first slice first."""
        assert self.make is not None, self.name
        return [self.make(partition, position, known) for position in range(partition.size // self.stretches)]

    def check(self, loaded: LoadedModel, ranks: Transport) -> None:
        """Refuse models and transports that it does not support; raise `ModelError` or `ConfigError`."""
        if self.make is None or self.in_order:
            return
        if ranks.in_streams:
            raise ConfigError(f"{self.name} can deadlock over NCCL: use --transport staged, or leave it out")
        if not loaded.attends_in_parts:
            why = "its attention cannot be computed in parts"
        elif self.stretches > 1 and loaded.shape.counts_cache:
            why = "its attention temperature depends on the length of the cache"
        elif self.stretches > 1 and "position_ids" not in inspect.signature(loaded.model.forward).parameters:
            why = "it counts positions itself and accepts none"
        elif loaded.shape.has_states:
            why = "its recurrent layers need the state of the tokens before"
        else:
            return
        raise ModelError(f"{loaded.shape.architecture}: {why}, so {self.name} does not run it")


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
    return Route(
        partition,
        position,
        size - 1,
        size,
        owned=(own,),
        chunks=((own,),),
        hops=(*(Hop(position, own, None, dest) for dest in others_after(position, size)), *others),
        saves_last_layer=saves_last_layer,
        attend=attend_masked if is_dense else attend_before,
        slots=2 * (size - 1),
    )


def attend_before(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, offset: int
) -> PartialAttention:
    """Attend causally, without computing scores of later keys; the first query is aligned with key `offset`."""
    before, own = slice(offset), slice(offset, offset + query.shape[2])
    part = attend(query, keys[:, :, own], values[:, :, own], params, causal=True)
    return part.merge(attend(query, keys[:, :, before], values[:, :, before], params)) if offset else part


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
    if params.expand is not None:
        keys, values = params.expand(keys, values)
    return _attend_blocks(query, keys, values, params, offset=offset, window=None, dense=True)


def ring(
    partition: Partition,
    position: int,
    known: int = 0,
    *,
    chunk_tokens: int | None = None,
    saves_last_layer: bool = False,
) -> Route:
    """Pass segments around a zigzag ring: rank r owns the r-th stretch from the front and the r-th from the back.

    Ranks compute the same amount in every step, without tuning; every segment crosses all links but one. Segments are
    forwarded as they arrive. A rank attends to them in the order of arrival: all queries attend to an earlier rank's
    near stretch; the far stretch's queries attend to both stretches of a later rank.

    The ring does not support chunks: a rank's last tokens see those of all other ranks, so ranks would wait for each
    other's chunks, and compute one at a time.
    """
    size = partition.size // 2
    halves = partition.slices(known)

    def stretches(rank: int) -> list[tuple[int, Range]]:
        return [(half, halves[half]) for half in (rank, 2 * size - 1 - rank)]

    dest, source = following(position, size), preceding(position, size)
    hops = [Hop(half, bounds, None, dest) for half, bounds in stretches(position)]
    for rank in others_before(position, size):
        hops += [Hop(half, bounds, source, dest if dest != rank else None) for half, bounds in stretches(rank)]
    near, far = (bounds for _, bounds in stretches(position))
    return Route(
        partition,
        position,
        0,  # owns the last stretch
        partition.size,
        owned=(near, far),
        chunks=((near, far),),
        hops=tuple(hops),
        saves_last_layer=saves_last_layer,
        slots=4,  # both stretches of two ranks: then a receive waits only for earlier receives
    )


def tsp_seconds(costs: Costs, tokens: float, ranks: int, *, dense: bool = True) -> float:
    """Time to the first token of tensor and sequence parallelism: even slices, an all-gather in every layer.

    If `dense`, every rank attends to the whole prompt and masks the tokens after its own. Otherwise these are skipped,
    and the last rank has the most work.
    """
    if ranks == 1:
        return single_seconds(costs, tokens)
    own = tokens / ranks
    gather_s = costs.link_latency_s * (ranks - 1) + (tokens - own) * costs.kv_bytes / costs.link_bytes_per_s
    seen = tokens if dense else tokens - own / 2
    work_s = own * (costs.token_s + seen * costs.pair_s) / min(costs.speeds or (1.0,))
    return costs.layers * max(costs.layer_s + gather_s + work_s, costs.launch_floor_s) + costs.head_s


def ring_seconds(costs: Costs, tokens: float, ranks: int) -> float:
    """Time to the first token of zigzag ring attention, with transfers hidden behind the previous step."""
    if ranks == 1:
        return single_seconds(costs, tokens)
    own = tokens / ranks
    copies_s = (tokens - own) * costs.copy_token_s
    speed = min(costs.speeds or (1.0,))
    # A rank's two ranges of own / 2 tokens attend to another rank's two ranges: half of the four blocks is causal.
    step_s = own**2 / 2 * costs.pair_s / speed
    hop_s = own * costs.kv_bytes / costs.link_bytes_per_s + costs.link_latency_s
    attention_s = step_s + (ranks - 1) * max(step_s, hop_s)
    tokens_s = costs.layer_s + (own * costs.token_s + copies_s) / speed
    return costs.layers * max(tokens_s + attention_s, costs.launch_floor_s) + costs.head_s


_SINGLE, _KVR = Strategy("single", None), Strategy("kvr", relay, in_order=True)


def _all(*, lends: bool) -> dict[str, Strategy]:
    dense = Strategy("tsp-dense", partial(all_gather, is_dense=True))
    causal = Strategy("tsp-causal", partial(all_gather, is_dense=False, saves_last_layer=lends))
    zigzag = Strategy("ring", partial(ring, saves_last_layer=lends), stretches=2)
    return {one.name: one for one in (_SINGLE, dense, causal, zigzag, _KVR)}


LENT: Mapping[str, Strategy] = _all(lends=True)
PUBLISHED: Mapping[str, Strategy] = _all(lends=False)
