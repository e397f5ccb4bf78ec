"""Tokens of a corpus: counted where it is small, estimated where it is large, and read once in any case."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvr_mpi.documents import Document
from kvr_mpi.documents import token_counts as tokens
from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.documents.token_counts import count_corpus

WORDS = (
    "the ferry left at seven nobody on that pier had seen a second boat inspection 2024 council weir hydrology".split()
)


def corpus() -> list[Document]:
    """Prose, and tables of numbers: many more tokens for their characters."""
    random = Random(0)
    documents = [Document("empty", "")]
    for number in range(60):
        words = random.randrange(1, 3000)
        figures = [f"{random.random():.6f}" for _ in range(words)]
        text = " ".join(figures if number % 3 == 2 else random.choices(WORDS, k=words))
        documents.append(Document(f"{number}", text))
    documents[5] = Document("5", "unread", error="cannot be read")
    return documents


def truth(tokenizer: Any, documents: list[Document]) -> list[tuple[str, int]]:
    return [(each.id, 0 if each.error else len(encode_text(tokenizer, each.text))) for each in documents]


def test_small_corpora_are_counted(tokenizer: Any) -> None:
    # Control tokens in a text are plain text here, too.
    documents = [*corpus(), Document("control", f"mind {tokenizer.eos_token} this")]
    counted = count_corpus(tokenizer, iter(documents))
    assert counted.texts == truth(tokenizer, documents)
    assert counted.how == f"{sum(count for _, count in counted.texts)} tokens of text"
    assert count_corpus(tokenizer, iter([])).texts == []


def test_large_corpora_are_estimated(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "COUNTED_CHARS", 50_000)
    monkeypatch.setattr(tokens, "BATCH_CHARS", 20_000)
    documents = corpus()
    exact = truth(tokenizer, documents)
    found = count_corpus(tokenizer, iter(documents))
    assert [name for name, _ in found.texts] == [name for name, _ in exact]
    errors = []
    for document, (_, guess), (_, count) in zip(documents, found.texts, exact, strict=True):
        if document.error or len(document.text) <= 4 * tokens.EXCERPT_CHARS:
            assert guess == count
        elif guess != count:
            errors.append(abs(guess / count - 1))
    assert len(errors) > 20 and 0 < sorted(errors)[len(errors) // 2] < 0.03 and max(errors) < 0.25, (
        "tables of figures, too"
    )
    assert sum(count for _, count in found.texts) == pytest.approx(sum(count for _, count in exact), rel=0.03)
    assert found.how.startswith("about ") and "estimated" in found.how
