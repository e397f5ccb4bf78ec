"""The ranks that decode together, and what each computes in a step.

A rank decodes alone (`Group`), or with other ranks that each hold some heads (`HeadSharing.group`) or some tokens
(`token_parallel.TokenGroup`). ``batch`` chooses tokens and handles samples, schemas, scores and memory errors for all
groups. One rank of a group is the prompt's home: it chooses the prompt's tokens and sends them to the other ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvr_mpi.decode.lookup import Acceptance
from kvr_mpi.decode.sampling import Answer, DecodeSequence, choose_tokens
from kvr_mpi.decode.step_graph import StepRecorder
from kvr_mpi.kv.pool import Pool
from kvr_mpi.kv.row import Merge, Row
from kvr_mpi.kv.sequence import SequenceKV, bytes_of, copy_states
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.model.rope import begins_anew_at
from kvr_mpi.model.tp_group import guarded
from kvr_mpi.prefill.one_prompt import Prefill, prefill_single, prefill_whole
from kvr_mpi.prefill.packed import run_row
from kvr_mpi.transport import Transport


@dataclass(slots=True, eq=False)
class BatchEntry:
    """A prompt of a batch, as one rank sees it; whoever has it releases its prefill.

    prefill : with the keys and values that this rank holds; without a cache after an error.
    last_token : the token to run next.
    key, writing : on the prompt's home rank.
    fresh : the prompt's plain cache as its prefill left it, if several answers are requested; other caches are
        truncated for the next answer.
    rank_s : its share of the duration of its steps, summed over the ranks of the group.
    acceptance : of its drafts, if the batch drafts tokens.
    """

    prefill: Prefill
    last_token: int = -1
    key: Any = None
    writing: DecodeSequence | None = None
    fresh: Any = None
    rank_s: float = 0.0
    acceptance: Acceptance | None = None

    @property
    def error(self) -> str | None:
        return None if self.writing is None else self.writing.error

    @property
    def answer(self) -> Answer | None:
        """The finished answer; None after an error, and on other ranks than the prompt's home."""
        return None if self.writing is None or self.writing.error is not None else self.writing.answer()


class Group:
    """A rank that decodes its own prompts, or a tensor-parallel group whose ranks all do the same.

    Base of the groups of ranks that decode together.

    loaded : prepared for chains, unless all prompts have plain caches; these step one by one.
    ranks : all ranks of the group; None: this rank alone.
    why_alone : why prompts step one by one (`why_not_packed`); None if this model runs packed.
    """

    # Whether prompts wait for `DecodeBatch.begin`, which all ranks call together; otherwise `add` takes them in one by
    # one, on all ranks that hold a part of them.
    waits = False

    def __init__(self, loaded: LoadedModel, ranks: Transport | None = None, *, why_alone: str | None = None) -> None:
        self.loaded, self.ranks, self.recorder = loaded, ranks, StepRecorder(loaded)
        self._why_alone, self._anew_at = why_alone, begins_anew_at(loaded.model)
        self._rows: dict[tuple[BatchEntry, ...], Row] = {}

    def is_home(self, prefill: Prefill) -> bool:
        """Whether this rank chooses a prompt's tokens and delivers its answer."""
        return True

    def take_in(self, documents: Sequence[BatchEntry]) -> Sequence[BatchEntry]:
        """Prepare new prompts for steps; return those of all ranks of the group."""
        return documents

    def rows(self, documents: Sequence[BatchEntry], most: int | None) -> list[list[BatchEntry]]:
        """Divide prompts into rows of at most `most` that run in one step; those with transformers' cache run alone."""
        packed = [each for each in documents if not each.prefill.is_plain]
        alone = [[each] for each in documents if each.prefill.is_plain]
        most = 1 if self._why_alone is not None else most
        groups = -(-len(packed) // (most or len(packed) or 1))
        return [packed[at::groups] for at in range(groups)] + alone

    @property
    def why_no_drafts(self) -> str | None:
        """Why no step runs several tokens of a prompt; None if steps may."""
        return why_no_drafts(self.loaded)

    def most_drafts(self, document: BatchEntry) -> int:
        """Return the largest number of drafted tokens of a prompt in its next step."""
        writing, cache = document.writing, document.prefill.cache
        assert writing is not None, "this rank is its home"
        if document.prefill.is_plain or cache.rolling is not None:  # these cannot be truncated
            return 0
        most, length = writing.room - 1, len(writing.ids)
        return most if self._anew_at is None or length > self._anew_at else min(most, self._anew_at - length - 1)

    def run(self, documents: Sequence[BatchEntry], drafts: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        """Run the last token of each prompt, and its draft if there are any; return the input of `choose` or `write`.

        Raises `MemoryError` or `RuntimeError` on all ranks, if memory ran out on any of them; the prompts are
        unchanged.
        """
        sequences = [each.prefill.cache for each in documents if not each.prefill.is_plain]
        before = [(sequence.length, copy_states(sequence.states)) for sequence in sequences]
        try:
            with guarded(self.loaded.tp_group):
                return self._run_alone(documents, drafts)
        except BaseException:
            for sequence, (length, states) in zip(sequences, before, strict=True):
                sequence.length, sequence.states = length, states
            raise

    def choose(self, documents: Sequence[BatchEntry], logits: torch.Tensor) -> list[int]:
        """Choose the next token of each prompt from its logits (prompts, vocab_size), as `choose_tokens` does."""
        return choose_tokens([each.writing for each in documents], logits)

    def write(
        self, documents: Sequence[BatchEntry], logits: torch.Tensor, drafts: Sequence[Sequence[int]] = ()
    ) -> list[list[int]]:
        """Choose and write the next token of each prompt, and then those that follow while its draft is right.

        Every token is chosen as without a draft: from the same logits, after the same tokens, with its own random
        number.

        logits : after the last token of each prompt, and after each token of its draft (tokens, vocab_size).

        Returns the tokens that were chosen, of which the end of a text is not written.
        """
        drafts = drafts or [()] * len(documents)
        firsts = list(itertools.accumulate((1 + len(draft) for draft in drafts), initial=0))[:-1]
        chosen: list[list[int]] = [[] for _ in documents]
        at, depth = list(range(len(documents))), 0
        while at:
            some = logits if len(at) == len(logits) else logits[[firsts[number] + depth for number in at]]
            going = []
            for number, token in zip(at, self.choose([documents[number] for number in at], some), strict=True):
                writing, draft = documents[number].writing, drafts[number]
                chosen[number].append(token)
                if writing is not None:
                    writing.write(token)
                    if writing.finish_reason is None and depth < len(draft) and token == draft[depth]:
                        going.append(number)
            at, depth = going, depth + 1
        for document, draft, tokens in zip(documents, drafts, chosen, strict=True):
            if draft:
                cache: SequenceKV = document.prefill.cache
                cache.truncate(cache.length - 1 - len(draft) + len(tokens))
        return chosen

    def tell(self, words: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Distribute the decisions of the home ranks to all ranks; (0, 0) on other ranks than the home."""
        if self.ranks is None or self.ranks.size == 1:
            return words
        told = torch.tensor(words, dtype=torch.int64, device=self.loaded.device)
        self.ranks.all_reduce(told)
        return [(token, tokens) for token, tokens in told.tolist()]

    def look_ahead(self, prefill: Prefill, ids: Sequence[int]) -> torch.Tensor:
        """Compute logits (tokens, vocab_size) after each of some tokens that follow a prompt, without changing it."""
        if prefill.is_plain:  # a plain cache with windows or states cannot be truncated
            behind = copy.deepcopy(prefill.cache)
            tokens = torch.tensor(ids, device=self.loaded.device).view(-1, 1, 1)
            return torch.cat([run_model(self.loaded.model, token, behind) for token in tokens])
        sequence: SequenceKV = prefill.cache
        states = copy_states(sequence.states)
        try:
            return run_row(self.loaded, Row([sequence], [len(ids)]), ids)
        finally:
            sequence.states = states

    def forget_rows(self) -> None:
        """Drop the rows of prompts, since they change."""
        self._rows.clear()

    def _row_of(self, documents: Sequence[BatchEntry], merge: Merge | None = None) -> Row:
        """Return the row of some prompts, which is kept until rows change."""
        members = tuple(documents)
        if members not in self._rows:
            self._rows[members] = Row([each.prefill.cache for each in documents], merge=merge)
        return self._rows[members]

    def _run_alone(self, documents: Sequence[BatchEntry], drafts: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        """Return logits (tokens, vocab_size) after each prompt's last token and its draft, computed by this rank."""
        drafts = drafts or [()] * len(documents)
        writings = [each.writing for each in documents if each.writing is not None]
        # transformers' ``generate`` would recompute the whole cache now (`begins_anew_at`).
        anew = [self._anew_at is not None and one.token_ids and len(one.ids) == self._anew_at for one in writings]
        if any(anew):
            rows = zip(documents, writings, drafts, anew, strict=True)
            return torch.cat(
                [
                    self._run_anew(each, writing).unsqueeze(0) if now else self._run_alone([each], [draft])
                    for each, writing, draft, now in rows
                ]
            )
        new = [[each.last_token, *draft] for each, draft in zip(documents, drafts, strict=True)]
        last, counts = list(itertools.chain.from_iterable(new)), list(map(len, new))
        if documents[0].prefill.is_plain:
            token = torch.tensor([last], device=self.loaded.device)
            return run_model(self.loaded.model, token, documents[0].prefill.cache)
        row = self._row_of(documents)
        if row.tokens != counts:
            row.take(counts)
        return self.recorder.run(row, last)

    def _run_anew(self, document: BatchEntry, writing: DecodeSequence) -> torch.Tensor:
        """Recompute prompt and answer on this rank; return the last logits (vocab_size,)."""
        ids, loaded, room = writing.ids.tolist(), self.loaded, writing.room
        if document.prefill.is_plain:
            anew = prefill_single(loaded.model, ids, loaded.device)
        else:
            anew = prefill_whole(loaded, ids, reserve_tokens=room, pool=document.prefill.cache.pool)
            document.prefill.release()
        document.prefill.cache = anew.cache
        self.forget_rows()
        assert anew.logits is not None
        return anew.logits


class HeadSharing(Protocol):
    """How ranks decode their prompts together, each some of the heads (``fairkv``)."""

    def group(self, loaded: LoadedModel, ranks: Transport, pool: Pool | None = None) -> Group:
        """Make the group of some ranks, with a pool for the rows of this rank's heads."""

    def efficiency(self, ranks: int) -> float:
        """Forecast the fraction of time in which ranks attend, for heads of equal size."""

    def describe(self, ranks: int) -> str:
        """Describe the placement of heads in a few words."""

    def extra_bytes(self, loaded: LoadedModel) -> int:
        """Maximum bytes of weights that a rank needs in addition to the model."""


def why_no_drafts(loaded: LoadedModel) -> str | None:
    """Return why no step of a rank that decodes alone runs several tokens of a prompt; None if steps may."""
    if loaded.tp_group is not None:
        return "the ranks of a tensor-parallel group have to run the same tokens"
    return "recurrent states cannot be taken back" if loaded.shape.has_states else None


def held_bytes(prefills: Sequence[Prefill], document: SequenceKV | None = None) -> int:
    """Bytes of prompts and of a document that others continue on this rank; shared memory counts once."""
    held = [*(each.cache for each in prefills), document]
    return bytes_of([each for each in held if isinstance(each, SequenceKV)])
