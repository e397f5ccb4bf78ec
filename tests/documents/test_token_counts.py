"""Tokens of a corpus: counted where it is small, estimated where it is large, and read once in any case."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from kvr_mpi.documents import Document
from kvr_mpi.documents import token_counts as tokens
from kvr_mpi.documents.prompts import encode_text
from kvr_mpi.documents.token_counts import count_corpus, count_texts

WORDS = (
    "the ferry left at seven nobody on that pier had seen a second boat inspection 2024 council weir hydrology".split()
)


def prose(random: Random, words: int) -> str:
    return " ".join(random.choices(WORDS, k=words))


def figures(random: Random, words: int) -> str:
    """A table of numbers: many more tokens for its characters than prose has."""
    return " ".join(f"{random.random():.6f}" for _ in range(words))


def corpus() -> list[Document]:
    random = Random(0)
    kinds = [prose, prose, figures]
    sizes = [*(random.randrange(1, 3000) for _ in range(60)), 0]
    documents = [Document(f"{number}", kinds[number % 3](random, size)) for number, size in enumerate(sizes)]
    documents[5] = Document("5", "unread", error="cannot be read")
    return documents


def truth(tokenizer: Any, documents: list[Document]) -> list[tuple[str, int]]:
    return [
        (document.id, 0 if document.error else len(encode_text(tokenizer, document.text))) for document in documents
    ]


def test_small_corpora_are_counted(tokenizer: Any) -> None:
    documents = corpus()
    counted = count_corpus(tokenizer, iter(documents))
    assert counted.texts == truth(tokenizer, documents)
    assert counted.how == f"{sum(count for _, count in counted.texts)} tokens of text"
    assert count_corpus(tokenizer, iter([])).texts == []


def test_large_corpora_are_estimated_and_say_how_well(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "COUNTED_CHARS", 50_000)
    monkeypatch.setattr(tokens, "BATCH_CHARS", 50_000)
    monkeypatch.setattr(tokens, "CONTROL_SHARE", 0.1)
    documents, read = corpus(), 0

    def once() -> Iterator[Document]:
        nonlocal read
        for document in documents:
            read += 1
            yield document

    exact = truth(tokenizer, documents)
    found = count_corpus(tokenizer, once())
    assert read == len(documents), "read once"
    assert [name for name, _ in found.texts] == [name for name, _ in exact]
    errors = []
    for document, (_, guess), (_, count) in zip(documents, found.texts, exact, strict=True):
        if document.error or len(document.text) <= 4 * tokens.EXCERPT_CHARS:
            assert guess == count
        else:
            errors.append(abs(guess / count - 1))
    assert 0 < sorted(errors)[len(errors) // 2] < 0.03 and max(errors) < 0.25, "tables of figures, too"
    assert sum(count for _, count in found.texts) == pytest.approx(sum(count for _, count in exact), rel=0.03)
    told = re.search(r"\((\d+) were counted: .* the 90th percentile ([\d.]+) %\)", found.how)
    assert told is not None and int(told[1]) > 1 and float(told[2]) < 25, found.how


def test_control_tokens_in_a_text_are_plain_text_here_too(tokenizer: Any) -> None:
    texts = ["plain", "", f"mind {tokenizer.eos_token} this", " spaces  and\n\nlines "]
    assert count_texts(tokenizer, texts) == [len(encode_text(tokenizer, text)) for text in texts]
    assert count_texts(tokenizer, []) == []
