"""Verify on the user's own model that chains give the results of one process.

Rank 0 computes the reference with plain transformers, and has the last slice of every chain. It compares the logits,
the keys and values, and the tokens that it decodes greedily. In float32 they have to agree within rounding
errors. In a shorter dtype, their difference from the float32 reference may be at most 1.5 times that of transformers'
own run in that dtype.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.kernels import without_kernels
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import Continuation, allowed_error, continued, differences
from kvr_mpi.prefill.one_prompt import prefill_kvr, prefill_single, why_no_chunks
from kvr_mpi.transport import Transport, share_json

NEW_TOKENS = 32
NOISE = allowed_error(torch.float32)
SHORT_TYPE_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of a chain with one process.

    slices : how the prompt is cut.
    """

    slices: str
    tokens: int
    logits_error: float  # largest difference, as a share of the truth's spread
    kv_error: float  # of keys, values and states
    same_tokens: bool
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether everything agrees."""
        exact = self.logits_error <= self.allowed and self.kv_error <= self.allowed
        return exact and self.same_tokens


def verify(
    loaded: LoadedModel, world: Transport, lengths: Sequence[int], seed: int = 0, *, exact: LoadedModel | None = None
) -> Iterator[Comparison]:
    """Check chains with several partitions at every length; every rank iterates, and gets the same findings.

    lengths : prompt lengths in tokens, each at least two for each rank.
    seed : for the prompts and the random partitions.
    exact : the model in float32 that computes the reference, such as on another device; None: this one.
    """
    draw, is_root = random.Random(seed), world.rank == 0
    if exact is None:
        exact = _in_float32(loaded) if is_root and loaded.dtype != torch.float32 else loaded
    for tokens in lengths:
        ids = loaded.shape.sample_ids(tokens, draw.randrange(1, 1 << 20), draw.randrange(1 << 20))
        if is_root:
            truth = _plain(exact, ids)
            plain = truth if exact is loaded else _plain(loaded, ids)
        world.barrier()
        prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
        for name, partition, chunk_tokens in _cuts(loaded, world.size, tokens, draw):
            prefill = prefill_kvr(
                loaded, ids, partition, world, reserve_tokens=NEW_TOKENS, chunk_tokens=chunk_tokens, last=0
            )
            finding = None
            if is_root:
                finding = asdict(_compare(name, tokens, continued(loaded.model, prefill, NEW_TOKENS), truth, plain))
            del prefill
            yield Comparison(**share_json(world, finding))


def _cuts(
    loaded: LoadedModel, size: int, tokens: int, draw: random.Random
) -> Iterator[tuple[str, Partition, int | None]]:
    """Yield partitions that are even, uneven, and with slices of one token, each with its name and chunk size."""
    even = Partition.even(tokens, size)
    partitions = {"even": even}
    if size > 1:
        inner = sorted(draw.sample(range(1, tokens), size - 1))
        edges = [1] if size == 2 else [1, *range(tokens - size + 2, tokens)]
        partitions |= {
            "random": Partition((0, *inner, tokens)),
            "first slice long": Partition((0, *range(tokens - size + 1, tokens), tokens)),
            "slices of one token": Partition((0, *edges, tokens)),
        }
    for name, partition in partitions.items():
        yield f"{name} {partition}", partition, None
    if why_no_chunks(loaded) is None:
        length = draw.randrange(1, max(2, tokens // (2 * size)))
        yield f"in chunks of {length}", even, length


def _plain(loaded: LoadedModel, ids: Sequence[int]) -> Continuation:
    prepare_model(loaded.model, chain=False)
    return continued(loaded.model, prefill_single(loaded.model, ids, loaded.device), NEW_TOKENS)


def _compare(name: str, tokens: int, found: Continuation, truth: Continuation, plain: Continuation) -> Comparison:
    allowed, same_tokens = NOISE, found.tokens == truth.tokens
    if plain is not truth:  # a shorter type or another device: tokens may differ, and so may transformers' own
        allowed, same_tokens = max(NOISE, SHORT_TYPE_FACTOR * max(_errors(plain, truth))), True
    return Comparison(name, tokens, *_errors(found, truth), same_tokens, allowed)


def _errors(found: Continuation, truth: Continuation) -> tuple[float, float]:
    """Return the errors of logits, and of keys, values and states (0 if there are none)."""
    (_, logits), *held = differences(replace(found, steps=[]), truth)
    return logits, max((share for _, share in held), default=0.0)


def _in_float32(loaded: LoadedModel) -> LoadedModel:
    with without_kernels(loaded.model):
        return replace(loaded, model=copy.deepcopy(loaded.model).float(), dtype=torch.float32)
