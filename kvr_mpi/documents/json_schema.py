"""JSON schemas for answers, checked before anything is loaded.

What a schema may say is llguidance's business, which turns it into a grammar of tokens (``decode.grammar``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvr_mpi.disk import read_regular

MAX_SCHEMA_BYTES = 1 << 20
# What OpenAI's format calls any JSON object.
ANY_OBJECT = '{"type": "object"}'
# One of these a schema has, or it asks for nothing: misspelt ones are ignored by everything that reads schemas.
KEYWORDS = {
    "$ref", "allOf", "anyOf", "const", "enum", "items", "oneOf", "pattern", "prefixItems", "properties", "required",
    "type",
}  # fmt: skip
# Written in one line: where blanks are free, a model may write nothing else.
LAYOUT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MISSING = "answers by a JSON schema need llguidance; `pip install kvr-mpi[json]`"


def read_schema(value: str) -> str:
    """Return a schema as text in one line, given the schema itself or the name of its file.

    Raises
    ------
    ValueError
        If the file cannot be read, or holds no JSON object.
    """
    where, text = "the schema", value
    if not value.lstrip().startswith("{"):
        where = repr(value)
        try:
            text = read_regular(Path(value), MAX_SCHEMA_BYTES).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise ValueError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    return one_line(schema, where)


def one_line(schema: Any, where: str) -> str:
    """Return a schema as text in one line.

    Raises
    ------
    ValueError
        If it is none, as far as that shows without llguidance.
    """
    if not isinstance(schema, dict) or KEYWORDS.isdisjoint(schema):
        raise ValueError(
            f"{where} is no JSON schema: {json.dumps(schema)[:60]}; expected an object with at least one of "
            f"{', '.join(sorted(KEYWORDS))}"
        )
    return json.dumps(schema, ensure_ascii=False)


def grammar_of(schema: str) -> str:
    """Compile a schema to a grammar.

    Raises
    ------
    ImportError
        If llguidance is not installed.
    ValueError
        If it is no schema, or says what cannot be followed.
    """
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_json_schema(schema, defaults=LAYOUT)
    if wrong := LLMatcher.validate_grammar(grammar):
        raise ValueError(f"this JSON schema cannot be followed: {' '.join(wrong.split())}")
    return grammar


def why_not_followed(schema: str) -> str | None:
    """Return why answers cannot follow a schema; None if they can."""
    try:
        grammar_of(schema)
    except ImportError:
        return MISSING
    except ValueError as error:
        return str(error)
    return None
