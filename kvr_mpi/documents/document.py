"""A document: its text or conversation, and the other fields of its row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the document it is about.

    sha256 : of the document's text.
    """

    document: str
    question: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class OwnGeneration:
    """Generation settings of a row; None means the job's setting.

    temperature : 0 is greedy.
    top_logprobs : keep the log-probabilities of the answer's tokens, and of so many others in each place; -1: none.
    score : continuations to be scored, instead of an answer.
    n : answers to one prompt.
    json_schema : that the answer follows, as text; empty: none.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    top_logprobs: int | None = None
    score: tuple[str, ...] | None = None
    n: int | None = None
    json_schema: str | None = None

    def over(self, job: OwnGeneration) -> OwnGeneration:
        """Return these settings, with missing values taken from a job."""
        own = {spec.name: value for spec in fields(self) if (value := getattr(self, spec.name)) is not None}
        return replace(job, **own)


AS_THE_JOB = OwnGeneration()


@dataclass(frozen=True, slots=True)
class Document:
    """A document of the corpus: its text, its error, or a question about another document, with an id of its own.

    asked : the question; then the text is where the document's keys and values are, or that which it is about.
    columns : of its row, as text: what templates fill in.
    passed : of its row, what goes into its record as it is.
    messages : the whole prompt, if it is a conversation; the text is then all that is said in it.
    generation : how its answer is to be decoded.
    is_raw : the text is the whole prompt: no template, and no chat template, goes around it.
    """

    id: str
    text: str = ""
    error: str | None = None
    asked: Asked | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    passed: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    generation: OwnGeneration = AS_THE_JOB
    is_raw: bool = False

    @property
    def chars(self) -> int:
        """Length of the text in characters, the measure of work before tokens are counted."""
        return len(self.text)

    @property
    def sha256(self) -> str:
        """Hash of the text, or of all fields of the row if there are any, as hexadecimal digits."""
        more = (self.columns, self.passed, self.messages, self.is_raw, self.generation)
        if more == ({}, {}, (), False, AS_THE_JOB):
            return hashlib.sha256(self.text.encode()).hexdigest()
        said = [[message.role, message.content] for message in self.messages]
        whole = [self.text, dict(self.columns), dict(self.passed), said, self.is_raw, asdict(self.generation)]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def kind_of(value: Any) -> str:
    """Describe the type of a field of a row."""
    return "missing" if value is None else f"a {type(value).__name__}"
