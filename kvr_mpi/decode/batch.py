"""Decode all documents on a rank together: they join after their prefill, and leave when they are answered.

In each step, the model runs once on a packed row with one token of each document. The answer of a document does not
depend on the others in the row: each has its own cache, positions, logits processors and random numbers. Stands between
the prefills of a wave and the writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from transformers import GenerationConfig

from kvr_mpi.decode.graphs import StepGraphs
from kvr_mpi.decode.samples import Samples
from kvr_mpi.decode.sampling import Answer, DecodeSequence, SamplingParams
from kvr_mpi.decode.scoring import score_continuations
from kvr_mpi.documents.document import AS_THE_JOB, OwnGeneration
from kvr_mpi.errors import DocumentError
from kvr_mpi.kv.decode_cache import DecodeCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.rope import begins_anew_at
from kvr_mpi.model.tp_group import guarded
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr, prefill_single, run_next
from kvr_mpi.prefill.packed import decode_packed
from kvr_mpi.transport.local import LocalTransport

# Most sequences that a rank decodes together: with more, reading the weights is no longer what takes the time.
MAX_SEQUENCES = 64
# Sampling settings of recent documents that are cached, for documents with the same settings.
KEPT_RULES = 16

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Finished(Generic[K]):
    """A document that has left the batch, with an answer or an error."""

    key: K
    prefill: Prefill  # with all its keys and values; without a cache after an error
    answer: Answer | None
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Running(Generic[K]):
    key: K
    prefill: Prefill
    writing: DecodeSequence
    samples: Samples | None = None  # if there is to be more than one answer


class DecodeBatch(Generic[K]):
    """Documents that are being answered on this rank.

    Parameters
    ----------
    loaded : LoadedModel
        Prepared for chains if the documents' caches are chains'; plain caches step one by one.
    config : GenerationConfig
    stop : sequence of str
        Stop strings.
    max_new_tokens : int
    why_alone : str or None
        Why documents step one by one (`why_not_packed`); None if this model runs packed.
    graphs : StepGraphs, optional
        Runs steps that were captured.

    Attributes
    ----------
    rows : int or None
        How many documents step at once, once memory was too short for all of them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: GenerationConfig,
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        why_alone: str | None,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._loaded = loaded
        self._rules = SamplingParams(loaded.model, loaded.tokenizer, config, stop=stop, max_new_tokens=max_new_tokens)
        self._own_rules: dict[OwnGeneration, SamplingParams] = {}
        self._running: list[_Running[K]] = []
        self._aside: list[_Running[K]] = []  # no memory for their next token until another document leaves
        self._finished: list[Finished[K]] = []
        self._packs: dict[tuple[_Running[K], ...], DecodeCache] = {}
        self._anew_at = begins_anew_at(loaded.model)
        self._why_alone, self._graphs = why_alone, graphs
        self.rows: int | None = None

    @property
    def running(self) -> int:
        """Documents that `step` has not handed out yet."""
        return len(self._running) + len(self._aside) + len(self._finished)

    @property
    def keys(self) -> list[K]:
        """Keys of the documents that `step` has not handed out yet."""
        return [one.key for one in self._running + self._aside] + [one.key for one in self._finished]

    @property
    def caches(self) -> list[Any]:
        """Those of the documents under way."""
        return [document.prefill.cache for document in self._running]

    @property
    def written(self) -> list[list[int]]:
        """Tokens of the answers under way."""
        return [document.writing.token_ids for document in self._running]

    @torch.inference_mode()
    def add(
        self, key: K, prefill: Prefill, prompt_ids: Sequence[int], seed: int, own: OwnGeneration = AS_THE_JOB
    ) -> None:
        """Take in a document after its prefill, which chooses its first token.

        Parameters
        ----------
        key : object
            Comes back in `Finished`.
        prefill : Prefill
            Of the decode rank: with logits and the whole cache, and room for its ``max_new_tokens``.
        prompt_ids : sequence of int
            All of them, for the processors that look back.
        seed : int
            For sampling: the same seed, prompt and settings give the same answer.
        own : OwnGeneration
            Settings of the document, where they are not the job's.
        """
        assert prefill.logits is not None, "only the decode rank of a chain can decode"
        rules = self._rules_of(own)
        begin = partial(_begin, rules, prompt_ids, prefill.logits)
        document = _Running(key, prefill, DecodeSequence(rules, prompt_ids, seed, prefill.logits.device))
        self._running.append(document)
        if why := self._why_not_compressed(
            prefill, len(prompt_ids), document.writing.max_new_tokens
        ) or self._why_not_as_asked(own.n, rules, prompt_ids):
            self._leave(document, why)
            return
        if own.score and (why := self._score(document, len(prompt_ids), own.score)):
            self._leave(document, why)
            return
        if own.n is not None and own.n > 1:
            document.samples = Samples(prefill, begin, seed, own.n)
        document.writing.write_first(prefill.logits)
        if document.writing.finish_reason is not None:
            self._end(document)
        if document in self._running and not prefill.is_plain and self._loaded.device.type == "cpu":
            for layer in prefill.cache.layers:
                layer.lay_by_heads()

    def _rules_of(self, own: OwnGeneration) -> SamplingParams:
        """Find a document's settings; some are kept, since stop strings take a look at the whole vocabulary."""
        own = replace(own, seed=None, n=None, score=None)
        if own == AS_THE_JOB:
            return self._rules
        rules = self._own_rules.pop(own, None) or self._rules.adapted(own)
        self._own_rules[own] = rules  # the last used last
        if len(self._own_rules) > KEPT_RULES:
            del self._own_rules[next(iter(self._own_rules))]
        return rules

    @torch.inference_mode()
    def step(self) -> list[Finished[K]]:
        """Write one token of every document, and hand out those that are answered."""
        if not self._running and self._aside:  # no memory for any of them: one has to give its own back
            self._running.append(self._aside.pop(0))
        for group in self._groups():
            self._step(group)
        finished, self._finished = self._finished, []
        return finished

    def _score(self, document: _Running[K], prompt_tokens: int, texts: Sequence[str]) -> str | None:
        """Score continuations of a prompt; say why that cannot be done, if so."""
        try:
            with guarded(self._loaded.tp_group):
                document.writing.scores = score_continuations(self._loaded, document.prefill, prompt_tokens, texts)
        except DocumentError as error:
            return str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return f"not enough memory to score its continuations: {str(error).splitlines()[0]}"
        return None

    def _why_not_compressed(self, prefill: Prefill, tokens: int, new_tokens: int) -> str | None:
        """Say why an answer cannot go on from a compressed cache; None if it can, or nothing was dropped."""
        most = tokens + new_tokens
        if (
            prefill.is_plain
            or not prefill.cache.is_ragged
            or self._anew_at is None
            or not tokens < self._anew_at <= most
        ):
            return None
        return (
            f"a prompt of {tokens} tokens and an answer of up to {new_tokens}: from {self._anew_at} tokens on, this "
            f"model's rotary embedding changes and all keys have to be computed again, but some were dropped by "
            f"compression; leave [compress] out, or lower generation.max_new_tokens"
        )

    def _why_not_as_asked(self, count: int | None, rules: SamplingParams, prompt_ids: Sequence[int]) -> str | None:
        """Say why a prompt is not answered as it asks, by a schema or several times from one cache; None if it is."""
        if count is None or count == 1 or rules.why_no_schema is not None:
            return rules.why_no_schema
        tokens, most = len(prompt_ids), len(prompt_ids) + rules.max_new_tokens
        if not rules.config.do_sample:
            return f"{count} answers without sampling would all be the same; set a temperature, or request one answer"
        if self._loaded.shape.has_states:
            return (
                f"{count} answers: {self._loaded.shape.architecture} keeps states, of which there is only one copy per "
                f"prompt; request one answer"
            )
        if self._anew_at is not None and tokens < self._anew_at <= most:
            return (
                f"{count} answers of up to {rules.max_new_tokens} tokens to a prompt of {tokens}: from {self._anew_at} "
                f"tokens on, this model's rotary embedding changes, and the keys of the prompt can no longer be used; "
                f"request shorter answers"
            )
        return None

    def _groups(self) -> list[list[_Running[K]]]:
        """Divide the documents into those that step in one row."""
        packed: list[_Running[K]] = []
        alone: list[_Running[K]] = []
        for document in self._running:
            (alone if document.prefill.is_plain else packed).append(document)
        rows = 1 if self._why_alone is not None else self.rows or len(packed) or 1
        groups = -(-len(packed) // rows)
        return [packed[at::groups] for at in range(groups)] + [[document] for document in alone]

    def _step(self, group: list[_Running[K]]) -> None:
        """Write one token of each of a group; if there is no memory for that, in halves, from now on."""
        try:
            with guarded(self._loaded.tp_group):
                logits = self._run(group)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            what = str(error).splitlines()[0]
        else:
            chosen = torch.stack([each.writing.choose(row) for each, row in zip(group, logits, strict=True)])
            for document, token in zip(group, chosen.tolist(), strict=True):
                document.writing.write(token)
                if document.writing.finish_reason is not None:
                    self._end(document)
            return
        # Out of the except block: the error held on to what the failed step had made.
        self._packs.clear()
        if self._graphs is not None:
            self._graphs.give_up("memory is short")
        if self._loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(group) > 1:
            half = self.rows = -(-len(group) // 2)
            self._step(group[:half])  # which may halve `rows` again
            self._step(group[half:])
        elif len(self._running) > 1 and not group[0].prefill.is_plain:
            self._running.remove(group[0])
            self._aside.append(group[0])
        else:
            self._leave(group[0], f"not enough memory for its next token, even with no other document: {what}")

    def _run(self, group: list[_Running[K]]) -> torch.Tensor:
        """Compute logits (documents, vocab_size) after the last token of each."""
        anew = [document for document in group if self._begins_anew(document)]
        if anew:
            logits = [self._run_anew(each) if each in anew else self._run([each])[0] for each in group]
            return torch.stack(logits)
        last = [document.writing.token_ids[-1] for document in group]
        if self._graphs is None or group[0].prefill.is_plain:
            return self._run_eagerly(group, last)
        caches = [each.prefill.cache for each in group]
        return self._graphs.step(caches, last, partial(self._run_eagerly, group, last))

    def _run_eagerly(self, group: list[_Running[K]], last: list[int]) -> torch.Tensor:
        """Compute the same, after these tokens, kernel by kernel."""
        if self._why_alone is not None or group[0].prefill.is_plain:
            return self._run_alone(group[0].prefill, last[0]).unsqueeze(0)
        members = tuple(group)
        if members not in self._packs:
            self._packs[members] = DecodeCache([each.prefill.cache for each in group])
        return decode_packed(self._loaded, self._packs[members], last)

    def _begins_anew(self, document: _Running[K]) -> bool:
        """Whether transformers' ``generate`` would now compute the whole cache anew (`begins_anew_at`)."""
        ids = document.writing.ids
        return self._anew_at is not None and len(ids) == self._anew_at and len(document.writing.token_ids) > 0

    def _run_anew(self, document: _Running[K]) -> torch.Tensor:
        """Compute prompt and answer anew on this rank; logits (vocab_size,) after them."""
        ids, loaded = document.writing.ids.tolist(), self._loaded
        if not document.prefill.is_plain:
            room = document.writing.max_new_tokens - len(document.writing.token_ids)
            anew = prefill_kvr(loaded, ids, Partition((0, len(ids))), LocalTransport(), reserve_tokens=room)
        else:
            anew = prefill_single(loaded.model, ids, loaded.device)
        document.prefill.cache = anew.cache
        self._packs.clear()
        assert anew.logits is not None
        return anew.logits

    def _run_alone(self, prefill: Prefill, token: int) -> torch.Tensor:
        """Compute logits (vocab_size,) after one more token of one document."""
        ids = torch.tensor([[token]], device=self._loaded.device)
        if prefill.is_plain:
            return run_next(self._loaded.model, prefill, ids)
        cache = prefill.cache
        length = cache.length
        cache.note_states()
        try:
            with guarded(self._loaded.tp_group):
                return run_next(self._loaded.model, prefill, ids)
        except BaseException:
            cache.step_back(length)
            raise

    def _end(self, document: _Running[K]) -> None:
        """Begin a document's next answer, or let it go with the last one."""
        following: DecodeSequence | None = document.writing
        if document.writing.error is not None:
            self._leave(document, document.writing.error)
            return
        while document.samples is not None and following is not None and following.finish_reason is not None:
            following = document.samples.follow(following)
            document.writing = following or document.writing
        if document.samples is None or following is None:
            self._leave(document)

    def _leave(self, document: _Running[K], error: str | None = None) -> None:
        """Let a document go; what was put aside may find memory now."""
        self._running.remove(document)
        self._packs.clear()
        if error is not None:
            document.prefill.cache = None
        told = document.writing if document.samples is None else document.samples
        answer = told.answer() if error is None else None
        self._finished.append(Finished(document.key, document.prefill, answer, error))
        self._running += self._aside
        self._aside.clear()


def _begin(rules: SamplingParams, prompt_ids: Sequence[int], logits: torch.Tensor, seed: int) -> DecodeSequence:
    """Begin an answer with a token chosen by the prompt's logits (vocab_size,)."""
    writing = DecodeSequence(rules, prompt_ids, seed, logits.device)
    writing.write_first(logits)
    return writing
