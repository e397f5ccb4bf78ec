"""Rows in OpenAI's batch format, as read by ``vllm run-batch``: each request becomes a document.

A request with an unsupported field is refused with an error that names the field, and never answered differently. The
format: https://platform.openai.com/docs/api-reference/batch/request-input
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvr_mpi.documents.chat import why_not_arguments
from kvr_mpi.documents.document import Document, OwnGeneration, kind_of
from kvr_mpi.documents.generation import MAX_PENALTY, MAX_SAMPLES, MAX_TOP_LOGPROBS
from kvr_mpi.documents.json_schema import ANY_OBJECT, one_line, why_not_followed
from kvr_mpi.documents.messages import joined, parse_messages
from kvr_mpi.errors import DocumentError

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
# Of a request for an embedding: the encoding of its numbers, and how many of them the response has.
ENCODINGS = ("float", "base64")
PASSED = ("custom_id", "url", "model")  # fields of a request that are kept for its response
# Fields of a body that do not affect the answer.
BYSTANDERS = {"metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
# Fields with their own parsing code.
SPECIAL = ("stop", "logprobs", "top_logprobs", "response_format", "chat_template_kwargs")
# Fields that are accepted only with values that have no effect.
NEUTRAL: dict[str, Any] = {
    **{"best_of": 1, "echo": False, "stream": False},
    **{"logit_bias": {}, "tool_choice": "none", "tools": []},
}
# Numeric settings: from the field to our name, the types, the range in words, and the test of the range.
NumberRule = tuple[str, tuple[type, ...], str, Callable[[float], bool]]
NUMBERS: dict[str, NumberRule] = {
    "max_tokens": ("max_new_tokens", (int,), "at least 1", lambda value: value >= 1),
    "max_completion_tokens": ("max_new_tokens", (int,), "at least 1", lambda value: value >= 1),
    "temperature": ("temperature", (int, float), "at least 0", lambda value: value >= 0),
    "top_p": ("top_p", (int, float), "more than 0, and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("top_k", (int,), "at least -1", lambda value: value >= -1),
    "min_p": ("min_p", (int, float), "from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("repetition_penalty", (int, float), "more than 0", lambda value: value > 0),
    **{
        name: (name, (int, float), f"from -{MAX_PENALTY} to {MAX_PENALTY}", lambda value: abs(value) <= MAX_PENALTY)
        for name in ("frequency_penalty", "presence_penalty")
    },
    "n": ("n", (int,), f"a whole number from 1 to {MAX_SAMPLES}", lambda value: 1 <= value <= MAX_SAMPLES),
    "seed": ("seed", (int,), "a whole number", lambda value: True),
}


def parse_request(row: Mapping[str, Any], place: str, *, embeds: bool = False) -> Document:
    """Convert a row to a document; unsupported fields become its error; `place` names a row without a custom_id.

    embeds : the job makes embeddings, not answers.
    """
    name, url, body = row.get("custom_id"), row.get("url"), row.get("body")
    model = body.get("model") if isinstance(body, Mapping) else None
    known = zip(PASSED, (name, url, model), strict=True)
    passed = {key: value for key, value in known if isinstance(value, str)}
    try:
        if not isinstance(name, str) or not name:
            raise DocumentError(f"{place}: custom_id is {name!r}; expected a text that is unique in the file")
        _check_envelope(row, embeds=embeds)
        assert isinstance(body, Mapping)
        if url == EMBEDDINGS:
            document = _embedded(name, body)
            return replace(document, passed={**passed, **document.passed})
        generation, template_args = _generation(body, str(url)), _template_args(body, str(url))
        if url == COMPLETIONS:
            text = body.get("prompt")
            if not isinstance(text, str):
                raise DocumentError(f"body.prompt is {kind_of(text)}; expected text")
            return Document(name, text, passed=passed, generation=generation, is_raw=True)
        messages = parse_messages(body.get("messages"), "body.messages")
    except DocumentError as error:
        return Document(name if isinstance(name, str) and name else place, error=str(error), passed=passed)
    return Document(
        name,
        joined(messages),
        passed=passed,
        messages=messages,
        generation=generation,
        template_args=template_args,
    )


def _embedded(name: str, body: Mapping[str, Any]) -> Document:
    """Convert a request for an embedding to a document with what its response needs."""
    text = body.get("input")
    if isinstance(text, list) and len(text) == 1:
        (text,) = text
    if not isinstance(text, str):
        what = f"a list of {len(text)}" if isinstance(text, list) else kind_of(text)
        raise DocumentError(f"body.input is {what}; expected one text: make a request for each text")
    encoding, dimensions = body.get("encoding_format"), body.get("dimensions")
    if encoding not in (None, *ENCODINGS):
        raise DocumentError(f"body.encoding_format is {encoding!r}; expected {' or '.join(map(repr, ENCODINGS))}")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise DocumentError(f"body.dimensions is {dimensions!r}; expected a whole number of at least 1")
    wanted = {"encoding_format": encoding, "dimensions": dimensions}
    return Document(
        name, text, passed={field: value for field, value in wanted.items() if value is not None}, is_raw=True
    )


def _check_envelope(row: Mapping[str, Any], *, embeds: bool) -> None:
    """Refuse rows that are not requests, address other endpoints, or have unsupported fields."""
    if row.get("method") not in ("POST", None):
        raise DocumentError(f"method is {row['method']!r}; expected 'POST'")
    url, body = row.get("url"), row.get("body")
    if embeds != (url == EMBEDDINGS) and url in (CHAT, COMPLETIONS, EMBEDDINGS):
        way = "set output.embedding" if url == EMBEDDINGS else "leave output.embedding out"
        raise DocumentError(f"url is {url!r}, but the job makes {'embeddings' if embeds else 'answers'}: {way}")
    if url not in (CHAT, COMPLETIONS, EMBEDDINGS):
        raise DocumentError(
            f"url is {url!r}: no such endpoint here; expected {CHAT!r}, {COMPLETIONS!r} or {EMBEDDINGS!r}"
        )
    if not isinstance(body, Mapping):
        raise DocumentError(f"body is {kind_of(body)}; expected an object")
    content = {COMPLETIONS: "prompt", CHAT: "messages", EMBEDDINGS: "input"}[str(url)]
    settings = ("encoding_format", "dimensions") if embeds else (*SPECIAL, *NUMBERS)
    understood = {content, *settings, *BYSTANDERS, *([] if embeds else NEUTRAL)}
    if unknown := sorted(str(name) for name, value in body.items() if value is not None and name not in understood):
        raise DocumentError(
            f"body has {', '.join(unknown)}, which is not supported here, so the request is not answered (supported: "
            f"{content}, {', '.join(settings)})"
        )
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and (value != neutral or isinstance(value, bool) != isinstance(neutral, bool)):
            raise DocumentError(
                f"body.{name} is {str(value)[:80]}: not supported; remove it from the body, or set it to {neutral}"
            )


def _generation(body: Mapping[str, Any], url: str) -> OwnGeneration:
    """Read the generation settings."""
    found: dict[str, Any] = {}
    for name, (ours, types, wanted, is_good) in NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        number = isinstance(value, types) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not is_good(value):
            raise DocumentError(f"body.{name} is {value!r}; expected {wanted}")
        value = float(value) if float in types else value  # transformers takes no whole number for a temperature
        if found.setdefault(ours, value) != value:
            raise DocumentError(f"body.{name} is {value}, but body.max_tokens is {found[ours]}; expected one of them")
    if found.get("top_k") == -1:
        found["top_k"] = 0
    if found.get("n", 1) > 1 and found.get("temperature") == 0:
        raise DocumentError(f"body.n is {found['n']}, but with body.temperature = 0 all answers are the same")
    stop = body.get("stop")
    if stop is not None:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
            raise DocumentError(f"body.stop is {stop!r}; expected text, or a list of texts, none of them empty")
        found["stop"] = tuple(stops)
    schema = _schema(body.get("response_format"))
    if schema and "stop" in found:
        raise DocumentError(
            "body.stop cannot be combined with body.response_format: it would end an answer before it is complete"
        )
    keep = True if url == COMPLETIONS else None
    return OwnGeneration(**found, top_logprobs=_top_logprobs(body, url), json_schema=schema, keep_reasoning=keep)


def _template_args(body: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Read the variables of the chat template."""
    given = body.get("chat_template_kwargs")
    if given is None:
        return {}
    why = why_not_arguments(given) if isinstance(given, dict) else f"is {kind_of(given)}; expected an object"
    if url == COMPLETIONS:
        why = "is for chats; a completion has no chat template"
    if why:
        raise DocumentError(f"body.chat_template_kwargs: {why}")
    return dict(given)


def _schema(wanted: Any) -> str | None:
    """Read the schema for the answer; empty for plain text, None if not given."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if wanted is None:
        return None
    if kind == "text":
        return ""
    if kind == "json_object":
        schema = ANY_OBJECT
    elif kind == "json_schema":
        named = wanted.get("json_schema")
        try:
            schema = one_line(named.get("schema") if isinstance(named, Mapping) else None, "its schema")
        except ValueError as error:
            raise DocumentError(f"body.response_format: {error}") from error
    else:
        raise DocumentError(
            f"body.response_format is {str(wanted)[:80]}; expected the type 'text', 'json_object' or 'json_schema'"
        )
    if why := why_not_followed(schema):
        raise DocumentError(f"body.response_format: {why}")
    return schema


def _top_logprobs(body: Mapping[str, Any], url: str) -> int | None:
    """Read how many log-probabilities are requested: chats have a flag and a number, completions a number."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if url == COMPLETIONS:
        if top is not None:
            raise DocumentError(f"body.top_logprobs is {top!r}; for a completion, set body.logprobs = {top!r}")
        name, top = "logprobs", wanted
    else:
        if wanted is not None and not isinstance(wanted, bool):
            raise DocumentError(f"body.logprobs is {wanted!r}; expected true or false")
        name, top = "top_logprobs", 0 if top is None and wanted else top
        if top and not wanted:
            raise DocumentError(f"body.top_logprobs is {top!r}, but body.logprobs is {wanted!r}; expected true")
    if top is not None and (type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS):
        raise DocumentError(f"body.{name} is {top!r}; expected a whole number from 0 to {MAX_TOP_LOGPROBS}")
    return top if url == COMPLETIONS or wanted else None if wanted is None else -1
