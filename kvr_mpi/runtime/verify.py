"""Verify on the user's own model that jobs give the results of one process of plain transformers.

Rank 0 computes the reference with plain transformers, and has the last slice of every chain. It compares the logits,
the keys and values, and the tokens that it decodes greedily. In float32 they have to agree within rounding
errors. In a shorter dtype, their difference from the float32 reference may be at most 1.5 times that of transformers'
own run in that dtype; both are given the tokens of the reference.

What runs is what jobs run: our kernels and attention, prompts in packed rows, the decode batch with its caches (on GPUs
pages and recorded steps), and a prompt that continues keys and values stored in a file.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from kvr_mpi.decode.group import BatchEntry, Group
from kvr_mpi.kv.chain import layer_kv
from kvr_mpi.kv.pool import PAGE_ROWS, Pool, pages_for
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.kernels import without_kernels
from kvr_mpi.model.rope import depends_on_length
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import Continuation, allowed_error, continued, copy_layers, differences
from kvr_mpi.prefill.one_prompt import Prefill, own_pool, prefill_kvr, prefill_single, why_no_chunks
from kvr_mpi.prefill.packed import PACK_TOKENS, prefill_packed, why_never_packed
from kvr_mpi.prefill.self_check import why_not_packed
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.log import Header
from kvr_mpi.store.prefix import StoredPrefix
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import read_results
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.transport.local import LocalTransport

NEW_TOKENS = 32
NOISE = allowed_error(torch.float32)
SHORT_TYPE_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of a chain, or of prompts in a row, with one process.

    slices : how the prompt is cut, or what else is tried.
    """

    slices: str
    tokens: int
    logits_error: float  # largest difference, as a share of the truth's spread
    kv_error: float  # of keys, values and states
    same_tokens: bool
    allowed: float

    @property
    def is_finite(self) -> bool:
        """Whether all results are numbers."""
        return math.isfinite(self.logits_error + self.kv_error + self.allowed)

    @property
    def holds(self) -> bool:
        """Whether everything agrees."""
        exact = self.logits_error <= self.allowed and self.kv_error <= self.allowed
        return exact and self.same_tokens and self.is_finite


def verify(
    loaded: LoadedModel, world: Transport, lengths: Sequence[int], seed: int = 0, *, exact: LoadedModel | None = None
) -> Iterator[Comparison]:
    """Check chains with several partitions at every length, and on rank 0 rows and stored prompts.

    Every rank iterates, and gets the same findings.

    lengths : prompt lengths in tokens, each at least two for each rank.
    seed : for the prompts and the random partitions.
    exact : the model in float32 that computes the reference, such as on another device; None: this one.
    """
    draw, is_root = random.Random(seed), world.rank == 0
    if exact is None:
        exact = _in_float32(loaded) if is_root and loaded.dtype != torch.float32 else loaded
    most = 2 * pages_for(max(lengths) + NEW_TOKENS) + sum(
        pages_for(length + NEW_TOKENS) for length in _lengths_of_row(loaded, max(lengths))
    )
    here = _Here(loaded, exact, most * PAGE_ROWS) if is_root else None
    for tokens in lengths:
        ids = loaded.shape.sample_ids(tokens, draw.randrange(1, 1 << 20), draw.randrange(1 << 20))
        if here is not None:
            here.begin(ids)
        world.barrier()
        prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
        for name, partition, chunk_tokens in _cuts(loaded, world.size, tokens, draw):
            prefill = prefill_kvr(
                loaded,
                ids,
                partition,
                world,
                reserve_tokens=NEW_TOKENS,
                chunk_tokens=chunk_tokens,
                last=0,
                pool=None if here is None else here.pool,
            )
            finding = None if here is None else asdict(here.compare(name, [ids], [prefill]))
            prefill.release()
            yield Comparison(**share_json(world, finding))
        row = [ids[:length] for length in _lengths_of_row(loaded, tokens)]
        finding = None
        if here is not None:
            what = f"{len(row)} prompts in a row" if here.why_alone is None else "prompts one by one"
            finding = asdict(here.compare(what, row, here.run_row(row)))
        yield Comparison(**share_json(world, finding))
        if why_not_stored(loaded) is None:
            finding = None
            if here is not None:  # no longer than prompts of a row, since it is written to a temporary file
                finding = asdict(here.compare("stored, and continued", row[:1], [here.ask(row[0])]))
            yield Comparison(**share_json(world, finding))


class _Here:
    """What rank 0 runs and compares.

    why_alone : why prompts are not packed; None if they are.
    room : tokens that a paged pool has to hold.
    pool : of the documents.
    """

    def __init__(self, loaded: LoadedModel, exact: LoadedModel, room: int) -> None:
        self._loaded, self._exact = loaded, exact
        prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
        self.pool, self.why_alone = own_pool(loaded), None
        if loaded.device.type == "cuda":
            pool = Pool(loaded.shape.layers, loaded.dtype, loaded.device, room)
            self.pool = pool if why_not_packed(loaded, pool) is None else self.pool
        # A model that is given its positions runs packed; if not, what jobs do instead would hide an error of ours.
        if not self.pool.is_paged and "position_ids" in inspect.signature(loaded.model.forward).parameters:
            self.why_alone = why_never_packed(loaded)
        elif not self.pool.is_paged:
            self.why_alone = why_not_packed(loaded)
        self._group = Group(loaded, why_alone=self.why_alone)
        self._truths: dict[tuple[int, ...], tuple[Continuation, Continuation]] = {}

    def begin(self, ids: Sequence[int]) -> None:
        """Compute the references of a prompt and of the row that begins like it; forget those before."""
        self._truths = {}
        for length in {len(ids), *_lengths_of_row(self._loaded, len(ids))}:
            prompt = list(ids[:length])
            truth = _plain(self._exact, prompt)
            plain = truth if self._exact is self._loaded else _plain(self._loaded, prompt, truth.tokens)
            self._truths[tuple(prompt)] = truth, plain

    def run_row(self, prompts: Sequence[list[int]]) -> list[Prefill]:
        """Prefill short prompts as jobs do, in a packed row if the model supports it."""
        rows = [prompts] if self.why_alone is None else [[ids] for ids in prompts]
        return [
            prefill
            for row in rows
            for prefill in prefill_packed(self._loaded, row, reserve_tokens=NEW_TOKENS, pool=self.pool)
        ]

    def ask(self, ids: Sequence[int]) -> Prefill:
        """Store the keys and values of the first half of a prompt in a file, and continue from the file."""
        loaded, known = self._loaded, list(ids[: len(ids) // 2])
        whole = Partition((0, len(known)))
        with tempfile.TemporaryDirectory(prefix="kvr-verify-") as name:
            model = {"name": loaded.name, "architecture": loaded.shape.architecture, "dtype": str(loaded.dtype)}
            writer = ResultWriter(Path(name), 0, Header({"model": loaded.fingerprint}, model), 1)
            cache = prefill_kvr(loaded, known, whole, LocalTransport(), keeps_all=True).cache
            layers = [layer_kv(cache, layer) for layer in range(len(loaded.shape.layers))]
            writer.write(
                Record("prompt", "done", slices=whole.bounds), layers, CachedTokens(tuple(known), (0, len(known)))
            )
            writer.close()
            pieces = read_results([Path(name)]).places["prompt"].pieces
            prefix = StoredPrefix("prompt", pieces, len(known)).open(ids, loaded, self.pool)
            (found,) = prefill_packed(loaded, [ids], reserve_tokens=NEW_TOKENS, prefix=prefix, pool=self.pool)
        return found

    @torch.inference_mode()
    def compare(self, name: str, prompts: Sequence[Sequence[int]], prefills: Sequence[Prefill]) -> Comparison:
        """Decode prompts together as jobs do, and compare them with their references."""
        truths = [self._truths[tuple(ids)] for ids in prompts]
        entries = [BatchEntry(prefill) for prefill in prefills]
        layers, steps = [copy_layers(each.cache) for each in prefills], list[torch.Tensor]()
        rows = self._group.rows(entries, None)
        for number in range(NEW_TOKENS):
            for entry, (truth, _) in zip(entries, truths, strict=True):
                entry.last_token = truth.tokens[number]
            logits = torch.cat([self._group.run(row) for row in rows]).cpu()
            steps.append(logits)
        self._group.forget_rows()
        for prefill in prefills:
            prefill.release()
        found = list[Comparison]()
        for at, (prefill, (truth, plain)) in enumerate(zip(prefills, truths, strict=True)):
            assert prefill.logits is not None, "rank 0 has the last slice"
            mine = Continuation(prefill.logits.cpu(), layers[at], truth.tokens, [each[at] for each in steps])
            found.append(_compare(name, len(prompts[0]), mine, truth, plain))
        return Comparison(
            name,
            len(prompts[0]),
            max(each.logits_error for each in found),
            max(each.kv_error for each in found),
            all(each.same_tokens for each in found),
            max(each.allowed for each in found),
        )


def _lengths_of_row(loaded: LoadedModel, tokens: int) -> list[int]:
    """Return the lengths of prompts that run in one row beside, or instead of, a prompt of `tokens`."""
    longest = min(tokens, PACK_TOKENS[loaded.device.type] // 2)
    return [longest, max(1, longest // 2), max(1, longest // 3)]


def why_not_stored(loaded: LoadedModel) -> str | None:
    """Return why a model's stored prompts are not continued from a file; None if they are."""
    if loaded.shape.has_states:
        return "its recurrent layers have states, which are not stored"
    if kinds := depends_on_length(loaded.model):
        return f"its rotary embedding ({kinds}) depends on the whole prompt's length"
    return None


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


def _plain(loaded: LoadedModel, ids: Sequence[int], given: Sequence[int] = ()) -> Continuation:
    prepare_model(loaded.model, chain=False)
    return continued(loaded.model, prefill_single(loaded.model, ids, loaded.device), NEW_TOKENS, given)


def _compare(name: str, tokens: int, found: Continuation, truth: Continuation, plain: Continuation) -> Comparison:
    """Compare logits, keys and values, and the likeliest tokens after those of the reference."""
    chosen = [int(each.argmax()) for each in (found.logits, *found.steps[:-1])]
    allowed, same_tokens = NOISE, chosen == truth.tokens
    if plain is not truth:  # a shorter type or another device: tokens may differ, and so may transformers' own
        allowed, same_tokens = max(NOISE, SHORT_TYPE_FACTOR * max(_errors(plain, truth))), True
    return Comparison(name, tokens, *_errors(found, truth), same_tokens, allowed)


def _errors(found: Continuation, truth: Continuation) -> tuple[float, float]:
    """Return the errors of all logits, and of keys, values and states (0 if there are none)."""
    shares = dict(differences(found, truth))
    logits = max(share for what, share in shares.items() if "logits" in what)
    return logits, max((share for what, share in shares.items() if "logits" not in what), default=0.0)


def _in_float32(loaded: LoadedModel) -> LoadedModel:
    with without_kernels(loaded.model):
        return replace(loaded, model=copy.deepcopy(loaded.model).float(), dtype=torch.float32)
