"""Rows of OpenAI's batch format, as ``vllm run-batch`` reads them too: a request each, which becomes a document.

A request is refused, by an error that names the field, rather than answered in another way than it asks for. The
format: https://platform.openai.com/docs/api-reference/batch/request-input
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kvr_mpi.documents.document import Document, OwnGeneration
from kvr_mpi.documents.messages import joined, parse_messages
from kvr_mpi.errors import DocumentError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What is kept of every request, for its response.
PASSED = ("custom_id", "url", "model")
# Fields of a body that say nothing about the answer.
BYSTANDERS = {"metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
# Fields that are understood as far as they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
}
# Settings with a range of numbers: by the field, what they are called here, the type, the range in words, and the test.
Range = tuple[str, tuple[type, ...], str, Callable[[float], bool]]
NUMBERS: dict[str, Range] = {
    "max_tokens": ("max_new_tokens", (int,), "at least 1", lambda value: value >= 1),
    "max_completion_tokens": ("max_new_tokens", (int,), "at least 1", lambda value: value >= 1),
    "temperature": ("temperature", (int, float), "at least 0", lambda value: value >= 0),
    "top_p": ("top_p", (int, float), "more than 0, and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("top_k", (int,), "at least -1", lambda value: value >= -1),
    "min_p": ("min_p", (int, float), "from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("repetition_penalty", (int, float), "more than 0", lambda value: value > 0),
    "seed": ("seed", (int,), "a whole number", lambda value: True),
}


def parse_request(row: Mapping[str, Any], place: str) -> Document:
    """Make a document of a row; what it asks for that there is not is its error.

    Parameters
    ----------
    row : mapping
        With ``custom_id``, ``method``, ``url`` and ``body``.
    place : str
        Names it if it does not say how.
    """
    name, url, body = row.get("custom_id"), row.get("url"), row.get("body")
    model = body.get("model") if isinstance(body, Mapping) else None
    known = zip(PASSED, (name, url, model), strict=True)
    passed = {key: value for key, value in known if isinstance(value, str)}
    try:
        if not isinstance(name, str) or not name:
            raise DocumentError(f"{place}: custom_id is {name!r}; expected text that no other row has")
        _check_envelope(row)
        assert isinstance(body, Mapping)
        generation = _generation(body)
        if url == COMPLETIONS:
            text = body.get("prompt")
            if not isinstance(text, str):
                raise DocumentError(f"body.prompt is {_kind(text)}; expected text")
            return Document(name, text, passed=passed, generation=generation, is_raw=True)
        messages = parse_messages(body.get("messages"), "body.messages")
    except DocumentError as error:
        return Document(name if isinstance(name, str) and name else place, error=str(error), passed=passed)
    return Document(name, joined(messages), passed=passed, messages=messages, generation=generation)


def _check_envelope(row: Mapping[str, Any]) -> None:
    """Refuse what is no request, or one for another endpoint."""
    if row.get("method") not in ("POST", None):
        raise DocumentError(f"method is {row['method']!r}; expected 'POST'")
    url, body = row.get("url"), row.get("body")
    if url not in (CHAT, COMPLETIONS):
        raise DocumentError(f"url is {url!r}: no such endpoint here; expected {CHAT!r} or {COMPLETIONS!r}")
    if not isinstance(body, Mapping):
        raise DocumentError(f"body is {_kind(body)}; expected an object")
    content = "prompt" if url == COMPLETIONS else "messages"
    understood = {content, "stop", *NUMBERS, *NEUTRAL, *BYSTANDERS}
    if unknown := sorted(str(name) for name, value in body.items() if value is not None and name not in understood):
        raise DocumentError(
            f"body has {', '.join(unknown)}, which is not understood here; the row is not answered without "
            f"(understood: {content}, stop, {', '.join(NUMBERS)})"
        )
    for name, values in NEUTRAL.items():
        value = body.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in values):
            if isinstance(value, float) and value in values:  # 0.0
                continue
            raise DocumentError(f"body.{name} is {value!r}: only {values[0]!r} can be had here yet")


def _generation(body: Mapping[str, Any]) -> OwnGeneration:
    """Read how the answer is to be decoded."""
    found: dict[str, Any] = {}
    for name, (ours, types, wanted, is_good) in NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        number = isinstance(value, types) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not is_good(value):
            raise DocumentError(f"body.{name} is {value!r}; expected {wanted}")
        if found.setdefault(ours, value) != value:
            raise DocumentError(f"body.{name} is {value}, but body.max_tokens is {found[ours]}; expected one of them")
    if found.get("top_k") == -1:
        found["top_k"] = 0
    stop = body.get("stop")
    if stop is not None:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
            raise DocumentError(f"body.stop is {stop!r}; expected text, or a list of texts, none of them empty")
        found["stop"] = tuple(stops)
    return OwnGeneration(**found)


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
