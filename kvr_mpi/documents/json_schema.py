"""JSON schemas for answers, checked before anything is loaded.

llguidance decides which schemas are supported; it compiles them to grammars over tokens (``decode.grammar``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvr_mpi.disk import read_regular
from kvr_mpi.plain import parse_json

MAX_SCHEMA_BYTES = 1 << 20
ANY_OBJECT = '{"type": "object"}'  # the schema for OpenAI's response format json_object: any JSON object
# A schema without any of these has no effect: readers of schemas ignore misspelt keywords.
KEYWORDS = {
    "$ref", "allOf", "anyOf", "const", "enum", "items", "oneOf", "pattern", "prefixItems", "properties", "required",
    "type",
}  # fmt: skip
# Answers are one line: if whitespace is unrestricted, a model may generate nothing but whitespace.
LAYOUT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MISSING = "answers by a JSON schema need llguidance; `pip install llguidance`"


def read_schema(value: str) -> str:
    """Return a schema, or the one in a file of this name, as one line of text; `ValueError` if it is no schema."""
    where, text = "the schema", value
    if not value.lstrip().startswith("{"):
        where = repr(value)
        try:
            text = read_regular(Path(value), MAX_SCHEMA_BYTES).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{where} cannot be read: {getattr(error, 'strerror', None) or error} (looked for "
                f"{Path(value).absolute()}); expected a file with a JSON schema, or the schema itself as text"
            ) from error
    try:
        schema = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    return one_line(schema, where)


def one_line(schema: Any, where: str) -> str:
    """Return a schema as one line of text; raise `ValueError` if it clearly is not one (`grammar_of` checks fully)."""
    if not isinstance(schema, dict) or KEYWORDS.isdisjoint(schema):
        raise ValueError(
            f"{where} is not a JSON schema: {json.dumps(schema)[:60]}; expected an object with at least one of "
            f"{', '.join(sorted(KEYWORDS))}"
        )
    return json.dumps(schema, ensure_ascii=False)


def grammar_of(schema: str) -> str:
    """Compile a schema; raises `ImportError` without llguidance, `ValueError` if it is invalid or not supported."""
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_json_schema(schema, defaults=LAYOUT)
    if wrong := LLMatcher.validate_grammar(grammar):
        raise ValueError(f"this JSON schema is not supported: {' '.join(wrong.split())}")
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
