"""Batch files, and other documents than a job's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_jobs import TEXT, load

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def batch_of(job: Path) -> Callable[..., Path]:
    """Write a job of requests in OpenAI's batch format: of (id, body), or (id, body, url); others are rows as given."""

    def write(*requests: Any, name: str = "batch") -> Path:
        rows = []
        for one in requests:
            if isinstance(one, tuple):
                custom_id, body, url = (*one, CHAT)[:3]
                said = {"messages": [{"role": "user", "content": TEXT}]} if url == CHAT else {"prompt": TEXT}
                one = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **said, **body}}
            rows.append(json.dumps(one) + "\n")
        file, path = job.with_name(f"{name}.jsonl"), job.with_name(f"{name}.toml")
        file.write_text("".join(rows))
        text = job.read_text().replace(load(job).documents.path[0], str(file))
        path.write_text(re.sub("prompt.template = .*", 'documents.format = "openai-batch"', text))
        return path

    return write


@pytest.fixture
def documents(tmp_path: Path) -> Callable[[dict[str, str]], str]:
    """Write other documents than the job's, by id; returns the setting that names them."""

    def write(texts: dict[str, str]) -> str:
        file = tmp_path / f"{len(texts)}-documents.jsonl"
        file.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))
        return f"documents.path={file}"

    return write


@pytest.fixture
def unmerged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what ranks write as if it were too large to be put together at the end of a run."""
    monkeypatch.setattr("kvr_mpi.store.rewrite.MERGE_MAX_BYTES", 0)
