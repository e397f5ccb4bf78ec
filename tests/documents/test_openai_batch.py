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


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def test_a_request_is_a_document() -> None:
    document = parse_request(row(), "rows:1")
    assert document.error is None and document.id == "r1" and document.messages == (Message("user", "Why?"),)
    assert document.passed == {"custom_id": "r1", "url": "/v1/chat/completions", "model": "m"}
    assert document.generation == OwnGeneration()


def test_settings_of_a_request() -> None:
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
    silent = parse_request(row(), "rows:1").generation
    assert silent.over(job) == job
    plain = parse_request(row(n=1, logprobs=False, response_format={"type": "text"}), "rows:1").generation
    assert plain.over(job) == OwnGeneration(n=1, top_logprobs=-1, json_schema="")


def test_a_completion_is_its_prompt() -> None:
    request = row(url="/v1/completions", prompt="Once upon", max_tokens=3)
    del request["body"]["messages"]
    document = parse_request(request, "rows:1")
    assert document.error is None and document.is_raw and document.text == "Once upon" and not document.messages


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
    ("body", "said"),
    [
        ({"n": 2, "temperature": 0}, "body.n is 2, but with body.temperature = 0 all answers are the same"),
        ({"n": 129}, "body.n is 129; expected a whole number from 1 to 128"),
        ({"n": True}, "body.n is True"),
        ({"logprobs": 2}, "body.logprobs is 2; expected true or false"),
        ({"top_logprobs": 2}, "body.top_logprobs is 2, but body.logprobs is None"),
        ({"logprobs": True, "top_logprobs": 21}, "body.top_logprobs is 21; expected a whole number from 0 to 20"),
        ({"logprobs": True, "top_logprobs": True}, "body.top_logprobs is True"),
        ({"stream": True}, "body.stream is True"),
        ({"response_format": {"type": "grammar"}}, "expected the type 'text', 'json_object' or 'json_schema'"),
        ({"response_format": "json_object"}, "expected the type 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "body.response_format: its schema is no JSON schema: null"),
        ({"response_format": schema_of({"typ": "object"})}, 'is no JSON schema: {"typ": "object"}'),
        ({"response_format": schema_of({"type": "objekt"})}, "Invalid type: objekt"),
        (
            {"response_format": {"type": "json_object"}, "stop": "x"},
            "body.stop cannot be combined with body.response_format",
        ),
        ({"frequency_penalty": 0.5}, "body.frequency_penalty is 0.5"),
        ({"tools": [{"type": "function"}]}, "body.tools"),
        ({"temprature": 1, "beams": 3}, "body has beams, temprature"),
        ({"max_tokens": 0}, "body.max_tokens is 0; expected at least 1"),
        ({"max_tokens": 2.5}, "body.max_tokens is 2.5"),
        ({"max_tokens": True}, "body.max_tokens is True"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "body.max_completion_tokens is 4, but body.max_tokens is 3"),
        ({"temperature": -1}, "body.temperature is -1"),
        ({"temperature": float("nan")}, "body.temperature is nan"),
        ({"top_p": 0}, "body.top_p is 0"),
        ({"stop": ["a", ""]}, "body.stop"),
        ({"seed": "7"}, "body.seed is '7'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "body.messages[0].role is 'tool'"),
        ({"messages": None}, "body.messages is missing"),
    ],
)
def test_what_cannot_be_done_as_asked_is_named(body: dict[str, Any], said: str) -> None:
    document = parse_request(row(**body), "rows:1")
    assert document.id == "r1" and said in (document.error or "")
    assert document.passed == {"custom_id": "r1", "url": "/v1/chat/completions", "model": "m"}


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
    assert [document.id for document in documents] == [
        "a",
        "a#2",
        "b",
        "c",
        "batch.jsonl:5",
        "line\\nfeed",
        "d",
    ]
    assert set(errors) == {"a#2", "b", "c", "batch.jsonl:5", "line\\nfeed"}
    assert "body.model is 'another', the first row's is 'm'" in errors["b"]
    named = [document.passed.get("custom_id") for document in documents]
    assert named == ["a", "a", "b", "c", None, "line\nfeed", "d"]
    corpus = scan_corpus([str(file)], rows=RowFormat(kind="openai-batch"))
    assert [corpus.read(number) for number in range(7)] == documents


def test_settings_that_change_become_an_error(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "batch.jsonl", row(temperature=1))
    corpus = scan_corpus([str(file)], rows=RowFormat(kind="openai-batch"))
    write_lines(file, row(temperature=2))
    assert "has changed since the job began" in (corpus.read(0).error or "")
