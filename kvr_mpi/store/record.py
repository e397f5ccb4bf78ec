"""The record of one document, as it is stored and shown.

    id, status       status is "done" or "error"
    error            why the document failed; if it begins with "cannot be read
                     now: ", the next start of the job tries it again
    document, question    of ``kvr ask`` and of several prompts
    columns          fields of the document's row, as JSON
    answer, token_ids     its text, and its tokens
    pieces           ids of its keys and values, in lines only
    slices           bounds of the prompt over the ranks (ranks + 1); of a
                     split text, of the prompt that combines its parts
    document_sha256  hash of the document's text and of the other fields of its
                     row that were used
    prompt_sha256
    prompt_tokens    length of the prompt
    computed_tokens  tokens of the prompt that were computed; the others' keys
                     and values existed already
    text_tokens      tokens of the document's text in the prompt
    dropped_tokens   tokens of the text cut from a prompt that was too long
    new_tokens, finish_reason, strategy, parts, finished_at
    ttft_s, prefill_tokens_per_s, wait_s, decode_s
    rank_s           seconds of all ranks: its prefill, and its share of its
                     decode steps
    joules           its share of the run's energy, by rank_s; only if measured
    compression      method and settings; empty: nothing was dropped
    retained_tokens, retained_bytes    what compression kept
    cache            of a rolling cache: what it held, and whether that is
                     exact
    kernels          hardware, dtype and kernels that the answer may depend
                     on; absent for float32 on CPUs
    logprobs         natural log-probabilities of token_ids; null: minus
                     infinity
    top_tokens, top_logprobs    the most likely tokens at each position
                     (tokens * top, flat)
    token_texts      the texts of all these tokens, by id (JSON)
    samples          all answers, if n > 1 (a list of JSON objects); answer is
                     the first of them
    scores           of given continuations (a list of JSON objects)

Fields in `ASKED_FOR` are only there if a job asked for them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from math import inf, isfinite, nan
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, create_model

from kvr_mpi.errors import DataError
from kvr_mpi.plain import Strict, explain, read_plain

J = TypeVar("J", dict[str, Any], list[dict[str, Any]])
STATUSES = ("done", "error")
# Fields at the beginning of a record's line, before the pieces, and the text after the pieces.
HEAD, HEAD_END = ("id", "status", "error", "finished_at", "document_sha256"), b', "document": '
# Omitted from the line if empty.
ASKED_FOR = (
    "logprobs",
    "top_tokens",
    "top_logprobs",
    "token_texts",
    "scores",
    "samples",
    "cache",
    "text_tokens",
    "kernels",
    "rank_s",
    "joules",
)
OF_RUN = "joules"  # never written: computed from the run's energy, which may still grow


@dataclass(frozen=True, slots=True)
class Record:
    """The result of one document."""

    id: str
    status: str  # "done" or "error"
    document: str = ""  # id of the document that a question is about; ``id`` is then the question's
    question: str = ""
    error: str = ""
    columns: str = ""  # requested columns of the document's row: a JSON object, or empty
    answer: str = ""
    token_ids: tuple[int, ...] = ()
    slices: tuple[int, ...] = ()  # of the prompt that gave the answer; for a split text, of the last prompt
    logprobs: tuple[float, ...] = ()  # of token_ids, if requested: before temperature, penalties and the like
    top_tokens: tuple[int, ...] = ()  # the likeliest tokens at each position, in order; flat
    top_logprobs: tuple[float, ...] = ()
    token_texts: str = ""  # of all these tokens: a JSON object, or empty
    scores: str = ""  # of given continuations: a JSON list, or empty
    samples: str = ""  # all answers, if there is more than one: a JSON list, or empty
    document_sha256: str = ""
    prompt_sha256: str = ""
    prompt_tokens: int = 0
    computed_tokens: int = 0  # tokens of the prompt that were computed; the others' keys and values existed already
    text_tokens: int = 0  # tokens of the document's text, in all its prompts
    dropped_tokens: int = 0  # tokens of the text that were cut off because the prompt was too long
    new_tokens: int = 0
    finish_reason: str = ""
    strategy: str = ""
    ttft_s: float = 0.0  # from the chain's start on this prompt to its first token
    prefill_tokens_per_s: float = 0.0
    wait_s: float = 0.0  # part of ttft_s in which the last rank waited for keys and values
    decode_s: float = 0.0  # from its first token to its last, with waits for its wave; of parts, the longest counts
    rank_s: float = 0.0  # over all ranks; a packed prompt or a decode step is charged by the document's share
    joules: float = 0.0  # the run's energy in proportion to rank_s; 0: not known
    parts: int = 1  # number of prompts: more than one if the text was split
    compression: str = ""  # method that dropped keys and values before decoding; empty: none, the answer is exact
    retained_tokens: float = 0.0  # tokens that a KV head kept on average, with compression or a rolling cache
    retained_bytes: int = 0  # keys and values retained, over all layers
    cache: str = ""  # the rolling cache, and whether the answer is exact with it; empty: it held all tokens
    kernels: str = ""  # GPU or processor, dtype and kernels that the answer may depend on; empty: float32 on CPUs
    finished_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))

    def as_dict(self) -> dict[str, Any]:
        """Fields as plain values."""
        values = ((name, getattr(self, name)) for name in KINDS)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}

    def as_json(self) -> dict[str, Any]:
        """Fields as JSON values, without infinities and NaN; fields stored as JSON are decoded."""
        read = {"columns": self.passed, "token_texts": self.texts, "scores": self.scored, "samples": self.sampled}
        values = {**self.as_dict(), **read}
        found = {name: _finite(value) for name, value in values.items()}
        return found | {"coverage": self.coverage, "joules": self.joules or None}

    @property
    def coverage(self) -> float:
        """Fraction of the document that the answer is based on; below 1 if text or tokens were dropped.

        Tokens that compression or a rolling cache dropped count as not seen; a document without an answer has 0.
        """
        if self.status != "done":
            return 0.0
        text = self.text_tokens or self.prompt_tokens  # a prompt of ``kvr ask`` contains no document text
        kept = min(1.0, self.retained_tokens / self.prompt_tokens) if self.retained_tokens else 1.0
        return kept * text / (text + self.dropped_tokens) if text else 1.0

    @property
    def is_cut_off(self) -> bool:
        """Whether the answer ended at `generation.max_new_tokens`, which may be in the middle of a sentence."""
        return self.finish_reason == "length" and self.new_tokens > 0

    @property
    def ranks(self) -> int:
        """Number of ranks that shared the prompt; 0 if it failed, or if the text was split into several prompts."""
        return max(1, len(self.slices) - 1) if self.status == "done" and self.parts == 1 else 0

    @property
    def top(self) -> int:
        """Number of most likely tokens stored for each position."""
        return len(self.top_tokens) // max(1, len(self.token_ids))

    @property
    def texts(self) -> dict[str, str]:
        """Texts of the tokens that have log-probabilities, by token id as a string."""
        return self._read("token_texts", dict)

    @property
    def scored(self) -> list[dict[str, Any]]:
        """The scored continuations in the given order: text, logprob, tokens, is_greedy and more."""
        return self._read("scores", list)

    @property
    def shown(self) -> str:
        """The answer as shown to people; for scores, each continuation with its log-probability."""
        return self.answer or ", ".join(f"{one['text']!r} {one['logprob']:.3f}" for one in self.scored)

    @property
    def sampled(self) -> list[dict[str, Any]]:
        """All answers to the prompt if there are several: answer, token_ids, finish_reason and log-probabilities."""
        return self._read("samples", list)

    @property
    def passed(self) -> dict[str, Any]:
        """Columns of the document's row, by name."""
        return self._read("columns", dict)

    def _read(self, name: str, kind: type[J]) -> J:
        """Decode a field stored as JSON, empty if it has no text; raises `DataError` if it is not of this kind."""
        text = getattr(self, name)
        try:
            found = json.loads(text) if text else kind()
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, kind):
            expected = "object" if kind is dict else "list"
            raise DataError(f"{self.id}: its {name} are {text[:60]!r}; expected a JSON {expected}")
        return found


# Types of a record's fields, by name.
KINDS = {spec.name: str(spec.type) for spec in fields(Record)}
ARRAYS = tuple(name for name, kind in KINDS.items() if kind.startswith("tuple"))
REALS = tuple(name for name in ARRAYS if "float" in KINDS[name])
LONG = (*ARRAYS, "answer", "token_texts", "scores", "samples")  # arrays, and texts that may be long


def _finite(value: Any) -> Any:
    """Convert a value, list or object to JSON values."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def record_values(record: Record, pieces: Sequence[str]) -> dict[str, Any]:
    """Return the values of a record's line in the log; `pieces` are the ids of its keys and values."""
    values = {
        name: value for name, value in record.as_dict().items() if name != OF_RUN and (value or name not in ASKED_FOR)
    }
    values |= {name: _finite(value) for name, value in values.items() if name in REALS or isinstance(value, float)}
    return {**{name: values[name] for name in HEAD}, "pieces": list(pieces), **values}


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The beginning of a record's line; lines of earlier versions have the hash further on."""

    id: str
    status: Literal["done", "error"]
    error: str
    finished_at: str
    pieces: tuple[str, ...]
    document_sha256: str | None = None


def read_head(line: bytes) -> RecordHead:
    """Parse the beginning of a record's line, which is faster than parsing it all; raises `ValueError`."""
    return read_plain(RecordHead, line.partition(HEAD_END)[0] + b"}")


Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
# Values that a line may have in a field of each type; null stands for minus infinity in an array, else for NaN.
STORED: dict[str, Any] = {
    "str": str,
    "int": Whole,
    "float": float | None,
    "tuple[int, ...]": tuple[Whole, ...],
    "tuple[float, ...]": tuple[float | None, ...],
}
STORED_FIELDS: dict[str, Any] = {
    **{name: (STORED[kind], None if name in ASKED_FOR else ...) for name, kind in KINDS.items()},
    "status": (Literal["done", "error"], ...),
    "pieces": (tuple[str, ...], ...),
    "seal": (str, ...),
}
_Line = create_model("_Line", __base__=Strict, **STORED_FIELDS)


def read_record(line: bytes, where: str) -> Record:
    """Parse a record's line, whose checksum is valid; missing fields of `ASKED_FOR` get their defaults.

    Raises `DataError` if a field is missing or unknown, or has the wrong type; the message begins with `where`.
    """
    try:
        stored = _Line.model_validate_json(line)
    except ValidationError as error:
        raise DataError(f"{where}: {explain(error)}") from error
    found: dict[str, Any] = {name: getattr(stored, name) for name in stored.model_fields_set & KINDS.keys()}
    for name, value in found.items():
        if name in REALS:
            found[name] = tuple(-inf if one is None else one for one in value)
        elif value is None:
            found[name] = nan
    return Record(**found)
