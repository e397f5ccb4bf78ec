"""Rows of a table to documents: which fields are the id, the text, template fields and columns to keep.

An error in a row becomes the error of its document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, time
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

from kvr_mpi.documents.document import Document, kind_of
from kvr_mpi.documents.messages import joined, parse_messages
from kvr_mpi.documents.openai_batch import parse_request
from kvr_mpi.errors import DocumentError

# Default encoding of text files.
UTF_8 = "utf-8"

RowKind = Literal["text", "messages", "openai-batch"]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of a corpus are read.

    text_field : field with the text or the conversation.
    encoding : of text files.
    kind : a row is a text, a conversation, or a request (``openai_batch``).
    columns : fields that templates name.
    passed : fields that are copied to the records.
    model : of requests: the model that the first one names; others may name no other one.
    embeds : requests are for embeddings; otherwise for answers.
    """

    id_field: str = "id"
    text_field: str = "text"
    columns: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    kind: RowKind = "text"
    encoding: str = UTF_8
    model: str | None = None
    embeds: bool = False

    @property
    def needed(self) -> tuple[str, ...]:
        """All fields that are read."""
        if self.kind == "openai-batch":
            return ("custom_id", "method", "url", "body", *self.passed)
        return tuple(dict.fromkeys((self.id_field, self.text_field, *self.columns, *self.passed)))

    def document(self, row: Mapping[str, Any], place: str) -> Document:
        """Convert a row to a document; `place` becomes the id of a row without one."""
        passed = {field: _plain(row[field]) for field in self.passed if row.get(field) is not None}
        if self.kind == "openai-batch":
            request = parse_request(row, place, embeds=self.embeds)
            if request.error is None and self.model and request.passed.get("model", self.model) != self.model:
                other = f"body.model is {request.passed['model']!r}, the first row's is {self.model!r}"
                error = f"{other}; a job uses one model: split the file"
                request = Document(request.id, error=error, passed=request.passed)
            return replace(request, passed={**passed, **request.passed})
        name = place
        try:
            own = row.get(self.id_field)
            name = own if isinstance(own, str) else _name_of(own, place, self.id_field)
            value = row.get(self.text_field)
            if self.kind == "messages":
                messages = parse_messages(value, self.text_field)
                return Document(name, joined(messages), passed=passed, messages=messages)
            if not isinstance(value, str):
                raise DocumentError(
                    f"the text field {self.text_field!r} is {kind_of(value)}; expected a string (fields: "
                    f"{', '.join(sorted(map(str, row))) or 'none'})"
                )
            columns = {field: _as_text(row, field) for field in self.columns}
        except DocumentError as error:
            return Document(name, error=f"{place}: {error}", passed=passed)
        return Document(name, value, columns=columns, passed=passed)

    def text_file(self, name: str, text: str) -> Document:
        """Convert a whole file, which has no fields, to a document."""
        if self.kind != "text":
            return Document(name, error=f"{name} is a text file; documents.format = {self.kind!r} needs rows")
        if self.columns:
            wanted = ", ".join(map(repr, self.columns))
            return Document(
                name, error=f"{name}: the template uses {wanted}, but a text file has no fields; use files of rows"
            )
        return Document(name, text)


DEFAULT_ROWS = RowFormat()


def _name_of(value: Any, place: str, id_field: str) -> str:
    """Return a row's id."""
    if value is None or _names_something(value):
        return place if value is None else str(value)
    what = f"{value} (no number)" if isinstance(value, float) else kind_of(value)
    raise DocumentError(f"the id field {id_field!r} is {what}; expected a string or a number")


def _names_something(value: Any) -> bool:
    """Whether a value can be an id or template field: text, a number, or a Parquet type such as a date or UUID."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int | Decimal | date | time | UUID) and not isinstance(value, bool)


def _as_text(row: Mapping[str, Any], field: str) -> str:
    """Return a field as text for a template."""
    value = row.get(field)
    if isinstance(value, bool):
        return "true" if value else "false"
    if not _names_something(value):
        raise DocumentError(
            f"the field {field!r}, used in the template, is {kind_of(value)}; expected a string or a number (fields: "
            f"{', '.join(sorted(map(str, row)))})"
        )
    return str(value)


def _plain(value: Any) -> Any:
    """Convert a field to JSON; unknown types become text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # replaces lone surrogates, which UTF-8 cannot encode
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return value.hex() if isinstance(value, bytes) else str(value)
