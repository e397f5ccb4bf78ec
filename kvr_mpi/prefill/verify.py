"""Prove on the user's own model that every strategy gives what one process gives.

Rank 0 computes the truth with plain transformers; the rank that ends with a strategy's last token sends its
logits, its keys and values, and the greedy tokens it decodes with them, and rank 0 compares. In float32 they have
to agree within the noise of the sums; in a shorter type they may be no farther from the float32 truth than
transformers' own run in that type, times 1.5.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvr_mpi.kv.contents import layer_kv
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.kernels import without_kernels
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.compatibility import why_no_chunks
from kvr_mpi.prefill.one_prompt import Prefill, prefill_single, run_next
from kvr_mpi.prefill.registry import STRATEGIES, Strategy
from kvr_mpi.prefill.self_check import allowed_error
from kvr_mpi.transport import Transport, share_json

NEW_TOKENS = 32
# Of the logits' or the keys' spread: what float32 sums in another order may differ by (2.4e-5 was seen with
# SmolLM2 at 1024 tokens; leaving out one token of the prefix of a tiny model is off by 3e-2 and more).
NOISE = allowed_error(torch.float32)
SHORT_TYPE_FACTOR = 1.5
LOGITS_TAG, TOKENS_TAG, KEYS_TAG, VALUES_TAG = range(4)

Run = Callable[[Sequence[int]], Prefill]


@dataclass(frozen=True, slots=True)
class Finding:
    """One strategy at one length against one process."""

    strategy: str
    tokens: int
    logits_error: float  # largest difference, as a share of the truth's spread
    kv_error: float
    same_tokens: bool
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether everything agrees as it should; NaN agrees with nothing."""
        exact = self.logits_error <= self.allowed and self.kv_error <= self.allowed
        return exact and self.same_tokens


@dataclass(frozen=True, slots=True)
class _Result:
    """Logits, greedy tokens, and what each layer with keys and values holds of the last tokens it sees.

    Keys and values are (tokens, kv_heads, head_dim).
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    kv: list[tuple[torch.Tensor, torch.Tensor]]


def verify(loaded: LoadedModel, world: Transport, lengths: Sequence[int], seed: int = 0) -> Iterator[Finding]:
    """Check every strategy at every length; every rank iterates, and gets the same findings.

    Parameters
    ----------
    lengths : sequence of int
        Prompt lengths in tokens, each at least two for each rank.
    seed : int
        For the prompts and the random partitions.
    """
    draw = random.Random(seed)
    exact = loaded if loaded.dtype == torch.float32 else _in_float32(loaded)
    for tokens in lengths:
        ids = loaded.shape.sample_ids(tokens, draw.randrange(1, 1 << 20), draw.randrange(1 << 20))
        truth = plain = None
        if world.rank == 0:
            truth = _plain(exact, ids)
            plain = truth if exact is loaded else _plain(loaded, ids)
        world.barrier()
        prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
        for name, decode_rank, strategy in _strategies(loaded, world, tokens, draw):
            prefill = strategy(ids)
            result = _result(loaded, prefill) if world.rank == decode_rank else None
            del prefill
            found = _to_root(result, loaded, world, decode_rank, tokens)
            finding = None
            if found is not None and truth is not None and plain is not None:
                finding = _compare(name, tokens, found, truth, plain)
            yield Finding(**share_json(world, _as_dict(finding)))


def _strategies(
    loaded: LoadedModel, world: Transport, tokens: int, draw: random.Random
) -> Iterator[tuple[str, int, Run]]:
    """Name, decode rank, and how to run it: those of jobs as in jobs, the others as published."""
    for one in STRATEGIES.values():
        if one.is_plain or one.misfit(loaded) is not None:
            continue
        cuts = _cuts(tokens, world.size, draw) if one.has_cuts else {"": one.cut_evenly(tokens, world.size)}
        for how, partition in cuts.items():

            def run(ids: Sequence[int], one: Strategy = one, cut: Partition = partition) -> Prefill:
                return one.prefill(loaded, ids, cut, world, lends=one.in_jobs, reserve_tokens=NEW_TOKENS)

            name = f"{one.name} {how} {partition}" if how else one.name
            yield name, one.exchanges(partition)[0].decode_rank, run
        if one.takes_chunks and why_no_chunks(loaded) is None:
            cut, length = one.cut_evenly(tokens, world.size), draw.randrange(1, max(2, tokens // (2 * world.size)))

            def run_chunks(
                ids: Sequence[int], one: Strategy = one, cut: Partition = cut, many: int = length
            ) -> Prefill:
                return one.prefill(loaded, ids, cut, world, reserve_tokens=NEW_TOKENS, chunk_tokens=many)

            yield f"{one.name} in chunks of {length}", one.exchanges(cut)[0].decode_rank, run_chunks


def does_not_fit(loaded: LoadedModel) -> list[str]:
    """Say which strategies this model cannot run, and why."""
    reasons = ((one.name, one.misfit(loaded)) for one in STRATEGIES.values())
    return [f"{name} is left out: {why}" for name, why in reasons if why is not None]


def _cuts(tokens: int, size: int, draw: random.Random) -> dict[str, Partition]:
    """Partitions that are even, uneven, and with slices of one token."""
    partitions = {"even": Partition.even(tokens, size)}
    if size > 1:
        inner = sorted(draw.sample(range(1, tokens), size - 1))
        edges = [1] if size == 2 else [1, *range(tokens - size + 2, tokens)]
        partitions |= {
            "random": Partition((0, *inner, tokens)),
            "first slice long": Partition((0, *range(tokens - size + 1, tokens), tokens)),
            "slices of one token": Partition((0, *edges, tokens)),
        }
    return partitions


def _plain(loaded: LoadedModel, ids: Sequence[int]) -> _Result:
    prepare_model(loaded.model, chain=False)
    return _result(loaded, prefill_single(loaded.model, ids, loaded.device))


@torch.inference_mode()
def _result(loaded: LoadedModel, prefill: Prefill) -> _Result:
    """Copy the keys and values, then decode greedily after them."""
    assert prefill.logits is not None
    kv = []
    for layer_idx, layer in enumerate(loaded.shape.layers):
        pair = layer_kv(prefill.cache, layer_idx) if layer.elements else None
        if pair is not None:
            kept = _kept(layer, prefill.partition.tokens)
            kv.append((pair[0][-kept:].cpu().clone(), pair[1][-kept:].cpu().clone()))
    logits, written = prefill.logits, []
    for _ in range(NEW_TOKENS):
        written.append(int(logits.argmax()))
        logits = run_next(loaded.model, prefill, torch.tensor([[written[-1]]], device=loaded.device))
    return _Result(prefill.logits.cpu(), torch.tensor(written), kv)


def _kept(layer: LayerShape, tokens: int) -> int:
    """Tokens of which plain transformers still has a layer's keys and values: all, or those before a window's last."""
    return tokens if layer.visibility.size is None else min(tokens, layer.visibility.size - 1)


def _to_root(
    result: _Result | None, loaded: LoadedModel, world: Transport, decode_rank: int, tokens: int
) -> _Result | None:
    """Bring the decode rank's result to rank 0."""
    if decode_rank == 0 or world.rank not in (0, decode_rank):
        return result
    if result is not None:
        sends = [world.isend(result.logits, 0, LOGITS_TAG), world.isend(result.tokens, 0, TOKENS_TAG)]
        for keys, values in result.kv:
            sends += [world.isend(keys.contiguous(), 0, KEYS_TAG), world.isend(values.contiguous(), 0, VALUES_TAG)]
        for send in sends:
            send.wait()
        return None
    logits, written = torch.empty(loaded.shape.vocab_size), torch.empty(NEW_TOKENS, dtype=torch.int64)
    kv = []
    for layer in loaded.shape.layers:
        if not layer.elements:
            continue
        shape = _kept(layer, tokens), layer.num_kv_heads
        kv.append(
            (
                torch.empty(*shape, layer.key_dim, dtype=loaded.dtype),
                torch.empty(*shape, layer.value_dim, dtype=loaded.dtype),
            )
        )
    receives = [world.irecv(logits, decode_rank, LOGITS_TAG), world.irecv(written, decode_rank, TOKENS_TAG)]
    for keys, values in kv:
        receives += [world.irecv(keys, decode_rank, KEYS_TAG), world.irecv(values, decode_rank, VALUES_TAG)]
    for receive in receives:
        receive.wait()
    return _Result(logits, written, kv)


def _compare(name: str, tokens: int, found: _Result, truth: _Result, plain: _Result) -> Finding:
    allowed, same_tokens = NOISE, bool(torch.equal(found.tokens, truth.tokens))
    if plain is not truth:  # a shorter type: tokens may differ, and so may transformers' own
        allowed = SHORT_TYPE_FACTOR * max(_error(plain.logits, truth.logits), _kv_error(plain, truth))
        same_tokens = True
    return Finding(name, tokens, _error(found.logits, truth.logits), _kv_error(found, truth), same_tokens, allowed)


def _kv_error(found: _Result, truth: _Result) -> float:
    errors = []
    for mine, theirs in zip(found.kv, truth.kv, strict=True):
        for tensor, expected in zip(mine, theirs, strict=True):
            kept = expected.shape[0]  # a plain sliding-window cache keeps only its last tokens
            errors.append(_error(tensor[tensor.shape[0] - kept :], expected))
    return max(errors)


def _error(found: torch.Tensor, truth: torch.Tensor) -> float:
    spread = max(float(truth.float().max() - truth.float().min()), 1e-6)
    worst = (found.float() - truth.float()).abs().max()
    return float(worst) / spread


def _in_float32(loaded: LoadedModel) -> LoadedModel:
    with without_kernels(loaded.model):
        return replace(loaded, model=copy.deepcopy(loaded.model).float(), dtype=torch.float32)


def _as_dict(finding: Finding | None) -> dict[str, object]:
    return {} if finding is None else {name: getattr(finding, name) for name in Finding.__slots__}
