"""A document: its text or conversation, and the other fields of its row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a document, and the hash of the document's text."""

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
    top_logprobs : store the log-probabilities of the answer's tokens and of this many top tokens; -1: none.
    score : continuations to score instead of generating an answer.
    n : number of answers to one prompt.
    json_schema : JSON schema that the answer follows, as text; empty: none.
    keep_reasoning : the answer contains the reasoning of a model that thinks first.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    top_logprobs: int | None = None
    score: tuple[str, ...] | None = None
    n: int | None = None
    json_schema: str | None = None
    keep_reasoning: bool | None = None

    def over(self, job: OwnGeneration) -> OwnGeneration:
        """Return these settings, with missing values taken from a job."""
        own = {spec.name: value for spec in fields(self) if (value := getattr(self, spec.name)) is not None}
        return replace(job, **own)


AS_THE_JOB = OwnGeneration()
# Settings that count for the hash of a document only if it has them, so that earlier answers stay valid.
HASHED_IF_SET = ("keep_reasoning",)


@dataclass(frozen=True, slots=True)
class Document:
    """A document of the corpus: a text, an error, or a question about another document.

    asked : the question; the text is then the location of the document's keys and values, or the document's text.
    columns : fields of its row that templates insert, as text.
    passed : fields of its row that are copied to its record.
    messages : the whole prompt, if it is a conversation; the text is then the joined messages.
    generation : generation settings of its answer.
    is_raw : the text is the whole prompt, without template and chat template.
    template_args : variables of the chat template, in addition to the job's.
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
    template_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chars(self) -> int:
        """Length of the text in characters, which estimates the work before tokens are counted."""
        return len(self.text)

    @property
    def sha256(self) -> str:
        """Hash of the text, with the row's fields and settings if there are any, as hexadecimal digits."""
        more = (self.columns, self.passed, self.messages, self.is_raw, self.generation, self.template_args)
        if more == ({}, {}, (), False, AS_THE_JOB, {}):
            return hashlib.sha256(self.text.encode()).hexdigest()
        said = [[message.role, message.content] for message in self.messages]
        settings = asdict(self.generation)
        own = {name: value for name, value in settings.items() if value is not None or name not in HASHED_IF_SET}
        whole = [self.text, dict(self.columns), dict(self.passed), said, self.is_raw, own, dict(self.template_args)]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def kind_of(value: Any) -> str:
    """Describe the type of a field of a row."""
    return "missing" if value is None else f"a {type(value).__name__}"
