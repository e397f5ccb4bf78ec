"""Decode the documents of several ranks together, each rank some heads of them.

After the prefill every document's keys and values are on one rank. Here they are shared out by (document, KV head), as
a placement says (``compress.placement``, from what the heads actually keep), and all ranks step together: each computes
its heads' part of attention and of the output projection, a share of the MLP and of the vocabulary, with two sums over
all ranks in a layer (``model.shared_heads``). What is written is chosen on the rank that prefilled the document.
FairKV decodes so; weights do not move, since every rank has them all from the prefill.

Of a single document no copies could take turns: there every rank has a part of each head's tokens instead, attends with
all heads, and the parts are merged by their log-sum-exp, which takes a third sum in a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from transformers import GenerationConfig

from kvr_mpi.compress.placement import LayerPlacement, Loads, Owners, assign_rows, place_layers
from kvr_mpi.decode.batch import Finished
from kvr_mpi.decode.sampling import DecodeSequence, SamplingParams
from kvr_mpi.decode.sharing import Part, SharedDocument, share_documents, tell_documents
from kvr_mpi.documents.document import AS_THE_JOB, OwnGeneration
from kvr_mpi.errors import ModelError
from kvr_mpi.kv.attention import PartialAttention, merge_over_ranks
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.decode_cache import DecodeCache, Merge
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.rope import begins_anew_at
from kvr_mpi.model.shared_heads import SharedHeads, why_not_shared
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import decode_packed, why_never_packed
from kvr_mpi.topology import share_of
from kvr_mpi.transport import Transport

K = TypeVar("K")
MORE_THAN_AN_ANSWER = (
    "ranks that share heads support only one answer per prompt, without log-probabilities, scores or a schema: use "
    "decode.mode = 'data-parallel'"
)
Place = Callable[[Sequence[float], int], LayerPlacement]
# Told instead of a token: the answer has ended.
ENDED = -1


@dataclass(frozen=True, slots=True)
class Prefilled(Generic[K]):
    """A document on the rank that prefilled it, and has its keys and values.

    key : comes back in `Finished`.
    seed : for sampling.
    own : settings of the document, where they are not the job's.
    """

    key: K
    prefill: Prefill
    prompt_ids: Sequence[int]
    seed: int = 0
    own: OwnGeneration = AS_THE_JOB


@dataclass(frozen=True, slots=True, eq=False)
class _Writing(Generic[K]):
    """An answer, on the rank that prefilled its document."""

    document: Prefilled[K]
    sequence: DecodeSequence

    def finished(self) -> Finished[K]:
        return Finished(self.document.key, self.document.prefill, self.sequence.answer())


@dataclass(slots=True, eq=False)
class _Running(Generic[K]):
    """A document under way, as every rank knows it; `writing` only where it was prefilled."""

    cache: SliceCache  # of this rank's heads
    last_token: int
    writing: _Writing[K] | None


class HeadParallelBatch(Generic[K]):
    """Documents that are answered by several ranks together; every method is called by all of them.

    An answer does not depend on the placement, nor on how many ranks there are, but for the order of sums. If memory
    runs out on a rank, the error ends the batch: the others wait for its part of a sum.

    Parameters
    ----------
    loaded : LoadedModel
        Prepared for chains.
    ranks : Transport
        Those that share the heads.
    config : GenerationConfig
    stop : sequence of str
        Stop strings.
    max_new_tokens : int
    place : callable
        Places one layer's heads by their loads, such as `placement.place_in_proportion`.
    loads : array, optional
        What heads are placed by (layers, kv_heads); by default what the documents' heads keep.

    Attributes
    ----------
    ranks : Transport
    counts : array
        Keys that are held of the documents added last, (layers, documents, kv_heads).
    owners : list of array
        For each layer the rank of each (document, KV head).

    Raises
    ------
    ModelError
        If the model's heads cannot be shared out.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ranks: Transport,
        config: GenerationConfig,
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        place: Place,
        loads: Loads | None = None,
    ) -> None:
        if why := why_not_head_parallel(loaded):
            raise ModelError(
                f"{loaded.shape.architecture}: {why}, so its heads cannot be distributed over ranks; use decode.mode = "
                f"'data-parallel'"
            )
        self._loaded, self.ranks, self._place, self._loads = loaded, ranks, place, loads
        self._rules = SamplingParams(loaded.model, loaded.tokenizer, config, stop=stop, max_new_tokens=max_new_tokens)
        self._is_greedy = False  # until documents are here: all of them take the likeliest token
        self._shared_model = loaded
        self._shared_heads: SharedHeads | None = None  # once there is something to decode
        self._running: list[_Running[K]] = []
        self._finished: list[Finished[K]] = []
        self._pack: DecodeCache | None = None
        self._merging: Merge | None = None
        self.counts = np.zeros((len(loaded.shape.layers), 0, 0), dtype=np.int64)
        self.owners: list[Owners] = []

    @property
    def running(self) -> int:
        """Documents under way on all ranks."""
        return len(self._running)

    @property
    def keys(self) -> list[K]:
        """Keys of this rank's documents among them."""
        return [each.writing.document.key for each in self._running if each.writing is not None]

    @property
    def caches(self) -> list[SliceCache]:
        """This rank's heads of the documents under way."""
        return [document.cache for document in self._running]

    @property
    def written(self) -> list[list[int]]:
        """Tokens of this rank's own answers under way."""
        return [each.writing.sequence.token_ids for each in self._running if each.writing is not None]

    @property
    def held_bytes(self) -> int:
        """Memory that this rank's share of keys and values takes."""
        return sum(cache.held_bytes for cache in self.caches)

    @torch.inference_mode()
    def add(self, documents: Sequence[Prefilled[K]]) -> list[Finished[K]]:
        """Take in this rank's documents, when none is under way: choose first tokens, and share the heads out.

        The prefills have no cache afterwards: keys and values are with their owners.

        Returns
        -------
        list of Finished
            Those of them that are answered already.
        """
        assert not self._running, "weights are shared out for the documents of one call"
        begun = [self._begin(document) for document in documents]
        mine = [writing for writing in begun if writing.sequence.finish_reason is None]
        shared = tell_documents(
            self.ranks,
            [writing.document.prefill.cache for writing in mine],
            [writing.sequence.token_ids[-1] for writing in mine],
            [writing.sequence.room for writing in mine],
            [writing.sequence.is_greedy for writing in mine],
        )
        if shared:
            self._share_out(shared, mine)
        return [writing.finished() for writing in begun if writing.sequence.finish_reason is not None]

    @torch.inference_mode()
    def step(self) -> list[Finished[K]]:
        """Write one token of every document, and hand out those of this rank that are answered."""
        if not self._running:
            return []
        if self._pack is None:
            self._pack = DecodeCache([each.cache for each in self._running], self._merging)
        logits = decode_packed(self._shared_model, self._pack, [each.last_token for each in self._running])
        finished, going_on = [], []
        for document, token in zip(self._running, self._choose(logits).tolist(), strict=True):
            if token != ENDED:
                document.last_token = token
                going_on.append(document)
            elif document.writing is not None:
                finished.append(document.writing.finished())
        if len(going_on) < len(self._running):
            self._running, self._pack = going_on, None
        return finished

    def _begin(self, document: Prefilled[K]) -> _Writing[K]:
        """Choose a document's first token."""
        logits = document.prefill.logits
        assert logits is not None, "only the decode rank of a chain can decode"
        assert not document.prefill.is_plain, "plain transformers' cache is not taken apart"
        own = replace(document.own, seed=None)
        rules = self._rules if own == AS_THE_JOB else self._rules.adapted(own)
        writing = DecodeSequence(rules, document.prompt_ids, document.seed, logits.device)
        if writing.finish_reason is None:
            writing.write(int(writing.choose(logits)))
        return _Writing(document, writing)

    def _share_out(self, shared: Sequence[SharedDocument], mine: Sequence[_Writing[K]]) -> None:
        """Place the heads by what they keep, and give every rank its own."""
        ranks = self.ranks
        self.counts = np.array([document.counts for document in shared], dtype=np.int64).swapaxes(0, 1)
        # The likeliest token is told in two numbers; whatever else chooses needs all logits in one place.
        self._is_greedy = all(document.is_greedy for document in shared)
        loads = self.counts.sum(1).astype(np.float64) if self._loads is None else self._loads
        placed = place_layers(loads, ranks.size, self._place)
        self.owners = [assign_rows(layer, counts) for layer, counts in zip(placed, self.counts, strict=True)]
        if len(shared) == 1 and ranks.size > 1:
            caches = self._divide_tokens(shared[0], mine)
        else:
            caches = self._divide_heads(shared, mine)
        own = iter(mine)
        self._running = [
            _Running(cache, document.last_token, next(own) if document.home == ranks.rank else None)
            for document, cache in zip(shared, caches, strict=True)
        ]
        self._pack = None

    def _divide_heads(self, shared: Sequence[SharedDocument], mine: Sequence[_Writing[K]]) -> list[SliceCache]:
        """Give every rank the heads it owns."""
        ranks = self.ranks
        # A model without any head is none: a rank that owns none of a layer computes one, and gives zeros for it.
        heads = [sorted({int(head) for head in np.nonzero(own == ranks.rank)[1]}) or [0] for own in self.owners]

        def parts_of(document: int, rank: int) -> list[list[Part]]:
            return [
                [(head, 0, int(counts[document, head])) for head, owner in enumerate(own[document]) if owner == rank]
                for own, counts in zip(self.owners, self.counts, strict=True)
            ]

        self._use(heads, None)
        prefills = [writing.document.prefill for writing in mine]
        return share_documents(self._loaded, ranks, shared, prefills, parts_of, heads)

    def _divide_tokens(self, shared: SharedDocument, mine: Sequence[_Writing[K]]) -> list[SliceCache]:
        """Give every rank a part of each head's tokens; the last one keeps those to come."""
        ranks = self.ranks
        heads = [list(range(len(counts))) for counts in shared.counts]

        def parts_of(document: int, rank: int) -> list[list[Part]]:
            whole = [
                [(head, *share_of(count, rank, ranks.size)) for head, count in enumerate(counts)]
                for counts in shared.counts
            ]
            appends = rank == ranks.size - 1
            return [[part for part in parts if part[1] < part[2] or appends] for parts in whole]

        self._use(None, self._merge)
        prefills = [writing.document.prefill for writing in mine]
        appends = ranks.rank == ranks.size - 1
        return share_documents(self._loaded, ranks, [shared], prefills, parts_of, heads, appends=appends)

    def _use(self, heads: Sequence[Sequence[int]] | None, merge: Merge | None) -> None:
        """Compute with this rank's part of the model from now on."""
        if self._shared_heads is None:
            self._shared_heads = SharedHeads(self._loaded, self.ranks.rank, self.ranks.size, self.ranks.all_reduce)
        self._shared_model, self._merging = replace(self._loaded, model=self._shared_heads.choose(heads)), merge

    def _merge(self, part: PartialAttention) -> PartialAttention:
        """Join attention to this rank's tokens with that to the others', in one order on all ranks."""
        return merge_over_ranks(part, self.ranks)

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose each document's next token by this rank's share of its logits (documents, share), and write it.

        Returns
        -------
        torch.Tensor
            (documents,) int64, the same on all ranks; `ENDED` for answers that have ended.
        """
        told = torch.zeros(len(self._running), dtype=torch.int64, device=logits.device)
        best = self._likeliest(logits).tolist() if self._is_greedy else None
        rows = None if self._is_greedy else self._gather(logits)
        for at, document in enumerate(self._running):
            if document.writing is None:
                continue
            sequence = document.writing.sequence
            if best is not None:
                token = best[at]
            else:
                assert rows is not None
                token = int(sequence.choose(rows[at]))
            sequence.write(token)
            told[at] = token if sequence.finish_reason is None else ENDED
        self.ranks.all_reduce(told)
        return told

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Find the likeliest tokens (documents,) of all shares: of equals the first, as argmax does."""
        found = torch.zeros(self.ranks.size, len(logits), 2, dtype=torch.float64, device=logits.device)
        values, places = logits.max(-1)
        found[self.ranks.rank, :, 0], found[self.ranks.rank, :, 1] = values, places + self._share[0]
        self.ranks.all_reduce(found)  # every other rank's part of this one is zero
        return found[found[:, :, 0].argmax(0), torch.arange(len(logits), device=logits.device), 1].long()

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Put all shares together (documents, vocab_size)."""
        rows = logits.new_zeros(len(logits), self._loaded.model.lm_head.out_features)
        rows[:, self._share[0] : self._share[1]] = logits
        self.ranks.all_reduce(rows)
        return rows

    @property
    def _share(self) -> tuple[int, int]:
        """First and last token, not included, of this rank's share of the vocabulary."""
        return share_of(self._loaded.model.lm_head.out_features, self.ranks.rank, self.ranks.size)


def why_not_head_parallel(loaded: LoadedModel) -> str | None:
    """Say why a model's documents cannot be decoded by ranks that share its heads; None if they can."""
    why = why_not_shared(loaded) or why_never_packed(loaded)
    if why is None and begins_anew_at(loaded.model) is not None:
        why = "its rotary embedding has it compute the whole cache anew at some length"
    return why


class HeadParallelWave(Generic[K]):
    """A wave's documents, collected on the rank that has prefilled each, and decoded by all ranks together.

    It is used as a `DecodeBatch` is. A rank takes in its documents alone; all ranks call `begin`, which shares them
    out, and `step`.
    """

    def __init__(self, batch: HeadParallelBatch[K]) -> None:
        self._batch = batch
        self._waiting: list[Prefilled[K]] = []
        self._refused: list[Finished[K]] = []

    @property
    def running(self) -> int:
        """Documents of all ranks that are shared out, and those of this rank that wait for it."""
        return self._batch.running + len(self._waiting)

    @property
    def keys(self) -> list[K]:
        """Keys of this rank's documents that have not been handed out."""
        return [document.key for document in self._waiting] + self._batch.keys

    def add(
        self, key: K, prefill: Prefill, prompt_ids: Sequence[int], seed: int, own: OwnGeneration = AS_THE_JOB
    ) -> None:
        """Take in a document after its prefill; parameters are those of `DecodeBatch.add`."""
        if (own.n or 1) > 1 or own.score or own.json_schema or own.top_logprobs not in (None, -1):
            prefill.cache = None
            self._refused.append(Finished(key, prefill, None, MORE_THAN_AN_ANSWER))
            return
        self._waiting.append(Prefilled(key, prefill, prompt_ids, seed, own))

    def begin(self) -> list[Finished[K]]:
        """Share out what waits, unless documents are under way; returns those of this rank that end at once."""
        refused, self._refused = self._refused, []
        if self._batch.running:
            return refused
        waiting, self._waiting = self._waiting, []
        return refused + self._batch.add(waiting)

    def step(self) -> list[Finished[K]]:
        """Write one token of every document that is shared out; returns those of this rank that are answered."""
        return self._batch.step()
