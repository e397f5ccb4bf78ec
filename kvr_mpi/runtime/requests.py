"""Sources of documents, and a document with its current prompts, on the leader of a chain.

Most documents have one prompt. A document that is too long and may be split has several prompts, whose answers become
the text of the next prompts, until only one is left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvr_mpi.documents import Asked, Corpus, Document
from kvr_mpi.documents.conversations import encode_conversation
from kvr_mpi.documents.document import AS_THE_JOB, OwnGeneration
from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.documents.prompts import Frame, PromptText, fit_prompt, make_frame, split_text
from kvr_mpi.documents.questions import parse_answer_id
from kvr_mpi.documents.templates import TEXT
from kvr_mpi.errors import DocumentError
from kvr_mpi.job import PromptSection
from kvr_mpi.job.readout import Readout
from kvr_mpi.runtime.prompt import Prompt, sum_records, too_little
from kvr_mpi.store.prefix import StoredPrefix
from kvr_mpi.store.record import Record

MAX_REDUCTIONS = 8  # maximum number of times that a text is split before the document fails


def seed_of(document: Document, job_seed: int) -> int:
    """Return the seed of a document, independent of ranks.

    If a document's row has a seed, it replaces the job's seed and the id, so rows with equal seeds sample alike.
    """
    own = document.generation.seed
    text = f"{job_seed} {document.id}" if own is None else f"{own}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """The job's settings for prompts.

    frame, reduce_frame : the prompt around a document's text, and around the answers about its parts.
    max_new_tokens : maximum tokens of an answer.
    questions : frames by name, of several prompts about each document, or of questions about stored documents.
    readout : what the job reads of its prompts; None: it writes answers.
    shares_beginning : whether prompts about a document may share the prefill of their common beginning.
    generation : settings that apply only to final answers.
    score_column : field of a document's row with the continuations to score, if there is one.
    seed : the job's seed for sampling.
    checks_answers : compare answers with their documents.
    """

    tokenizer: Any
    prompt: PromptSection
    frame: Frame
    reduce_frame: Frame
    max_new_tokens: int
    questions: Mapping[str, Frame] = field(default_factory=dict)
    generation: OwnGeneration = AS_THE_JOB
    score_column: str | None = None
    seed: int = 0
    shares_beginning: bool = True
    checks_answers: bool = False
    readout: Readout | None = None

    def text_of(self, document: Document) -> str:
        """Return a document's text, with the instruction that the model's folder puts before it."""
        before = None if self.readout is None else self.readout.instruction
        return (before or "") + document.text

    def scoring(self, document: Document) -> PromptConfig:
        """Return the settings with the document's continuations to score, and with room for the longest.

        Raises `DocumentError` if the document's row has no valid continuations.
        """
        texts = self.generation.score or ()
        if self.score_column is not None:
            texts = _texts_of(self.score_column, document.passed.get(self.score_column))
        if not texts:
            return self
        longest = max(len(encode_text(self.tokenizer, text)) for text in texts)
        return replace(self, generation=replace(self.generation, score=texts), max_new_tokens=longest)

    def of(self, document: Document) -> PromptConfig:
        """Return the settings with the fields of a document's row filled in, and with room for its answer.

        Raises `DocumentError` if the fields leave no room for the document's text.
        """
        own, asked = document.generation.max_new_tokens, self.scoring(document)
        new_tokens = asked.max_new_tokens if own is None else own
        frame, reduce_frame = self.frame, self.reduce_frame
        if document.asked is not None and self.questions:
            _, name = parse_answer_id(document.id)
            frame = self.questions[name]
            reduce_frame = frame if self.prompt.reduce_template is None else reduce_frame
        if document.is_raw:
            ends = self.readout is not None
            frame = make_frame(self.tokenizer, TEXT, chat_template=False, max_prompt_tokens=frame.max_tokens, ends=ends)
        context = frame.max_tokens + self.max_new_tokens
        room = context - new_tokens
        if room < 1:
            what = f"max_tokens is {own}" if own is not None else f"a continuation has {new_tokens} tokens"
            raise DocumentError(f"{what}, but the context for prompt and answer together has {context} tokens")
        frame, reduce_frame, *others = (
            replace(one, max_tokens=room).filled(self.tokenizer, document.columns)
            for one in (frame, reduce_frame, *self.questions.values())
        )
        if others and self.prompt.kept is not None:  # cut the same text for all prompts about a document
            budget = min(other.text_budget for other in others)
            frame = replace(frame, max_tokens=len(frame.head) + len(frame.tail) + budget)
        return replace(asked, frame=frame, reduce_frame=reduce_frame, max_new_tokens=new_tokens)

    def shared_tokens(self, document: Document, prompt: PromptText) -> int:
        """Count the tokens that a document's prompt shares with its other prompts."""
        if document.asked is None or not self.questions or not self.shares_beginning:
            return 0
        own = self.questions[parse_answer_id(document.id)[1]]
        alike = [one for one in self.questions.values() if (one.head, one.text) == (own.head, own.text)]
        if len(alike) < 2:
            return 0
        # After the shared tokens, each prompt needs at least one of its own.
        return prompt.text[1] - any(not one.tail for one in alike)


@dataclass(slots=True)
class Split:
    """A document and its current prompts.

    work : the document's work in the job's unit, for the progress.
    texts : texts of the current prompts.
    stored : location of the stored keys and values with which its only prompt begins, if there are any.
    shared_tokens : number of first tokens of its only prompt that other prompts about the same document share.
    """

    document: Document
    prompt_config: PromptConfig
    work: int
    texts: list[PromptText] = field(default_factory=list)
    stored: StoredPrefix | None = None
    shared_tokens: int = 0
    past: dict[str, Any] = field(default_factory=dict)  # sums over earlier prompts
    _stage: int = 0
    _text_ids: Sequence[int] = ()
    _received: dict[int, Record] = field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        """Whether the answer to the current prompt is the document's answer."""
        return len(self.texts) == 1

    def make_prompts(self, keys: Iterator[str]) -> list[Prompt]:
        """Make prompts of the current texts, each with the next of `keys`."""
        document, config = self.document, self.prompt_config
        own = document.generation
        generation = own.over(config.generation) if self.is_final else own
        seed, about = seed_of(document, config.seed), about_record(document)
        tokens = sum(text.tokens for text in self.texts)
        compared = document.text if config.checks_answers and self.is_final else ""
        return [
            Prompt(
                ids=text.ids,
                dropped_tokens=text.dropped_tokens,
                min_coverage=config.prompt.min_coverage,
                text=text.text,
                key=next(keys),
                document_id=document.id,
                new_tokens=config.max_new_tokens,
                generation=generation,
                seed=seed,
                about=about,
                document_work=self.work,
                # A prompt made of answers contains none of the document's own tokens.
                work=0 if self.past else self.work * text.tokens // tokens,
                part=part,
                parts=len(self.texts),
                is_final=self.is_final,
                past=self.past if self.is_final else {},
                shared_tokens=self.shared_tokens,
                stored=self.stored,
                compared_text=compared,
                frame_text=text.around_text(config.tokenizer) if compared else "",
            )
            for part, text in enumerate(self.texts)
        ]

    def receive(self, part: int, record: Record) -> bool:
        """Process the record of a part; after the last one, make the next texts and return True.

        Raises `DocumentError` if a part failed, or the answers are not shorter than the text.
        """
        self._received[part] = record
        if record.error:
            raise DocumentError(f"part {part + 1} of {len(self.texts)}: {record.error}")
        if record.ended_early == "reasoning" and not self.is_final:
            raise DocumentError(
                f"part {part + 1} of {len(self.texts)} has no answer: the model was still reasoning after "
                f"{record.new_tokens} tokens; raise generation.max_new_tokens, or switch its reasoning off "
                f"(prompt.template_args)"
            )
        if len(self._received) < len(self.texts):
            return False
        answers = [self._received[number] for number in range(len(self.texts))]
        self._received = {}
        self.past = sum_records(answers, self.past)
        text = "\n\n".join(one.answer for one in answers)
        ids = self.prompt_config.reduce_frame.text.encode(self.prompt_config.tokenizer, text)
        if not text.strip() or len(ids) >= len(self._text_ids) or self._stage == MAX_REDUCTIONS:
            raise DocumentError(
                f"too long, and the {len(answers)} answers about its parts are not shorter than the text; lower "
                f"generation.max_new_tokens, or set prompt.too_long = 'keep-head'"
            )
        self.split_text(ids, self.prompt_config.reduce_frame)
        return True

    def split_text(self, ids: Sequence[int], frame: Frame) -> None:
        """Split a text into the texts of the next prompts."""
        self._text_ids, self._stage = ids, self._stage + 1
        self.texts = split_text(self.prompt_config.tokenizer, frame, ids)


class DocumentSource(Protocol):
    """Documents by number; only the leaders of chains read them."""

    corpus: Corpus

    def read(self, number: int) -> Document:
        """Read a document; if that fails, the result contains the error."""

    def request(self, document: Document, work: int) -> Split:
        """Make a document's prompts; raise `DocumentError` if none can be made, such as if it is empty or too long."""


class TextSource:
    """A corpus of texts; `prompts` are the templates by name if there are several prompts about each document."""

    def __init__(
        self,
        corpus: Corpus,
        prompt_config: PromptConfig,
        find_prefix: Callable[[Sequence[int]], StoredPrefix | None] | None = None,
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        self.corpus, self._config, self._prompts = corpus, prompt_config, prompts or {}
        self._find_prefix = find_prefix or (lambda ids: None)

    def read(self, number: int) -> Document:
        """Read a document's text, and select its prompt if there are several."""
        document = self.corpus.read(number)
        if not self._prompts:
            return document
        about, name = parse_answer_id(document.id)
        return replace(document, asked=Asked(about, self._prompts[name], contents_of(document)))

    def request(self, document: Document, work: int) -> Split:
        """Put the template around a text; cut a text that is too long, or split it into several prompts."""
        if document.error is not None:
            raise DocumentError(document.error)
        config, wanted = self._config.of(document), document.passed.get("dimensions", 0) if document.is_raw else 0
        if config.readout is not None and wanted > config.readout.dimensions:
            raise DocumentError(f"body.dimensions is {wanted}; embeddings have {config.readout.dimensions}")
        request = Split(document, config, work)
        if document.messages:
            options = config.prompt.chat.over(document.template_args)
            chat, most = encode_conversation(config.tokenizer, document.messages, options), config.frame.max_tokens
            if len(chat) > most:  # conversations are never cut
                raise DocumentError(
                    f"too long: the conversation has {len(chat)} tokens; at most {most} fit with an answer of "
                    f"{config.max_new_tokens}"
                )
            request.texts = [PromptText(tuple(chat), text=(0, len(chat)))]
            request.stored = self._find_prefix(request.texts[0].ids)
            return request
        ids = config.frame.text.encode(config.tokenizer, config.text_of(document))
        if not ids:
            raise DocumentError(
                f"{document.id} has no tokens: the tokenizer of this model drops all of its {document.chars} characters"
            )
        prompts = config.prompt
        if prompts.too_long == "split" and len(ids) > config.frame.text_budget:
            request.split_text(ids, config.frame)
        else:
            prompt = fit_prompt(config.frame, ids, kept=prompts.kept)
            if (coverage := 1 - prompt.dropped_tokens / len(ids)) < prompts.min_coverage:
                raise DocumentError(too_little(coverage, prompts.min_coverage))
            request.texts, request.stored = [prompt], self._find_prefix(prompt.ids)
            request.shared_tokens = config.shared_tokens(document, prompt)
        return request


def _texts_of(column: str, value: Any) -> tuple[str, ...]:
    """Read the continuations that a row contains."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise DocumentError(
            f"the field {column!r} (generation.score) is {str(value)[:60]!r}; expected a non-empty text or a "
            f"list of them"
        )
    return tuple(texts)


def error_record(document: Document, reason: str) -> Record:
    """Make the record of a document that cannot be processed."""
    about: dict[str, Any] = about_record(document)
    return Record(document.id, "error", error=reason, **about)


def about_record(document: Document) -> dict[str, str]:
    """Return the fields of a record that are known before the document runs: its metadata, its hash if it was read."""
    columns = json.dumps(dict(document.passed)) if document.passed else ""
    if document.asked is None:
        return {"columns": columns, "document_sha256": contents_of(document)}
    asked = document.asked
    return {"document": asked.document, "question": asked.question, "columns": columns, "document_sha256": asked.sha256}


def contents_of(document: Document) -> str:
    """Return the hash of a document's contents; empty if it could not be read."""
    return document.sha256 if document.error is None else ""
