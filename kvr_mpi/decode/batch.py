"""Batched decoding: prompts join after their prefill, and leave when they are answered.

In each step, the model runs once on a packed row with one token of each prompt, or several (`lookup`). An answer does
not depend on the others in the row: each has its own keys and values, positions, logits processors and random numbers.
The batch's `group` defines which ranks take part, and what each of them computes.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig

from kvr_mpi.decode.grammar import Grammars
from kvr_mpi.decode.group import BatchEntry, Group
from kvr_mpi.decode.lookup import Candidate, Decoded, Lookup
from kvr_mpi.decode.reasoning import reasoning_format
from kvr_mpi.decode.repetition import NO_PENALTIES, Penalties
from kvr_mpi.decode.sampling import DecodeSequence, SamplingParams, ends_of
from kvr_mpi.decode.scoring import Score, score_continuations
from kvr_mpi.documents.document import AS_THE_JOB, OwnGeneration
from kvr_mpi.errors import DocumentError, counted
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.rope import begins_anew_at
from kvr_mpi.prefill.failure import Failure, attempt
from kvr_mpi.prefill.finite import explain_not_finite
from kvr_mpi.prefill.one_prompt import Prefill

# Largest number of sequences that a rank decodes together; memory usually allows fewer, except for short prompts.
MAX_SEQUENCES = 256
# Steps, with more prompts than fit in a row, after which rows grow again once memory was short; doubled each time it is
# short again.
CALM_STEPS, MOST_CALM_STEPS = 4, 1024
# Sampling settings of recent documents that are cached, for documents with the same settings.
KEPT_RULES = 16
# Sent instead of a prompt's next token: the prompt is answered, or its prefill failed.
ENDED, FAILED = -1, -2


class DecodeBatch:
    """A batch of prompts that are being answered.

    All ranks of a group call `begin` and `step` together, and also `add` unless prompts wait for `begin`
    (`Group.waits`). Each rank returns the answers to the prompts whose home it is.

    stop : stop strings.
    group : the ranks that decode; by default this rank alone, with packed rows.
    logger : told when rows change because of memory.
    uses_lookup : run drafted tokens where that saves time and the group supports it.
    decoded : counts of all steps so far.
    most_rows : largest number of prompts in a row; None unless memory was too short for all of them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: GenerationConfig,
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        group: Group | None = None,
        logger: RankLogger = SILENT,
        penalties: Penalties = NO_PENALTIES,
        stop_repetition: bool = False,
        uses_lookup: bool = False,
    ) -> None:
        self._loaded, self.group = loaded, Group(loaded) if group is None else group
        grammars = Grammars(loaded.tokenizer, ends_of(config))
        self._rules = SamplingParams(
            loaded.model,
            loaded.tokenizer,
            config,
            tuple(stop),
            max_new_tokens,
            grammars,
            in_group=loaded.tp_group is not None,
            penalties=penalties,
            stop_repetition=stop_repetition,
            reasoning=reasoning_format(loaded.tokenizer),
        )
        self._adapted = functools.lru_cache(KEPT_RULES)(self._rules.adapted)
        self._waiting: list[BatchEntry] = []  # for `begin`, with their first token
        self._running: list[BatchEntry] = []
        self._aside: list[BatchEntry] = []  # no memory for their next token until another prompt leaves
        self._finished: list[BatchEntry] = []
        self._anew_at = begins_anew_at(loaded.model)
        self._lookup = Lookup() if uses_lookup and self.group.why_no_drafts is None else None
        self.decoded = Decoded()
        self._logger, self._why_short = logger.only(group is None or group.ranks is None or group.ranks.rank == 0), ""
        self._calm_steps, self._patience = 0, CALM_STEPS
        self.most_rows: int | None = None

    @property
    def running(self) -> int:
        """Number of prompts in the batch: equal on all ranks, apart from prompts that wait for `begin`."""
        return len(self._waiting) + len(self._running) + len(self._aside) + len(self._finished)

    @property
    def prefills(self) -> list[Prefill]:
        """Caches that this rank holds for prompts in the batch."""
        return [document.prefill for document in self._running + self._aside + self._finished]

    @property
    def written(self) -> list[list[int]]:
        """Tokens generated so far for this rank's own prompts in the batch."""
        return [document.writing.token_ids for document in self._running if document.writing is not None]

    @property
    def left(self) -> list[int]:
        """Maximum number of tokens still to generate, for each of this rank's own prompts in the batch."""
        documents = self._waiting + self._running + self._aside
        return [document.writing.room for document in documents if document.writing is not None]

    @torch.inference_mode()
    def add(
        self, key: Any, prefill: Prefill, prompt_ids: Sequence[int], seed: int, own: OwnGeneration = AS_THE_JOB
    ) -> bool:
        """Add a prompt after its prefill, which determines its first token.

        key : returned with the answer.
        prefill : with logits at the prompt's home, and room for its ``max_new_tokens``.
        prompt_ids : the whole prompt, for logits processors that look back.
        seed : for sampling: the same seed, prompt and settings give the same answer.
        own : settings of the prompt that replace the job's.

        Returns whether its prefill succeeded, according to its home rank.
        """
        document = self._begin(key, prefill, prompt_ids, seed, own)
        if self.group.waits:
            self._waiting.append(document)
            return True
        self._running.append(document)
        words = self.group.tell([self._word_of(document)])
        self._go_on([document], words)
        if document in self._running:
            self.group.take_in([document])
        return words[0][0] != FAILED

    @torch.inference_mode()
    def begin(self) -> list[BatchEntry]:
        """Start the waiting prompts unless others are running; return those that are finished at once."""
        if self.group.waits and not self._running and not self._aside:
            self._running, self._waiting = self._waiting, []
            self._go_on(self._running, [self._word_of(each) for each in self._running])
            taken = self._running
            self._running = list(self.group.take_in(taken))
            for document in taken:
                if document.error is not None:
                    self._word_of(document)
        return self.take_finished()

    @torch.inference_mode()
    def step(self) -> list[BatchEntry]:
        """Generate at least one token for every prompt, and return those that are finished."""
        if not self._running and self._aside:  # no memory for any of them: one has to finish or fail
            self._running.append(self._aside.pop(0))
        before, rows = self.most_rows, self.group.rows(self._running, self.most_rows)
        for row in rows:
            for part in self.group.rows(row, self.most_rows):  # rows before it may have been split
                self._step(part)
        self._adapt_rows(before, list(map(len, rows)))
        return self.take_finished()

    def take_finished(self) -> list[BatchEntry]:
        """Return the prompts of this rank that are finished already; the caller releases their prefills."""
        finished, self._finished = self._finished, []
        for one in finished:
            if one.writing is None:
                one.prefill.release()
        return [one for one in finished if one.writing is not None]

    def _begin(self, key: Any, prefill: Prefill, ids: Sequence[int], seed: int, own: OwnGeneration) -> BatchEntry:
        """Score continuations if asked for, and choose a prompt's first token, on its home rank."""
        if prefill.logits is not None and not bool(prefill.logits.max().isfinite()):
            prefill.error = explain_not_finite(self._loaded.dtype)
        rules, why = self._rules_of(own)
        why = prefill.error or why or self._why_not_as_asked(prefill, own.n, rules, len(ids))
        scores: tuple[Score, ...] = ()
        if own.score:
            scores, why = self._score(prefill, own.score, why)
        if not self.group.is_home(prefill):
            return BatchEntry(prefill)

        writing = DecodeSequence(rules, ids, seed, self._loaded.device, own.n or 1)
        document, writing.scores = BatchEntry(prefill, key=key, writing=writing), scores
        if why is not None:
            writing.fail(why)
        else:
            writing.write_first(prefill.logits)
            if own.n is not None and own.n > 1 and prefill.is_plain:
                document.fresh = copy.deepcopy(prefill.cache)
        return document

    def _score(self, prefill: Prefill, texts: Sequence[str], why: str | None) -> tuple[tuple[Score, ...], str | None]:
        """Score continuations of a prompt unless it has failed according to its home; return them and why it failed."""
        if not self.group.waits:  # only the home knows of other ranks' failures
            is_failed = why is not None and self.group.is_home(prefill)
            ((word, _),) = self.group.tell([(FAILED if is_failed else 0, 0)])
            if word != FAILED:
                why = None
            elif why is None:
                why = "its home rank has the reason"
        if why is not None:
            return (), why
        try:
            found = attempt(
                lambda: score_continuations(self._loaded, prefill, texts, self.group.look_ahead),
                self._loaded.tp_group,
                is_plain=prefill.is_plain,
            )
        except DocumentError as error:
            return (), str(error)
        if isinstance(found, Failure):
            return (), found.explain("to score its continuations")
        return found, None

    def _rules_of(self, own: OwnGeneration) -> tuple[SamplingParams, str | None]:
        """Return a prompt's settings, or the job's and why its own are not possible.

        Some are cached, since stop strings scan the whole vocabulary.
        """
        own = replace(own, seed=None, n=None, score=None)
        if own == AS_THE_JOB:
            return self._rules, None
        try:
            return self._adapted(own), None
        except Exception as error:  # only this prompt fails, whatever transformers makes of its settings
            return self._rules, f"its generation settings are not possible: {type(error).__name__}: {error}"

    def _why_not_as_asked(self, prefill: Prefill, n: int | None, rules: SamplingParams, tokens: int) -> str | None:
        """Return why a prompt's schema, number of answers or length of an answer is not possible; None if it is."""
        count, most = n or 1, rules.max_new_tokens
        if rules.why_no_schema is not None:
            return rules.why_no_schema
        if count > 1 and not rules.config.do_sample:
            return f"{count} answers without sampling would all be the same; set a temperature, or request one answer"
        if count > 1 and self._loaded.shape.has_states:
            return (
                f"{count} answers: {self._loaded.shape.architecture} keeps states, with only one copy per prompt; "
                f"request one answer"
            )
        is_compressed = isinstance(prefill.cache, SequenceKV) and bool(prefill.cache.ragged)
        if (count == 1 and not is_compressed) or self._anew_at is None or not tokens < self._anew_at <= tokens + most:
            return None
        return (
            f"{counted(count, 'answer')} of up to {most} tokens to a prompt of {tokens}: from {self._anew_at} tokens "
            f"on, this model's rotary embedding changes, and all keys have to be computed again, which is not possible "
            f"{'after compression: leave [compress] out' if is_compressed else 'for several answers: request one'}, or "
            f"lower generation.max_new_tokens"
        )

    def _adapt_rows(self, before: int | None, rows: Sequence[int]) -> None:
        """Log that rows have been split in this step, or let them grow again after some steps without that.

        All ranks of a group do the same, since memory is short on all of them if it is on any (`Group.run`).

        before : `most_rows` before the step.
        rows : number of prompts of each of its rows.
        """
        if self.most_rows != before:
            self._patience = CALM_STEPS if before is None else min(2 * self._patience, MOST_CALM_STEPS)
            self._calm_steps = 0
            self._logger.warning(
                f"not enough memory for {counted(max(rows), 'answer')} in a decode step ({self._why_short}): "
                f"at most {self.most_rows} from now on; more are tried again after {self._patience} steps"
            )
        elif self.most_rows is not None and len(rows) > 1:  # with one row, longer ones are not needed
            self._calm_steps += 1
            if self._calm_steps >= self._patience:
                self.most_rows = 2 * self.most_rows if 2 * self.most_rows < MAX_SEQUENCES else None
                self.group.forget_rows()
                allowed = "all answers" if self.most_rows is None else f"up to {self.most_rows} answers"
                self._logger.info(f"{allowed} in a decode step again")

    def _step(self, row: Sequence[BatchEntry], *, drafts: bool = True) -> None:
        """Generate tokens for each prompt of a row; if memory is short, split the row from now on.

        drafts : run drafted tokens if that saves time.
        """
        began, candidates, drafted = time.perf_counter(), list[Candidate](), list[list[int]]()
        if self._lookup is not None:
            candidates = [self._candidate_of(document) for document in row]
            drafted = self._lookup.choose(candidates) if drafts else []
        logits = attempt(lambda: self.group.run(row, drafted), is_plain=row[0].prefill.is_plain)
        if not isinstance(logits, Failure):
            chosen, ranks = self.group.write(row, logits, drafted), self.group.ranks
            seconds = time.perf_counter() - began
            if self._lookup is not None:
                self._lookup.learn(candidates, drafted, chosen, seconds)
            self.decoded.steps += len(row)
            self.decoded.tokens += sum(map(len, chosen))
            self.decoded.drafted += sum(map(len, drafted))
            for document in row:
                document.rank_s += (1 if ranks is None else ranks.size) * seconds / len(row)
                if document.writing is not None:
                    document.writing.steps += 1
            self._go_on(row, self.group.tell([self._word_of(document) for document in row]))
            return
        self.group.forget_rows()
        self.group.recorder.forget()
        if self._loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._lookup is not None and any(drafted):
            self._lookup.shrink(len(row) + sum(map(len, drafted)))
            self._step(row, drafts=False)
        elif len(row) > 1:
            half = self.most_rows = -(-len(row) // 2)
            self._why_short = logits.why
            self._step(row[:half])  # which may halve `most_rows` again
            self._step(row[half:])
        elif len(self._running) > 1 and not row[0].prefill.is_plain:
            self._running.remove(row[0])
            self._aside.append(row[0])
        else:
            if row[0].writing is not None:
                row[0].writing.fail(logits.explain("for its next token, even with no other document"))
            self._word_of(row[0])
            self._go_on(row, [(ENDED, 0)])

    def _candidate_of(self, document: BatchEntry) -> Candidate:
        """Look up what a prompt may copy next."""
        assert self._lookup is not None and document.writing is not None
        if document.acceptance is None:
            document.acceptance = self._lookup.new_acceptance()
        return Candidate(document.writing.ids, self.group.most_drafts(document), document.acceptance)

    def _word_of(self, document: BatchEntry) -> tuple[int, int]:
        """Return the next token of a prompt on its home rank; finish the prompt if that is its end.

        Returns the token to run next, `ENDED` or `FAILED`; and the length to truncate the cache to if another answer
        begins with this token, else 0. (0, 0) for a prompt whose home is another rank.
        """
        writing, prefill, tokens = document.writing, document.prefill, 0
        if writing is None:
            return 0, 0
        while writing.finish_reason is not None and writing.error is None and writing.begin_next(prefill.logits):
            if document.fresh is not None:
                prefill.cache = copy.deepcopy(document.fresh)
            else:
                tokens = prefill.partition.tokens
        if writing.finish_reason is None:
            return writing.token_ids[-1], tokens
        if writing.error is not None:
            prefill.release()
            prefill.cache = None
        self._finished.append(document)
        return ENDED if prefill.error is None else FAILED, 0

    def _go_on(self, documents: Sequence[BatchEntry], words: Sequence[tuple[int, int]]) -> None:
        """Apply what the prompts' home ranks decided (`_word_of`)."""
        for document, (token, tokens) in zip(list(documents), words, strict=True):
            if token < 0:
                self._running.remove(document)
                self.group.forget_rows()
                if document.writing is None:
                    self._finished.append(document)
                self._running += self._aside  # there may be memory for them now
                self._aside.clear()
                continue
            document.last_token = token
            if tokens:
                document.prefill.cache.truncate(tokens)
