"""Results in OpenAI's batch response format, one line per request, answered or failed.

The format: https://platform.openai.com/docs/api-reference/batch/request-output
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from math import isfinite
from typing import Any, BinaryIO

import numpy as np

from kvr_mpi.documents.openai_batch import COMPLETIONS, EMBEDDINGS
from kvr_mpi.errors import DataError
from kvr_mpi.store.record import Record

LEAST_NORM = 1e-12
LEAST_LOGPROB = -9999.0  # the format's stand-in for minus infinity, which JSON cannot represent
FINISH_REASONS = {"repetition": "length"}  # of ours that the format lacks
# Arrays that each sample of a prompt has separately.
OF_SAMPLES = ("token_ids", "logprobs", "top_tokens", "top_logprobs")


def write_responses(records: Iterable[Record], stream: BinaryIO, model: str) -> None:
    """Write one JSON object per line; `model` is the name for requests that named none.

    Raises `DataError` if a record does not come from a request (``documents.format = "openai-batch"``).
    """
    for record in records:
        stream.write(json.dumps(response_of(record, model), ensure_ascii=False).encode() + b"\n")


def response_of(record: Record, model: str) -> dict[str, Any]:
    """Return a record as the response to its request."""
    request, digest = record.passed, hashlib.sha256(record.id.encode()).hexdigest()[:24]
    found: dict[str, Any] = {"id": f"batch_req_{digest}", "custom_id": request.get("custom_id", record.id)}
    if record.status != "done":
        return {**found, "response": None, "error": {"code": "invalid_request", "message": record.error}}
    if "custom_id" not in request:
        raise DataError(
            f"{record.id!r} is not a request of a batch file, so it has no response; --format openai-batch needs a job "
            f"with documents.format = 'openai-batch'"
        )
    if request.get("url") == EMBEDDINGS:
        return {**found, "response": _response(digest, _embedding_body(record, request, model)), "error": None}
    is_completion = request.get("url") == COMPLETIONS
    name, kind = f"chatcmpl-{digest}", "chat.completion"
    if is_completion:
        name, kind = f"cmpl-{digest}", "text_completion"
    body = {
        "id": name,
        "object": kind,
        "created": int(datetime.fromisoformat(record.finished_at).timestamp()),
        "model": request.get("model", model),
        "choices": [_choice(record, number, is_completion) for number in range(max(1, len(record.sampled)))],
        "usage": {
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.new_tokens,
            "total_tokens": record.prompt_tokens + record.new_tokens,
        },
    }
    return {**found, "response": _response(digest, body), "error": None}


def _response(digest: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": 200, "request_id": f"req_{digest}", "body": body}


def _embedding_body(record: Record, request: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the body of the response to a request for an embedding, in the length and encoding that it asks for."""
    kept = np.array(record.embedding[: request.get("dimensions")], np.float32)
    if "dimensions" in request:
        kept /= max(float(np.linalg.norm(kept)), LEAST_NORM)
    encoded = base64.b64encode(kept.astype("<f4").tobytes()).decode()
    values = encoded if request.get("encoding_format") == "base64" else [float(str(value)) for value in kept]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": values}],
        "model": request.get("model", model),
        "usage": {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens},
    }


def _choice(record: Record, number: int, is_completion: bool) -> dict[str, Any]:
    """Return one of a record's answers."""
    if record.sampled:
        arrays: dict[str, Any] = {name: tuple(record.sampled[number].get(name, ())) for name in OF_SAMPLES}
        told = record.sampled[number]
        texts = {name: told[name] for name in ("answer", "finish_reason")}
        record = replace(record, **texts, reasoning=told.get("reasoning", ""), **arrays)
    logprobs = _completion_logprobs(record) if is_completion else _chat_logprobs(record)
    choice: dict[str, Any] = {
        "index": number,
        "logprobs": logprobs,
        "finish_reason": FINISH_REASONS.get(record.finish_reason, record.finish_reason),
    }
    if is_completion:
        return {**choice, "text": record.answer}
    reasoning = {"reasoning": record.reasoning} if record.reasoning else {}  # as vLLM's servers call it
    return {**choice, "message": {"role": "assistant", **reasoning, "content": record.answer}}


def _chat_logprobs(record: Record) -> dict[str, Any] | None:
    """Return the log-probabilities in the format of a chat completion."""
    if not record.logprobs:
        return None
    content = []
    for place, (token, logprob) in enumerate(zip(record.token_ids, record.logprobs, strict=True)):
        likeliest = [_of_token(record, *one) for one in _likeliest(record, place)]
        content.append({**_of_token(record, token, logprob), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def _completion_logprobs(record: Record) -> dict[str, Any] | None:
    """Return a completion's log-probabilities; of tokens with the same text, the most likely is listed."""
    if not record.logprobs:
        return None
    texts = [record.texts[str(token)] for token in record.token_ids]
    offsets = [sum(map(len, texts[:place])) for place in range(len(texts))]
    top = []
    for place in range(len(texts)):
        likeliest: dict[str, float] = {}
        for token, logprob in _likeliest(record, place):
            likeliest.setdefault(record.texts[str(token)], _least(logprob))
        top.append(likeliest)
    return {
        "tokens": texts,
        "token_logprobs": [_least(logprob) for logprob in record.logprobs],
        "top_logprobs": top if record.top else None,
        "text_offset": offsets,
    }


def _likeliest(record: Record, place: int) -> list[tuple[int, float]]:
    """Return the most likely tokens at one position of the answer, with their log-probabilities."""
    some = slice(place * record.top, (place + 1) * record.top)
    return list(zip(record.top_tokens[some], record.top_logprobs[some], strict=True))


def _of_token(record: Record, token: int, logprob: float) -> dict[str, Any]:
    """Describe a token; the bytes of a partial character are unknown."""
    text = record.texts[str(token)]
    return {"token": text, "logprob": _least(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


def _least(logprob: float) -> float:
    return logprob if isfinite(logprob) else LEAST_LOGPROB
