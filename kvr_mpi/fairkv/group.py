"""Head-parallel decoding, as in FairKV: all ranks decode the documents of all ranks, each some of the heads.

After the prefill, a document's keys and values are on one rank, its home. They are distributed by (document, KV head)
according to a placement (``placement``), made from the tokens that heads actually keep. All ranks step in
lockstep (a `DecodeBatch` of a `HeadGroup`): each computes its heads' part of attention and of the output projection,
and a share of the MLP and of the vocabulary, with two all-reduces per layer (``shared_heads``). Weights do not
move, since every rank has all of them from the prefill.

A single document cannot be divided among copies of a head. Then every rank holds a part of each head's tokens instead
and attends with all heads; the parts are merged by log-sum-exp, which takes a third collective per layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from kvr_mpi.decode.group import BatchEntry, Group
from kvr_mpi.errors import ModelError
from kvr_mpi.fairkv.placement import LayerPlacement, Owners, assign_rows, place_layers
from kvr_mpi.fairkv.shared_heads import SharedHeads, why_not_shared
from kvr_mpi.kv.attention import PartialAttention, gather_parts, merge_gathered
from kvr_mpi.kv.pool import Pool
from kvr_mpi.kv.row import Merge
from kvr_mpi.kv.sequence import Pair, SequenceKV
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.rope import begins_anew_at
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import Failure, attempt
from kvr_mpi.prefill.finite import NOT_FINITE
from kvr_mpi.prefill.one_prompt import Prefill, own_pool
from kvr_mpi.prefill.packed import decode_packed, why_never_packed
from kvr_mpi.topology import even_share
from kvr_mpi.transport import Transport
from kvr_mpi.transport.base import FixedTag, gather_json, share_json

PlaceHeads = Callable[[Sequence[float], int], LayerPlacement]
# Rows of a KV head that go to one rank: the head, and the first row and the end (exclusive) among the head's rows.
Cut = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SharedDocument:
    """A document as all ranks know it.

    home : the rank that prefilled it, and writes its answer.
    tokens : its length.
    slack : tokens that may still be appended.
    last_token : the token written last.
    is_greedy : whether the next token is just the argmax of the logits.
    counts : number of its keys, by layer and KV head.
    """

    home: int
    tokens: int
    slack: int
    last_token: int
    is_greedy: bool
    counts: Sequence[Sequence[int]]


class HeadGroup(Group):
    """Ranks that hold some heads of every prompt of a wave, whichever rank prefilled it.

    Answers do not depend on the placement or on the number of ranks, except for the order of sums.

    loaded : prepared for chains.
    ranks : the ranks that share the heads.
    place : places one layer's heads by the tokens that they keep, such as `placement.place_in_proportion`.
    pool : for the rows of this rank's heads.
    counts : number of keys of the prompts taken in last, (layers, prompts, kv_heads).
    owners : for each layer the rank of each (prompt, KV head).

    Raises `ModelError` if the model's heads cannot be distributed.
    """

    waits = True
    ranks: Transport

    def __init__(
        self,
        loaded: LoadedModel,
        ranks: Transport,
        place: PlaceHeads,
        pool: Pool | None = None,
    ) -> None:
        if why := why_not_head_parallel(loaded):
            raise ModelError(
                f"{loaded.shape.architecture}: {why}, so its heads cannot be distributed over ranks; use decode.mode = "
                f"'data-parallel'"
            )
        super().__init__(loaded, ranks)
        self._place, self._pool = place, pool or own_pool(loaded)
        self._is_greedy = False  # all prompts that were taken in are greedy
        self._part = loaded
        self._shared_heads: SharedHeads | None = None  # made with the first prompts
        self._merging: Merge | None = None
        self._meetings = 0  # collectives of all ranks, in this step so far
        # Range of this rank's share of the vocabulary.
        self._share = even_share(loaded.model.lm_head.out_features, ranks.rank, ranks.size)
        # Which ranks ran out of memory in a step: allocated now, since there may be no memory then.
        self._is_short = torch.zeros(ranks.size, dtype=torch.int64, device=loaded.device)
        self.counts = np.zeros((len(loaded.shape.layers), 0, 0), dtype=np.int64)
        self.owners: list[Owners] = []

    def take_in(self, documents: Sequence[BatchEntry]) -> Sequence[BatchEntry]:
        """Place the heads of all ranks' prompts by their number of tokens, and distribute them.

        A prompt fails, and is not returned, if a rank has no memory for its part.
        """
        shared = self._tell_documents(documents)
        if not shared:
            return []
        self.counts = np.array([document.counts for document in shared], dtype=np.int64).swapaxes(0, 1)
        # For greedy prompts each rank sends two numbers; other settings need the logits of the whole vocabulary.
        self._is_greedy = all(document.is_greedy for document in shared)
        placed = place_layers(self.counts.sum(1).astype(np.float64), self.ranks.size, self._place)
        self.owners = [assign_rows(layer, counts) for layer, counts in zip(placed, self.counts, strict=True)]
        ranks, heads = self.ranks, None
        self._merging = self._merge if len(shared) == 1 and ranks.size > 1 else None
        if self._merging is None:
            # A layer needs at least one head: a rank that owns none computes head 0 without rows, which gives zeros.
            heads = [sorted({int(head) for head in np.nonzero(own == ranks.rank)[1]}) or [0] for own in self.owners]
        why_no_part = self._why_short(attempt(lambda: self._choose_part(heads)))
        own, running = iter(documents), list[BatchEntry]()
        for at, told in enumerate(shared):  # one at a time: the home drops its whole cache before the next one
            if told.home == ranks.rank:
                entry = next(own)
            else:
                entry = BatchEntry(Prefill(Partition((0, told.tokens)), None, None, 0.0), told.last_token)
            cache, why = None, why_no_part
            if why is None:
                cache, why = self._distribute(at, told, entry.prefill.cache, heads)
            if why is None:
                entry.prefill.cache = cache
                running.append(entry)
            elif entry.writing is not None:
                entry.writing.fail(f"not enough memory to distribute its heads over the ranks: {why}")
        return running

    def _tell_documents(self, documents: Sequence[BatchEntry]) -> list[SharedDocument]:
        """Gather the documents of all ranks into one list, which is the same on all ranks.

        The list alternates between ranks, so that each rank sends about as much at a time as it receives.
        """
        mine = []
        for document in documents:
            cache, writing = document.prefill.cache, document.writing
            assert writing is not None, "it is this rank's own"
            counts = [cache.counts(layer_idx) for layer_idx in range(len(cache.layers))]
            mine.append([cache.length, writing.room, document.last_token, writing.is_greedy, counts])
        turns = itertools.zip_longest(*share_json(self.ranks, gather_json(self.ranks, mine)))
        return [SharedDocument(home, *told) for turn in turns for home, told in enumerate(turn) if told is not None]

    def _parts_of(self, document: int, rank: int) -> list[list[Cut]]:
        """Return what a rank owns of a document, by layer: the heads placed on it, or a part of each head's tokens."""
        layers = zip(self.owners, self.counts[:, document], strict=True)
        if self._merging is None:
            heads = [(np.flatnonzero(own[document] == rank).tolist(), counts) for own, counts in layers]
            return [[(head, 0, int(counts[head])) for head in own] for own, counts in heads]
        size = self.ranks.size
        whole = [[(at, *even_share(int(count), rank, size)) for at, count in enumerate(counts)] for _, counts in layers]
        return [[part for part in parts if part[1] < part[2] or rank == size - 1] for parts in whole]

    def _choose_part(self, heads: Sequence[list[int]] | None) -> None:
        """Select the part of the model that this rank computes; adjacent weights are not copied."""
        if self._shared_heads is None:
            self._shared_heads = SharedHeads(self.loaded, self.ranks.rank, self.ranks.size, self._sum)
        self._part = replace(self.loaded, model=self._shared_heads.choose(heads))

    def _why_short(self, found: object) -> str | None:
        """Return which ranks ran out of memory, given this rank's result or `Failure`; None if none did."""
        is_failed = isinstance(found, Failure)
        if is_failed and self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        self._is_short.zero_()[self.ranks.rank] = is_failed
        self.ranks.all_reduce(self._is_short)
        short = self._is_short.nonzero().flatten().tolist()
        return f"rank {', '.join(map(str, short))} of its chain ran out of memory" if short else None

    def _distribute(
        self, at: int, document: SharedDocument, whole: SequenceKV | None, heads: Sequence[list[int]] | None
    ) -> tuple[SequenceKV | None, str | None]:
        """Send a document's rows from its home to their owners, in a message per layer and owner; release it there.

        Returns the sequence of this rank's rows; or why there is none, the same on all ranks: all memory is allocated
        before the first message.
        """
        owned = [self._parts_of(at, rank) for rank in range(self.ranks.size)]
        home, rank = document.home, self.ranks.rank
        messages = [parts for other, parts in enumerate(owned) if other != home and rank in (home, other)]
        reserved = attempt(lambda: self._reserve(document, owned[rank], heads, messages))
        if (why := self._why_short(reserved)) is not None:
            if not isinstance(reserved, Failure):
                reserved[0].release()
            return None, why
        assert not isinstance(reserved, Failure), "no rank ran out of memory"
        sequence, places_of, buffer = reserved
        for idx, (shape, places) in enumerate(zip(self.loaded.shape.layers, places_of, strict=True)):
            mine = owned[rank][idx]
            if whole is None:
                if mine:
                    message = buffer[: _elements(mine, shape)]
                    self.ranks.irecv(message, home, FixedTag.SHARED_HEADS).wait()
                    for place, rows in zip(places, _rows_in(message, mine, shape), strict=True):
                        place[0].copy_(rows[0])
                        place[1].copy_(rows[1])
                continue
            for place, part in zip(places, mine, strict=True):
                _copy_rows(whole, idx, part, place)
            for other, parts in enumerate(each[idx] for each in owned):
                if other == rank or not parts:
                    continue
                message = buffer[: _elements(parts, shape)]
                for place, part in zip(_rows_in(message, parts, shape), parts, strict=True):
                    _copy_rows(whole, idx, part, place)
                self.ranks.isend(message, other, FixedTag.SHARED_HEADS).wait()
        if whole is not None:
            whole.release()
        return sequence, None

    def _reserve(
        self,
        document: SharedDocument,
        mine: list[list[Cut]],
        heads: Sequence[list[int]] | None,
        messages: Sequence[list[list[Cut]]],
    ) -> tuple[SequenceKV, list[list[Pair]], torch.Tensor]:
        """Allocate this rank's rows of a document, and a buffer for the longest message.

        mine, messages : what this rank owns, and what it sends or receives, by layer.

        Returns the sequence, and of each layer and each of its parts the place of keys and values (rows, dim).
        """
        loaded, ranks = self.loaded, self.ranks
        # If all ranks compute all heads, the last one keeps new tokens.
        appends, layers = heads is not None or ranks.rank == ranks.size - 1, loaded.shape.layers
        computed = [list(range(shape.num_kv_heads)) for shape in layers] if heads is None else heads
        shapes = [replace(shape, num_kv_heads=len(some)) for shape, some in zip(layers, computed, strict=True)]
        capacity = document.tokens + document.slack
        sequence = SequenceKV(loaded, self._pool, capacity, shapes=shapes, length=document.tokens, is_last=appends)
        held = [[some.index(head) for head, _, _ in parts] for some, parts in zip(computed, mine, strict=True)]
        try:
            for idx, parts in enumerate(mine):
                sequence.reserve(idx, [last - first for _, first, last in parts], held[idx])
            # Only now, since rows may move when others are reserved.
            places = [[sequence.head_pieces(idx, head)[0] for head in some] for idx, some in enumerate(held)]
            sizes = [_elements(parts, shape) for sent in messages for parts, shape in zip(sent, layers, strict=True)]
            return sequence, places, torch.empty(max(sizes, default=0), dtype=loaded.dtype, device=loaded.device)
        except BaseException:
            sequence.release()
            raise

    @property
    def why_no_drafts(self) -> str | None:
        return "the ranks of a chain that share heads have to run the same tokens"

    def run(self, documents: Sequence[BatchEntry], drafts: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        """Run this rank's heads of each prompt.

        Returns logits (prompts, vocab_size); if all prompts are greedy, the next token of each (prompts,).
        """
        self._meetings = 0
        before = [(each.prefill.cache, each.prefill.cache.length) for each in documents]
        found = attempt(lambda: self._run(documents))
        if isinstance(found, Failure):
            self._play_on(len(documents))
        if (why := self._why_short(found)) is not None:
            for sequence, length in before:
                sequence.length = length
            raise MemoryError(why)
        assert not isinstance(found, Failure), "it succeeded"
        self.ranks.all_reduce(found)  # each element is zero on all ranks but one
        if not self._is_greedy:
            return found
        ranks = found[..., 0].argmax(0)  # that of NaN, if there is one
        largest, tokens = found[ranks, torch.arange(len(documents), device=found.device)].unbind(-1)
        return tokens.long().where(largest.isfinite(), NOT_FINITE)

    def choose(self, documents: Sequence[BatchEntry], logits: torch.Tensor) -> list[int]:
        """Choose the next token of each prompt from the result of `run`."""
        return logits.tolist() if self._is_greedy else super().choose(documents, logits)

    def _sum(self, tensor: torch.Tensor) -> None:
        self.ranks.all_reduce(tensor)
        self._meetings += 1

    def _merge(self, part: PartialAttention) -> PartialAttention:
        """Merge attention to this rank's tokens with that of the other ranks, in the same order on all ranks."""
        gathered = gather_parts(part, self.ranks)
        self._meetings += 1  # before the merge, whose memory may run out on this rank only
        return merge_gathered(gathered)

    def _play_on(self, documents: int) -> None:
        """Take part in the rest of a step that failed on this rank, so that the other ranks can finish."""
        config, device = self.loaded.model.config, self.loaded.device
        total = torch.zeros(1, documents, config.hidden_size, dtype=self.loaded.dtype, device=device)
        nothing = PartialAttention.of_nothing(
            (1, config.num_attention_heads, documents, self.loaded.shape.layers[0].value_dim), device
        )
        sums: Callable[[], object] = partial(self.ranks.all_reduce, total)
        of_layer = [sums, sums]  # of the output projection, and of the MLP
        if self._merging is not None:
            of_layer.insert(0, partial(gather_parts, nothing, self.ranks))
        for meet in (of_layer * len(self.loaded.shape.layers))[self._meetings :]:
            meet()

    def _run(self, documents: Sequence[BatchEntry]) -> torch.Tensor:
        """Run this rank's heads; return its results, with zeros in the places of other ranks' results."""
        row = self._row_of(documents, self._merging)
        logits = decode_packed(self._part, row, [each.last_token for each in documents])
        return self._likeliest(logits) if self._is_greedy else self._among_all(logits)

    def _likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the most likely tokens of this rank's share (prompts, share) of the vocabulary; the first of equals.

        Returns (ranks, prompts, 2), float64: their logits and token ids at this rank's index, else zeros.
        """
        found = torch.zeros(self.ranks.size, len(logits), 2, dtype=torch.float64, device=logits.device)
        values, places = logits.max(-1)
        found[self.ranks.rank, :, 0], found[self.ranks.rank, :, 1] = values, places + self._share[0]
        return found

    def _among_all(self, logits: torch.Tensor) -> torch.Tensor:
        """Place logits (prompts, share) among those of the whole vocabulary (prompts, vocab_size)."""
        found = torch.zeros(len(logits), self.loaded.model.lm_head.out_features, device=logits.device)
        found[:, self._share[0] : self._share[1]] = logits
        return found


def _elements(parts: Sequence[Cut], shape: LayerShape) -> int:
    """Return the size of a message with these rows of a layer."""
    return sum(last - first for _, first, last in parts) * (shape.key_dim + shape.value_dim)


def _rows_in(message: torch.Tensor, parts: Sequence[Cut], shape: LayerShape) -> list[Pair]:
    """View a message (elements,) as the keys and values (rows, dim) of some parts of a layer's heads."""
    rows = [last - first for _, first, last in parts]
    pieces = iter(torch.split(message, [count * dim for count in rows for dim in (shape.key_dim, shape.value_dim)]))
    return [(next(pieces).view(count, shape.key_dim), next(pieces).view(count, shape.value_dim)) for count in rows]


def _copy_rows(sequence: SequenceKV, layer_idx: int, part: Cut, to: Pair) -> None:
    """Copy a part of a head's keys and values to a place of that size, without other memory."""
    head, first, last = part
    begin = 0
    for piece in sequence.head_pieces(layer_idx, head):
        stop = begin + len(piece[0])
        if (low := max(first, begin)) < (high := min(last, stop)):
            for place, rows in zip(to, piece, strict=True):
                place[low - first : high - first].copy_(rows[low - begin : high - begin])
        begin = stop


def why_not_head_parallel(loaded: LoadedModel) -> str | None:
    """Return why a model does not support head-parallel decoding; None if it does."""
    why = why_not_shared(loaded) or why_never_packed(loaded)
    if why is None and begins_anew_at(loaded.model) is not None:
        why = "its rotary embedding changes at some length, and the whole cache is then computed again"
    return why
