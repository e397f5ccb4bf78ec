"""Results in OpenAI's batch response format: a line for each request, answered or not.

The format: https://platform.openai.com/docs/api-reference/batch/request-output
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, BinaryIO

from kvr_mpi.documents.openai_batch import COMPLETIONS
from kvr_mpi.errors import DataError
from kvr_mpi.store.outputs import Record


def write_responses(records: Iterable[Record], answers: BinaryIO, errors: BinaryIO, model: str) -> None:
    """Write one JSON object per line.

    Parameters
    ----------
    records : iterable of Record
        Of a job with ``documents.format = "openai-batch"``.
    answers, errors : binary streams
        For requests that were answered, and those that were not; they may be the same.
    model : str
        What answered, where a request named no model.

    Raises
    ------
    DataError
        If an answer is to no request.
    """
    for record in records:
        stream = answers if record.status == "done" else errors
        stream.write(json.dumps(response_of(record, model), ensure_ascii=False).encode() + b"\n")


def response_of(record: Record, model: str) -> dict[str, Any]:
    """Return a record as the response to its request."""
    request, digest = record.passed, hashlib.sha256(record.id.encode()).hexdigest()[:24]
    found: dict[str, Any] = {"id": f"batch_req_{digest}", "custom_id": request.get("custom_id", record.id)}
    if record.status != "done":
        return {**found, "response": None, "error": {"code": "invalid_request", "message": record.error}}
    if "custom_id" not in request:
        raise DataError(
            f"{record.id!r} is no request of a batch, so there is no response to write; --format openai-batch is for "
            f"jobs with documents.format = 'openai-batch'"
        )
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": record.finish_reason}
    if request.get("url") == COMPLETIONS:
        name, kind, choice["text"] = f"cmpl-{digest}", "text_completion", record.answer
    else:
        name, kind = f"chatcmpl-{digest}", "chat.completion"
        choice["message"] = {"role": "assistant", "content": record.answer}
    body = {
        "id": name,
        "object": kind,
        "created": int(datetime.fromisoformat(record.finished_at).timestamp()),
        "model": request.get("model", model),
        "choices": [choice],
        "usage": {
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.new_tokens,
            "total_tokens": record.prompt_tokens + record.new_tokens,
        },
    }
    return {**found, "response": {"status_code": 200, "request_id": f"req_{digest}", "body": body}, "error": None}
