"""One document on its way: its prompts, what was answered to them, and in the end its record.

Stands between the prompts and the waves that run them. A document is one prompt; one that is too long and may be split
is several, whose answers make the next prompt, until one is left. Every rank of a chain goes the same way: what only
one rank knows (an answer is decoded on one of them) is told to the others as a `PromptOutcome`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvr_mpi.decode.logprobs import TokenLogprobs
from kvr_mpi.decode.sampling import Answer
from kvr_mpi.decode.scoring import Score
from kvr_mpi.documents import Document
from kvr_mpi.documents.document import AS_THE_JOB, OwnGeneration
from kvr_mpi.documents.prompts import Frame, Prompt, encode_text, make_frame, split_text
from kvr_mpi.documents.questions import parse_answer_id
from kvr_mpi.documents.templates import TEXT
from kvr_mpi.errors import DocumentError
from kvr_mpi.job import PromptSection
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.store.outputs import Record

# Rounds of answers about answers before a document is given up.
MAX_REDUCTIONS = 8


def seed_of(document: Document, job_seed: int) -> int:
    """Give each document its own stream of random numbers, whatever rank it comes to.

    A row with a seed of its own has the stream of that seed, as have all that name it.
    """
    own = document.generation.seed
    text = f"{job_seed} {document.id}" if own is None else f"{own}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """How documents are asked: what all readings of a job share.

    frame, reduce_frame : around a document's text, and around the answers about its parts.
    max_new_tokens : of an answer.
    questions : frames by the name of the prompt, if there are several about each document.
    generation : what is wanted of final answers only.
    score_column : field of a document's row with what is to be scored, if there is one.
    """

    tokenizer: Any
    prompt: PromptSection
    frame: Frame
    reduce_frame: Frame
    max_new_tokens: int
    questions: Mapping[str, Frame] = field(default_factory=dict)
    generation: OwnGeneration = AS_THE_JOB
    score_column: str | None = None

    def scoring(self, document: Document) -> PromptConfig:
        """Name the continuations of a document that are to be scored, and leave room for the longest.

        Raises
        ------
        DocumentError
            If its row does not have them.
        """
        texts = self.generation.score or ()
        if self.score_column is not None:
            texts = _texts_of(self.score_column, document.passed.get(self.score_column))
        if not texts:
            return self
        longest = max(len(encode_text(self.tokenizer, text)) for text in texts)
        return replace(self, generation=replace(self.generation, score=texts), max_new_tokens=longest)

    def of(self, document: Document) -> PromptConfig:
        """Fill in the fields of a document's row, and leave room for its own answer.

        Raises
        ------
        DocumentError
            If they leave no room for its text.
        """
        own, asked = document.generation.max_new_tokens, self.scoring(document)
        new_tokens = asked.max_new_tokens if own is None else own
        frame, reduce_frame = self.frame, self.reduce_frame
        if document.asked is not None and self.questions:
            _, name = parse_answer_id(document.id)
            frame = self.questions[name]
            reduce_frame = frame if self.prompt.reduce_template is None else reduce_frame
        if document.is_raw:
            frame = make_frame(self.tokenizer, TEXT, chat_template=False, max_prompt_tokens=frame.max_tokens)
        room = frame.max_tokens + self.max_new_tokens - new_tokens
        frame, reduce_frame, *others = (
            replace(one, max_tokens=room).filled(self.tokenizer, document.columns)
            for one in (frame, reduce_frame, *self.questions.values())
        )
        if others and self.prompt.too_long == "truncate":  # all prompts about a document are about the same text
            budget = min(other.text_budget for other in others)
            frame = replace(frame, max_tokens=len(frame.head) + len(frame.tail) + budget)
        return replace(asked, frame=frame, reduce_frame=reduce_frame, max_new_tokens=new_tokens)

    def shared_tokens(self, document: Document, prompt: Prompt) -> int:
        """Count the tokens of a document's prompt that other prompts about it begin with, too."""
        if document.asked is None or not self.questions:
            return 0
        own = self.questions[parse_answer_id(document.id)[1]]
        alike = [one for one in self.questions.values() if one.begins_like(own)]
        if len(alike) < 2:
            return 0
        # Each of them has to go on with something.
        return prompt.text[1] - any(not one.tail and not one.tail_gaps for one in alike)


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """What became of one prompt, as all ranks of its chain are told."""

    error: str = ""
    text: str = ""
    tokens: int = 0
    computed: int = 0  # of them
    new_tokens: int = 0
    prefill_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0
    strategy: str = ""
    compression: str = ""  # by which keys and values were dropped before decoding
    retained_tokens: float = 0.0  # of a KV head, on average
    retained_bytes: int = 0
    cache: str = ""  # what a rolling one held


@dataclass(slots=True)
class DocumentRequest:
    """A document and its prompts of the moment.

    Parameters
    ----------
    document : Document
    prompt_config : PromptConfig
    work : int
        How much work it is, in the job's unit, for the progress.
    prompts : list of Prompt
    prefix : SharedPrefix or None
        What they begin with, if its keys and values are there already.
    shared_tokens : int
        How many tokens of its only prompt other prompts about the same document begin with, too.
    """

    document: Document
    prompt_config: PromptConfig
    work: int
    prompts: list[Prompt] = field(default_factory=list)
    prefix: SharedPrefix | None = None
    shared_tokens: int = 0
    past: list[PromptOutcome] = field(default_factory=list)  # of earlier prompts
    _stage: int = 0
    _text_ids: Sequence[int] = ()
    _received: dict[int, PromptOutcome] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The document's."""
        return self.document.id

    @property
    def new_tokens(self) -> int:
        """Most tokens of an answer."""
        return self.prompt_config.max_new_tokens

    @property
    def generation(self) -> OwnGeneration:
        """How the prompts of the moment are answered: what is told of answers is told of the document's only."""
        own = self.document.generation
        return own.over(self.prompt_config.generation) if self.is_final else own

    @property
    def is_final(self) -> bool:
        """Whether the answer to the prompt of the moment is the document's."""
        return len(self.prompts) == 1

    def receive_outcome(self, part: int, outcome: PromptOutcome) -> bool:
        """Take what became of a part; with the last of them, make the next prompts and say so.

        Raises
        ------
        DocumentError
            If a part failed, or the answers got no shorter than the text.
        """
        self._received[part] = outcome
        if outcome.error:
            raise DocumentError(f"part {part + 1} of {len(self.prompts)}: {outcome.error}")
        if len(self._received) < len(self.prompts):
            return False
        answers = [self._received[number] for number in range(len(self.prompts))]
        self._received = {}
        self.past += answers
        text = "\n\n".join(answer.text for answer in answers)
        ids = encode_text(self.prompt_config.tokenizer, text)
        if not text.strip() or len(ids) >= len(self._text_ids) or self._stage == MAX_REDUCTIONS:
            raise DocumentError(
                f"too long, and the {len(answers)} answers about its parts are not shorter than the text; lower "
                f"generation.max_new_tokens, or set prompt.too_long = 'truncate'"
            )
        self.split_text(ids, self.prompt_config.reduce_frame)
        return True

    def outcome(self, part: int, prefill: Prefill, answer: Answer) -> PromptOutcome:
        """Sum up one prompt's answer."""
        tokens, retained = self.prompts[part].tokens, prefill.retained
        return PromptOutcome(
            text=answer.text,
            tokens=tokens,
            computed=tokens - prefill.known_tokens,
            new_tokens=answer.new_tokens,
            prefill_s=prefill.seconds,
            wait_s=prefill.wait_s,
            decode_s=answer.seconds,
            strategy=prefill.strategy,
            compression="" if retained is None else retained.method,
            retained_tokens=0.0 if retained is None else retained.tokens,
            retained_bytes=0 if retained is None else retained.kv_bytes,
            cache=prefill.rolling,
        )

    def begun_record(self, partition: Partition) -> Record:
        """Say what is known of a document when its final prompt is prefilled, by the prompt's slices."""
        prompt = self.prompts[0]
        return replace(
            error_record(self.document, ""),
            slices=partition.bounds,
            prompt_sha256=prompt.sha256,
            prompt_tokens=prompt.tokens,
        )

    def record(self, prefill: Prefill, answer: Answer) -> Record:
        """Say what is to be stored of a document, after its final prompt."""
        prompt = self.prompts[0]
        outcomes = [*self.past, self.outcome(0, prefill, answer)]
        computed = sum(outcome.computed for outcome in outcomes)
        seconds = sum(outcome.prefill_s for outcome in outcomes)
        return replace(
            error_record(self.document, ""),
            status="done",
            answer=answer.text,
            token_ids=answer.token_ids,
            **_told_of(answer),
            slices=prefill.partition.bounds,
            prompt_sha256=prompt.sha256,
            prompt_tokens=sum(outcome.tokens for outcome in outcomes),
            computed_tokens=computed,
            dropped_tokens=prompt.dropped_tokens,
            new_tokens=sum(outcome.new_tokens for outcome in outcomes),
            finish_reason=answer.finish_reason,
            strategy="+".join(dict.fromkeys(outcome.strategy for outcome in outcomes)),
            ttft_s=seconds,
            prefill_tokens_per_s=computed / seconds,
            wait_s=sum(outcome.wait_s for outcome in outcomes),
            decode_s=sum(outcome.decode_s for outcome in outcomes),
            parts=len(outcomes),
            compression=outcomes[-1].compression,
            retained_tokens=sum(outcome.retained_tokens for outcome in outcomes),
            retained_bytes=sum(outcome.retained_bytes for outcome in outcomes),
            cache=outcomes[-1].cache,
        )

    def split_text(self, ids: Sequence[int], frame: Frame) -> None:
        """Make prompts of parts of a text."""
        self._text_ids, self._stage = ids, self._stage + 1
        self.prompts = split_text(self.prompt_config.tokenizer, frame, ids)


@dataclass(frozen=True, slots=True, eq=False)
class PromptRequest:
    """One prompt of a document.

    key : tells it from all others of its chain, on every rank alike.
    part : its place among the document's prompts of the moment.
    """

    key: str
    document: DocumentRequest
    part: int

    @property
    def prompt(self) -> Prompt:
        """The prompt itself."""
        return self.document.prompts[self.part]

    @property
    def work(self) -> int:
        """This prompt's share of its document's work, by tokens of the document itself."""
        document = self.document
        if document.past:  # an answer about answers
            return 0
        return document.work * self.prompt.tokens // sum(prompt.tokens for prompt in document.prompts)


def _told_of(answer: Answer) -> dict[str, Any]:
    """Return the fields of a record that say more of an answer's tokens, if that was asked for."""
    told: dict[str, Any] = {}
    if answer.scores:
        told["scores"] = json.dumps([_as_json(score) for score in answer.scores])
    if answer.samples:
        told["samples"] = json.dumps([_of_sample(sample) for sample in answer.samples])
    if answer.logprobs is not None:
        told |= _numbers(answer.logprobs)
        texts = [one.logprobs.texts for one in answer.samples or (answer,) if one.logprobs is not None]
        told["token_texts"] = json.dumps({str(token): text for some in texts for token, text in some.items()})
    return told


def _numbers(found: TokenLogprobs) -> dict[str, Any]:
    return {"logprobs": found.logprobs, "top_tokens": found.top_tokens, "top_logprobs": found.top_logprobs}


def _of_sample(answer: Answer) -> dict[str, Any]:
    told = {"answer": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
    return told if answer.logprobs is None else told | _numbers(answer.logprobs)


def _as_json(score: Score) -> dict[str, Any]:
    return {
        "text": score.text,
        "logprob": score.logprob,
        "tokens": len(score.token_ids),
        "logprob_per_token": score.logprob / len(score.token_ids),
        "is_greedy": score.is_greedy,
        "token_ids": score.token_ids,
        "token_logprobs": score.logprobs,
    }


def _texts_of(column: str, value: Any) -> tuple[str, ...]:
    """Read the continuations that a row names."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise DocumentError(
            f"the field {column!r} (generation.score_column) is {str(value)[:60]!r}; expected a non-empty text or a "
            f"list of them"
        )
    return tuple(texts)


def error_record(document: Document, reason: str) -> Record:
    """Say what is to be stored of a document that cannot be done."""
    columns = json.dumps(dict(document.passed)) if document.passed else ""
    if document.asked is None:
        sha256 = hashlib.sha256(document.text.encode()).hexdigest()
        return Record(document.id, "error", error=reason, columns=columns, document_sha256=sha256)
    asked = document.asked
    return Record(
        document.id,
        "error",
        document=asked.document,
        question=asked.question,
        error=reason,
        columns=columns,
        document_sha256=asked.sha256,
    )
