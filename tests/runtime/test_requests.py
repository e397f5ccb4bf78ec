"""A document on its way: one prompt or several, what was answered to them, and in the end its record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvr_mpi.decode.sampling import Answer
from kvr_mpi.documents import Corpus, Document
from kvr_mpi.documents.prompts import Frame
from kvr_mpi.errors import DocumentError
from kvr_mpi.job import PromptSection
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.requests.document_request import DocumentRequest, PromptConfig, PromptOutcome, PromptRequest
from kvr_mpi.requests.sources import TextSource

FRAME = Frame(head=(1, 2), tail=(3,), max_tokens=23)  # twenty tokens for the text
SENTENCES = "The old bridge was inspected in March and found to be sound. " * 8


def request(tokenizer: Any, text: str, too_long: str = "error") -> DocumentRequest:
    config = PromptConfig(tokenizer, PromptSection(template="{text}", too_long=too_long), FRAME, FRAME, 8)
    return TextSource(Corpus((), ()), config).request(Document("a.txt", text), work=100)


def prefill(tokens: int, seconds: float = 2.0) -> Prefill:
    return Prefill(Partition((0, tokens)), None, torch.zeros(1), seconds, wait_s=0.5)


def test_a_document_is_one_prompt(tokenizer: Any) -> None:
    document = request(tokenizer, "hello there")
    assert document.id == "a.txt" and document.is_final
    (prompt,) = document.prompts
    assert tokenizer.decode(prompt.ids[2:-1]) == "hello there"
    one = PromptRequest("2.1", document, 0)
    assert one.prompt is prompt and one.work == 100
    record = document.record(prefill(8), Answer((7, 8), "hi", "stop", 1.5))
    assert (record.id, record.status, record.answer, record.token_ids) == ("a.txt", "done", "hi", (7, 8))
    assert (record.prompt_tokens, record.new_tokens, record.parts) == (prompt.tokens, 2, 1)
    assert (record.ttft_s, record.wait_s, record.decode_s) == (2.0, 0.5, 1.5)


def test_what_cannot_be_a_prompt_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DocumentError, match="has no tokens"):
        request(tokenizer, "")
    with pytest.raises(DocumentError, match="20"):
        request(tokenizer, SENTENCES)


def test_a_long_document_is_split_and_its_answers_are_read_again(tokenizer: Any) -> None:
    document = request(tokenizer, SENTENCES, too_long="split")
    parts = len(document.prompts)
    assert parts >= 3 and not document.is_final
    works = [PromptRequest(str(part), document, part).work for part in range(parts)]
    assert sum(works) <= 100 < sum(works) + parts
    for part in range(parts):
        outcome = document.outcome(part, prefill(10), Answer((1,), "ab"[part % 2], "stop", 1.0))
        assert document.receive_outcome(part, outcome) == (part == parts - 1)
    assert PromptRequest("x", document, 0).work == 0, "an answer about answers is no work of the document's"
    assert document.is_final
    (last,) = document.prompts
    assert tokenizer.decode(last.ids[2:-1]) == "\n\n".join("ab"[part % 2] for part in range(parts))
    record = document.record(prefill(last.tokens), Answer((5,), "end", "length", 1.0))
    assert record.parts == parts + 1 and record.answer == "end" and record.new_tokens == parts + 1
    assert record.ttft_s == pytest.approx(2.0 * (parts + 1))


def test_a_part_that_fails_ends_the_document(tokenizer: Any) -> None:
    document = request(tokenizer, SENTENCES, too_long="split")
    with pytest.raises(DocumentError, match=f"part 2 of {len(document.prompts)}: no memory"):
        document.receive_outcome(1, PromptOutcome(error="no memory"))


def test_answers_that_do_not_get_shorter_end_the_document(tokenizer: Any) -> None:
    document = request(tokenizer, SENTENCES, too_long="split")
    outcome = PromptOutcome(text=SENTENCES)
    with pytest.raises(DocumentError, match="are not shorter than the text"):
        for part in range(len(document.prompts)):
            document.receive_outcome(part, replace(outcome))
