"""The record of one document, as it is stored and shown.

`Record` is its only definition: lines of logs, tables of exports and the documentation are made from its fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from math import inf, isfinite, nan
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, create_model

from kvr_mpi.errors import DataError
from kvr_mpi.plain import Strict, explain, read_plain

J = TypeVar("J", dict[str, Any], list[dict[str, Any]])
STATUSES = ("done", "error")
HEAD_END = b', "document": '  # what follows the head of a record's line


def stored(what: str, default: Any = MISSING, *, if_asked: bool = False, is_written: bool = True) -> Any:
    """Define a field of a record.

    what : its meaning, for the documentation; empty: the name says it.
    if_asked : lines leave it out if it is empty, since it is only there if a job asked for it.
    is_written : False if it is computed when the record is read.
    """
    return field(default=default, metadata={"what": what, "if_asked": if_asked, "is_written": is_written})


@dataclass(frozen=True, slots=True)
class Record:
    """The result of one document."""

    id: str = stored("of the document, or of the answer to a question about it: DOCUMENT#NAME")
    status: str = stored("done or error")
    document: str = stored("id of the document that a question is about", "")
    question: str = stored("of kvr ask, and of several prompts", "")
    error: str = stored("why it failed; after 'cannot be read now: ', the next start of the job tries it again", "")
    columns: str = stored("requested fields of the document's row (JSON)", "")
    answer: str = stored("its text", "")
    token_ids: tuple[int, ...] = stored("tokens of the reasoning and the answer", ())
    slices: tuple[int, ...] = stored("bounds of the prompt over the ranks (ranks + 1); the last prompt's, if split", ())
    logprobs: tuple[float, ...] = stored(
        "natural log-probabilities of token_ids, before temperature and penalties; null: minus infinity",
        (),
        if_asked=True,
    )
    top_tokens: tuple[int, ...] = stored("most likely tokens at each position (tokens * top, flat)", (), if_asked=True)
    top_logprobs: tuple[float, ...] = stored("of these", (), if_asked=True)
    token_texts: str = stored("texts of all these tokens, by id (JSON)", "", if_asked=True)
    scores: str = stored("of given continuations (JSON list of objects)", "", if_asked=True)
    embedding: tuple[float, ...] = stored("of the document (dimension), float32", (), if_asked=True)
    text_logprobs: tuple[float, ...] = stored(
        "natural log-probability of each scored token of the document, or its sum over each stretch", (), if_asked=True
    )
    text_logprob: float = stored("of the document: the sum over its scored tokens", 0.0, if_asked=True)
    scored_tokens: int = stored("of the document's text: all, or all but a prompt's first", 0, if_asked=True)
    reasoning: str = stored("of a model that thinks before it answers", "", if_asked=True)
    samples: str = stored("all answers, if n > 1 (JSON list of objects); answer is the first", "", if_asked=True)
    copied: str = stored(
        "stretches of the answer that are copied from the document: start, stop, document_start and document_stop, in "
        "characters (JSON list of objects)",
        "",
        if_asked=True,
    )
    unsupported: str = stored(
        "numbers, dates and names of the answer that are not in the document: text, kind, start and stop (JSON list of "
        "objects); empty: not checked",
        "",
        if_asked=True,
    )
    document_sha256: str = stored("hash of the document's text and of the other fields of its row that were used", "")
    prompt_sha256: str = stored("hash of the prompt's token ids", "")
    prompt_tokens: int = stored("length of the prompt", 0)
    computed_tokens: int = stored("tokens of it that were computed; the others' keys and values existed already", 0)
    text_tokens: int = stored("tokens of the document's text, in all its prompts", 0, if_asked=True)
    dropped_tokens: int = stored("tokens of the text cut from a prompt that was too long", 0)
    new_tokens: int = stored("", 0)
    finish_reason: str = stored("stop, length or repetition; empty: no answer", "")
    strategy: str = stored("", "")
    ttft_s: float = stored(
        "from the chain's start on this prompt to its first token; of parts, the sum of their prefills", 0.0
    )
    prefill_tokens_per_s: float = stored("", 0.0)
    wait_s: float = stored("part of ttft_s in which the last rank waited for keys and values", 0.0)
    decode_s: float = stored("from the first token to the last; of parts, the longest", 0.0)
    decode_steps: int = stored(
        "steps after the first token; fewer than new_tokens if drafts were kept", 0, if_asked=True
    )
    rank_s: float = stored("seconds of all ranks: its prefill, and its share of its decode steps", 0.0, if_asked=True)
    joules: float = stored(
        "its share of the run's energy, by rank_s; only if measured", 0.0, if_asked=True, is_written=False
    )
    parts: int = stored("number of prompts: more than one if the text was split", 1)
    compression: str = stored("method and settings; empty: nothing was dropped", "")
    retained_tokens: float = stored("tokens that a KV head kept on average", 0.0)
    retained_bytes: int = stored("keys and values that were kept, over all layers", 0)
    cache: str = stored("of a rolling cache: what it held, and whether that is exact", "", if_asked=True)
    kernels: str = stored(
        "hardware, dtype and kernels that the answer may depend on; empty: float32 on CPUs", "", if_asked=True
    )
    finished_at: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"),
        metadata={"what": "ISO 8601, UTC", "if_asked": False, "is_written": True},
    )

    def as_dict(self) -> dict[str, Any]:
        """Fields as plain values."""
        values = ((name, getattr(self, name)) for name in KINDS)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}

    def as_json(self) -> dict[str, Any]:
        """Fields as JSON values, without infinities and NaN; fields stored as JSON are decoded."""
        read = {"columns": self.passed, "token_texts": self.texts, "scores": self.scored, "samples": self.sampled}
        read |= {"copied": self.copies, "unsupported": self.flags}
        values = {**self.as_dict(), **read}
        found = {name: _finite(value) for name, value in values.items()}
        return found | self.computed | {"joules": self.joules or None}

    @property
    def computed(self) -> dict[str, float | int | None]:
        """Values of the fields `COMPUTED`."""
        return {name: getattr(self, name) for name in COMPUTED}

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
    def copied_share(self) -> float | None:
        """Fraction of the answer's characters that are copied from the document; None if it was not checked."""
        if not self.unsupported:
            return None
        copied: int = sum(one["stop"] - one["start"] for one in self.copies)
        return copied / max(1, len(self.answer))

    @property
    def unsupported_count(self) -> int | None:
        """Number of places of the answer that are `unsupported`; None if it was not checked."""
        return len(self.flags) if self.unsupported else None

    @property
    def marked(self) -> str:
        """The answer with its unsupported words in brackets: "It costs [25?] euros"."""
        answer = self.answer
        for one in reversed(self.flags):
            start, stop = one["start"], one["stop"]
            answer = f"{answer[:start]}[{answer[start:stop]}?]{answer[stop:]}"
        return answer

    @property
    def ended_early(self) -> str:
        """Why an answer did not end by itself: ``length`` (`generation.max_new_tokens`) or ``repetition``; or empty.

        ``reasoning``: it did not begin, either.
        """
        if self.reasoning and not self.answer:
            return "reasoning"
        return self.finish_reason if self.new_tokens and self.finish_reason in ("length", "repetition") else ""

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
        if self.embedding:
            return f"embedding of {len(self.embedding)} dimensions"
        if self.scored_tokens:
            return f"log-probability {self.text_logprob:.1f} of {self.scored_tokens} tokens"
        return self.answer or ", ".join(f"{one['text']!r} {one['logprob']:.3f}" for one in self.scored)

    @property
    def sampled(self) -> list[dict[str, Any]]:
        """All answers to the prompt if there are several, with their token_ids, finish_reason and log-probabilities."""
        return self._read("samples", list)

    @property
    def copies(self) -> list[dict[str, Any]]:
        """Copied stretches: start and stop in the answer, document_start and document_stop in the document's text."""
        return self._read("copied", list)

    @property
    def flags(self) -> list[dict[str, Any]]:
        """Unsupported words in the order of the answer: text, kind (number, date or name), start and stop."""
        return self._read("unsupported", list)

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
MEANINGS = {spec.name: str(spec.metadata["what"]) for spec in fields(Record)}
ASKED_FOR = tuple(spec.name for spec in fields(Record) if spec.metadata["if_asked"])
WRITTEN = tuple(spec.name for spec in fields(Record) if spec.metadata["is_written"])
ARRAYS = tuple(name for name, kind in KINDS.items() if kind.startswith("tuple"))
REALS = tuple(name for name in ARRAYS if "float" in KINDS[name])
# Fields that are computed from the others, with their types; None is possible for those of checked answers.
COMPUTED = {"coverage": "float", "unsupported_count": "int", "copied_share": "float"}
LONG = (
    *ARRAYS,
    "answer",
    "reasoning",
    "token_texts",
    "scores",
    "samples",
    "copied",
    "unsupported",
)  # arrays, and texts that may be long


def _finite(value: Any) -> Any:
    """Convert a value, list or object to JSON values."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value


def record_values(record: Record, pieces: Sequence[str]) -> dict[str, Any]:
    """Return the values of a record's line in the log; `pieces` are the ids of its keys and values."""
    plain = record.as_dict()
    values = {name: plain[name] for name in WRITTEN if plain[name] or name not in ASKED_FOR}
    values |= {name: _finite(value) for name, value in values.items() if name in REALS or isinstance(value, float)}
    return {**{name: values[name] for name in HEAD}, "pieces": list(pieces), **values}


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The beginning of a record's line."""

    id: str
    status: Literal["done", "error"]
    error: str
    finished_at: str
    pieces: tuple[str, ...]
    document_sha256: str


HEAD = tuple(spec.name for spec in fields(RecordHead) if spec.name in KINDS)


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
