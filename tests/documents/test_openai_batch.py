"""Rows of OpenAI's batch format: requests become documents; what cannot be done as asked is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_corpora import errors_of, read, write_lines

from kvr_mpi.documents import RowFormat, scan_corpus
from kvr_mpi.documents.document import Message, OwnGeneration
from kvr_mpi.documents.openai_batch import parse_request

BODY = {"model": "m", "messages": [{"role": "user", "content": "Why?"}]}


def row(name: Any = "r1", url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {**BODY, **body}}


def test_a_request_is_a_document() -> None:
    document = parse_request(row(), "rows:1")
    assert document.error is None and document.id == "r1" and document.messages == (Message("user", "Why?"),)
    assert document.passed == {"custom_id": "r1", "url": "/v1/chat/completions", "model": "m"}
    assert document.generation == OwnGeneration()
    settings = {"max_tokens": 5, "temperature": 0, "top_p": 0.9, "stop": "END", "seed": 7, "top_k": -1, "n": 1}
    neutral = {"presence_penalty": 0.0, "stream": False, "logprobs": None, "response_format": {"type": "text"}}
    document = parse_request(row(**settings, **neutral, user="u", metadata={"a": "b"}), "rows:1")
    assert document.error is None
    assert document.generation == OwnGeneration(5, 0, 0.9, top_k=0, stop=("END",), seed=7, n=1, json_schema="")
    both = parse_request(row(max_tokens=5, max_completion_tokens=5, stop=["a", "b"]), "rows:1").generation
    assert both == OwnGeneration(5, stop=("a", "b"))
    for logprobs, top, wanted in ((True, None, 0), (True, 5, 5), (False, None, -1), (False, 0, -1), (None, None, None)):
        document = parse_request(row(logprobs=logprobs, top_logprobs=top), "rows:1")
        assert document.error is None and document.generation.top_logprobs == wanted


def test_what_a_request_says_goes_before_what_the_job_says() -> None:
    job = OwnGeneration(n=4, top_logprobs=5, json_schema='{"type": "object"}')
    assert parse_request(row(), "rows:1").generation.over(job) == job
    plain = parse_request(row(n=1, logprobs=False, response_format={"type": "text"}), "rows:1").generation
    assert plain.over(job) == OwnGeneration(n=1, top_logprobs=-1, json_schema="")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "/v1/embeddings"}, "url is '/v1/embeddings': no such endpoint"),
        ({"url": None}, "url is None"),
        ({"method": "GET"}, "method is 'GET'"),
        ({"body": None}, "body is missing"),
        ({"body": "words"}, "body is a str"),
        ({"custom_id": None}, "custom_id is None"),
        ({"custom_id": ""}, "custom_id is ''"),
    ],
)
def test_what_is_no_request(change: dict[str, Any], said: str) -> None:
    assert said in (parse_request({**row(), **change}, "rows:1").error or "")


@pytest.mark.parametrize(
    ("said", "body"),
    [
        ("n is 2, but with body.temperature = 0 all answers are the same", {"n": 2, "temperature": 0}),
        ("n is 129; expected a whole number from 1 to 128", {"n": 129}),
        ("n is True", {"n": True}),
        ("logprobs is 2; expected true or false", {"logprobs": 2}),
        ("top_logprobs is 2, but body.logprobs is None", {"top_logprobs": 2}),
        ("top_logprobs is 21; expected a whole number from 0 to 20", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs is True", {"logprobs": True, "top_logprobs": True}),
        ("stream is True", {"stream": True}),
        ("frequency_penalty is 0.5", {"frequency_penalty": 0.5}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("max_tokens is 0; expected at least 1", {"max_tokens": 0}),
        ("max_tokens is 2.5", {"max_tokens": 2.5}),
        ("max_completion_tokens is 4, but body.max_tokens is 3", {"max_tokens": 3, "max_completion_tokens": 4}),
        ("temperature is nan", {"temperature": float("nan")}),
        ("top_p is 0", {"top_p": 0}),
        ("stop", {"stop": ["a", ""]}),
        ("stop cannot be combined", {"response_format": {"type": "json_object"}, "stop": "x"}),
        ("seed is '7'", {"seed": "7"}),
        ("messages[0].role is 'tool'", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages is missing", {"messages": None}),
        ("response_format", {"response_format": {"type": "grammar"}}),
        ("response_format", {"response_format": "json_object"}),
        ("response_format: its schema is no JSON schema", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"typ": "object"}}}}),
    ],
)
def test_what_cannot_be_done_as_asked_is_named(said: str, body: dict[str, Any]) -> None:
    document = parse_request(row(**body), "rows:1")
    assert document.id == "r1" and f"body.{said}" in (document.error or "")
    assert document.passed == {"custom_id": "r1", "url": "/v1/chat/completions", "model": "m"}
    unknown = parse_request(row(**body, temprature=1, beams=3), "rows:1").error or ""
    assert "body has beams, temprature" in unknown


def test_a_file_of_requests(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "batch.jsonl",
        b"\xef\xbb\xbf" + json.dumps(row("a")).encode() + b"\r",
        row("a"),
        row("b", model="another"),
        row("c", n=0),
        b"{not json",
        row("line\nfeed"),
        row("d", temperature=1),
    )
    documents = read(file, kind="openai-batch")
    errors = errors_of(documents)
    bad = ["a#2", "b", "c", "batch.jsonl:5", "line\\nfeed"]
    assert [document.id for document in documents] == ["a", *bad, "d"] and [*errors] == bad
    assert "body.model is 'another', the first row's is 'm'" in errors["b"]
    named = [document.passed.get("custom_id") for document in documents]
    assert named == ["a", "a", "b", "c", None, "line\nfeed", "d"]
    corpus = scan_corpus([str(file)], rows=RowFormat(kind="openai-batch"))
    assert [corpus.read(number) for number in range(7)] == documents
    write_lines(file, row("a", temperature=2))
    assert "has changed since the job began" in (corpus.read(0).error or "")
