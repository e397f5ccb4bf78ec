"""Strategies of others, as rivals: the paper's all-gather (TSP), and zigzag ring attention.

`PUBLISHED` has all strategies without the cut of the last layer, which is ours; `LENT` has them with it.

Rivals do not run over NCCL: all ranks send and receive at once, on streams that CUDA does not promise to run side by
side (NVIDIA/nccl#783). On an H200, `kvr verify` hung where it ran a ring: of two ranks, and later of four.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.costs.costmodel import single_seconds
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.kv.attention import PartialAttention, _attend_blocks, attend, attend_range
from kvr_mpi.kv.chain import LAYERS_AHEAD
from kvr_mpi.kv.clock import Clock
from kvr_mpi.kv.layer import RowCache, RowLayer
from kvr_mpi.kv.pool import LayerBuffers
from kvr_mpi.kv.relay import Range, join_ranges
from kvr_mpi.kv.sequence import Pair, SequenceKV, by_head
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams, run_model
from kvr_mpi.model.layer_chunks import UnreadError
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, own_pool, prefill_kvr
from kvr_mpi.topology import following, others_after, others_before, preceding
from kvr_mpi.transport import Transport
from kvr_mpi.transport.base import FIRST_PROMPT_TAG
from kvr_mpi.transport.forwarder import Forwarder, Transfer


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank does with the slices of a prompt, in each layer.

    own : numbers of the slices that it computes, ascending.
    sends : numbers of its slices, and the ranks that it sends them to.
    steps : numbers of the slices that it receives, each with the rank that sends it and the one to forward it to as it
        arrives; those of a step are waited for, and attended to, together.
    decode_rank : the rank that has the last slice.
    """

    own: Sequence[int]
    sends: Sequence[tuple[int, int]]
    steps: Sequence[Sequence[tuple[int, int, int | None]]]
    decode_rank: int


def all_gather(size: int, rank: int) -> Exchange:
    """Send each slice to all ranks; a rank receives all keys and values in one step (TSP, section 3, Fig. 4)."""
    received = [(source, source, None) for source in range(size) if source != rank]
    return Exchange([rank], [(rank, dest) for dest in others_after(rank, size)], [received], size - 1)


def ring(size: int, rank: int) -> Exchange:
    """Pass segments around a zigzag ring: rank r owns the r-th stretch from the front and the r-th from the back.

    Ranks compute the same amount in every step, without tuning; every segment crosses all links but one. Segments are
    forwarded as they arrive. A rank attends to both stretches of another rank in one step, in the order of arrival: for
    an earlier rank, all queries attend to its near stretch; for a later rank, the far stretch's queries attend to both.
    """

    def stretches(rank: int) -> tuple[int, int]:
        return rank, 2 * size - 1 - rank

    dest, source = following(rank, size), preceding(rank, size)
    steps = [
        [(number, source, dest if dest != origin else None) for number in stretches(origin)]
        for origin in others_before(rank, size)
    ]
    sends = [(number, dest) for number in stretches(rank)] if size > 1 else []
    return Exchange(stretches(rank), sends, steps, 0)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to prefill a prompt.

    name : in rows, tables and plots.
    exchange : of a rival: what a rank does, by the number of ranks and its own.
    stretches : slices of each rank.
    is_dense : a rank computes its slice against the whole prompt, and masks the tokens after it, as in the paper.
    saves_last_layer : output of the last layer that is not used is not computed.
    """

    name: str
    exchange: Callable[[int, int], Exchange] | None = None
    stretches: int = 1
    is_dense: bool = False
    saves_last_layer: bool = False

    @property
    def is_single(self) -> bool:
        """Whether it is plain transformers on one rank."""
        return self.name == "single"

    @property
    def is_chain(self) -> bool:
        """Whether it is ours. Then slices are tuned; otherwise they are even."""
        return self.exchange is None and not self.is_single

    def cut_evenly(self, tokens: int, ranks: int) -> Partition:
        """Cut a prompt into slices of the same length."""
        return Partition.even(tokens, self.stretches * ranks)

    def check(self, loaded: LoadedModel, ranks: Transport) -> None:
        """Refuse models and transports that it does not support; raise `ModelError` or `ConfigError`."""
        if self.exchange is None:
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

    @torch.inference_mode()
    def prefill(
        self, loaded: LoadedModel, ids: Sequence[int], cut: Partition, ranks: Transport, reserve_tokens: int = 0
    ) -> Prefill:
        """Prefill a prompt on all ranks; the one with the last slice has its logits, keys and values."""
        if self.exchange is None:
            return prefill_kvr(loaded, ids, cut, ranks, reserve_tokens=reserve_tokens)
        exchange, logits = self.exchange(ranks.size, ranks.rank), None
        began, forwarder = time.perf_counter(), Forwarder(ranks, device=loaded.device)
        try:
            forwarder.begin()
            cache = ExchangeCache(self, loaded, exchange, cut.slices(), forwarder, reserve_tokens)
            row = torch.tensor([ids], device=loaded.device)[:, cache.places]
            positions = None  # contiguous ones are counted by the model
            if self.stretches > 1:
                positions = cache.places.unsqueeze(0) + loaded.shape.first_position
            with contextlib.suppress(UnreadError):
                found = run_model(loaded.model, row, cache, positions=positions, chunk_lengths=cache.chunk_lengths)[0]
                logits = found if cache.sequence is not None else None
            forwarder.wait_for_compute()
            seconds = time.perf_counter() - began
            forwarder.close()
        except BaseException:
            forwarder.abandon()
            raise
        times = cache.clock.read(began, began + seconds)
        return Prefill(
            cut,
            cache.sequence,
            logits,
            seconds,
            wait_s=times.wait_s,
            sent_bytes=cache.sent_bytes,
            last=exchange.decode_rank,
            strategy=self.name,
            began_s=began,
        )


class ExchangeCache(RowCache):
    """The cache of one rank: in each layer it receives the keys and values of all other slices.

    sequence : on the decode rank, all keys and values.
    places : positions of this rank's tokens (tokens,), int64.
    chunk_lengths : tokens of each layer that are processed together (`layer_chunks`).
    """

    prefilling = True

    def __init__(
        self,
        strategy: Strategy,
        loaded: LoadedModel,
        exchange: Exchange,
        slices: Sequence[Range],
        forwarder: Forwarder,
        reserve_tokens: int,
    ) -> None:
        shapes = loaded.shape.layers
        super().__init__([RowLayer(self, idx, shape) for idx, shape in enumerate(shapes)])
        self.strategy, self.exchange, self.slices, self.forwarder = strategy, exchange, slices, forwarder
        self.own, self.tokens = [slices[number] for number in exchange.own], slices[-1][1]
        self.length, self.clock, self.sent_bytes = self.own[0][0], Clock(loaded.device), 0
        self.sequence: SequenceKV | None = None
        if forwarder.transport.rank == exchange.decode_rank:
            self.sequence = SequenceKV(loaded, own_pool(loaded), self.tokens + reserve_tokens)
            self.sequence.length = self.tokens
        self._kept = [idx for idx, shape in enumerate(shapes) if shape.elements]
        self.places = torch.cat([torch.arange(*bounds, device=loaded.device) for bounds in self.own])
        self.chunk_lengths = [[fresh := len(self.places)] for _ in shapes]
        if strategy.saves_last_layer and self.sequence is not None and loaded.cuts_last_layer and fresh > 1:
            self.chunk_lengths[self._kept[-1]] = [fresh - 1, 1]  # the last token alone
        self._done = dict.fromkeys(self._kept, 0)
        self._buffers = LayerBuffers(max(shape.elements for shape in shapes), self.tokens, loaded.dtype, loaded.device)
        self._slabs: dict[int, torch.Tensor] = {}
        self._sends: dict[int, list[Transfer]] = {}
        self._arriving: dict[int, dict[int, Transfer]] = {}
        for idx in self._kept[:LAYERS_AHEAD]:
            self._post(idx)

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Return the tokens to run and the length of the whole prompt."""
        return [(tokens, self.tokens)]

    def _post(self, at: int) -> None:
        """Post the receives of a layer and announce its sends, once."""
        if at in self._sends:
            return
        shape, tag = self.layers[at].shape, FIRST_PROMPT_TAG + at * len(self.slices)
        self._slabs[at], free = self._buffers.take(shape)
        self._arriving[at] = {}
        for number, source, dest in itertools.chain(*self.exchange.steps):
            rows = self._slabs[at][slice(*self.slices[number])]
            self._arriving[at][number] = self.forwarder.receive(rows, source, tag + number, dest, layer=at, free=free)
            self.sent_bytes += 0 if dest is None else rows.nbytes
        own = [(self._slabs[at][slice(*self.slices[number])], number, dest) for number, dest in self.exchange.sends]
        self._sends[at] = [self.forwarder.announce(rows, dest, tag + number, layer=at) for rows, number, dest in own]
        self.sent_bytes += sum(rows.nbytes for rows, _, _ in own)

    def append(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Write new tokens of this rank, and send its slices when they are complete."""
        at = layer.layer_idx
        self.clock.mark("layer", at)
        for each in self._kept[self._kept.index(at) :][: 1 + LAYERS_AHEAD]:
            self._post(each)
        done = self._done[at]
        self._done[at] += keys.shape[2]
        read = -done
        for first, last in self.own:  # those of the tokens last appended
            some = slice(max(read, 0), min(read + last - first, keys.shape[2]))
            to = slice(first + some.start - read, first + some.stop - read)
            for slab, rows in zip(by_head(self._slabs[at], layer.shape), (keys, values), strict=True):
                if some.start < some.stop:
                    slab[:, to] = rows[0, :, some]
            read += last - first
        if self._done[at] == len(self.places):
            for transfer in self._sends[at]:
                self.forwarder.send(transfer)
            if at == self._kept[-1] and self.strategy.saves_last_layer and self.sequence is None:
                self.current = None
                raise UnreadError
        return keys, values

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from the tokens last appended to all tokens that each of them sees."""
        at, shape, seen, fresh = layer.layer_idx, query.shape, layer.shape.visibility, keys.shape[2]
        if fresh == 1:  # the token's heads may come folded into the query length
            query = query.reshape(1, -1, 1, shape[-1])
        reads_last = at == self._kept[-1] and self.strategy.saves_last_layer
        if reads_last and self._done[at] < len(self.places):
            raise UnreadError
        skipped, sees_all = fresh - 1 if reads_last else 0, not reads_last and seen.sees_all(self.tokens)
        if not sees_all or self.strategy.is_dense:
            self._wait_for(at, self._arriving[at])
        if not sees_all:
            ranges = [(self.tokens - 1, self.tokens)] if reads_last else self.own
            parts, read = list[PartialAttention](), skipped
            for first, last in ranges:
                some = query[:, :, read : (read := read + last - first)]
                parts.append(attend_range(some, (first, last), lambda *bounds: self._rows(at, *bounds), seen, params))
            part = PartialAttention.join(parts)
        elif self.strategy.is_dense:
            part = attend_masked(query, *self._rows(at, 0, self.tokens), params, self.length)
        else:
            part = self._attend_in_steps(at, query, keys, values, params)
        self._finish_layer(at)
        out = part.finish(params).to(query.dtype)
        whole = torch.nn.functional.pad(out, (0, 0, skipped, 0)) if skipped else out
        return whole.reshape(*shape[:-1], layer.shape.out_dim)

    def _attend_in_steps(
        self, at: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> PartialAttention:
        """Attend to this rank's tokens while the others are in flight, then to these step by step."""
        lengths = [last - first for first, last in self.own]
        bounds = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))
        whole = attend(query, keys, values, params, causal=query.shape[2] > 1)
        parts = [whole.cut(*each) for each in bounds]
        for step in self.exchange.steps:
            numbers = [number for number, _, _ in step]
            self._wait_for(at, numbers)
            earlier = [self.slices[number] for number in numbers if number < self.exchange.own[-1]]
            for first, last in join_ranges(earlier):
                behind = next(index for index, (start, _) in enumerate(self.own) if last <= start)
                found = attend(query[:, :, bounds[behind][0] :], *self._rows(at, first, last), params)
                for index in range(behind, len(parts)):
                    some = (each - bounds[behind][0] for each in bounds[index])
                    parts[index] = parts[index].merge(found.cut(*some))
        return PartialAttention.join(parts)

    def _wait_for(self, at: int, numbers: Any) -> None:
        """Wait for slices of a layer, and count the time."""
        for number in list(numbers):
            if (transfer := self._arriving[at].pop(number, None)) is not None:
                self._sends[at].append(transfer)  # to be forwarded
                self.clock.mark("wait", at, transfer.span.peer)
                self.forwarder.wait(transfer)
                self.clock.mark("continue")

    def _rows(self, at: int, first: int, last: int) -> Pair:
        """Keys and values of a range of tokens, as views (1, kv_heads, tokens, dim)."""
        keys, values = by_head(self._slabs[at], self.layers[at].shape)
        return keys[None, :, first:last], values[None, :, first:last]

    def _finish_layer(self, at: int) -> None:
        """Keep the layer on the decode rank, and reuse the buffers of layers that are sent."""
        if self.sequence is not None:
            self.sequence.admit(at, 0, *self._rows(at, 0, self.tokens))
        self.forwarder.progress()
        for each in [each for each in self._slabs if each <= at]:
            if all(transfer.through for transfer in self._sends[each]):
                self._buffers.give_back(self._slabs.pop(each))


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
    seen = offset + query.shape[2]
    if seen < keys.shape[2]:  # computed, and not used
        _attend_blocks(query, keys[:, :, seen:], values[:, :, seen:], params, offset=None, window=None)
    return _attend_blocks(query, keys[:, :, :seen], values[:, :, :seen], params, offset=offset, window=None)


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


def _all(*, lends: bool) -> dict[str, Strategy]:
    found = [
        Strategy("single"),
        Strategy("tsp-dense", all_gather, is_dense=True),
        Strategy("tsp-causal", all_gather, saves_last_layer=lends),
        Strategy("ring", ring, stretches=2, saves_last_layer=lends),
        Strategy("kvr"),
    ]
    return {one.name: one for one in found}


LENT: Mapping[str, Strategy] = _all(lends=True)
PUBLISHED: Mapping[str, Strategy] = _all(lends=False)
