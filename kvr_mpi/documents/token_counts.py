"""Token counts of the documents of a corpus, for ``kvr plan``: exact, or estimated with a known error.

The corpus is read only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from kvr_mpi.documents import Document
from kvr_mpi.documents.prompts import encode_text

# For a longer corpus, each document is estimated from two excerpts of this length. Documents with about this share of
# the text are also counted in full, which gives the error of the estimates.
COUNTED_CHARS = 20_000_000
EXCERPT_CHARS, CONTROL_SHARE = 512, 0.01
# Size of a batch for the tokenizer; fast (Rust) tokenizers process its texts in parallel.
BATCH_CHARS = 2_000_000


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens of every document (0 if unreadable, with the reason), and how they were counted."""

    texts: list[tuple[str, int]]
    how: str
    errors: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Sample:
    """The token counts of a document's excerpts (or of a whole short text), and of the document if it was counted."""

    id: str
    chars: int
    sampled_chars: int
    sampled_tokens: int
    tokens: int | None


def count_corpus(tokenizer: Any, documents: Iterable[Document]) -> Counted:
    """Count the tokens of all documents, or estimate them above 20 million characters.

    Parameters
    ----------
    documents : iterable of Document
        Iterated once.
    """
    errors: dict[str, str] = {}
    stream = _noting(documents, errors)
    first: list[Document] = []
    chars = 0
    for document in stream:
        first.append(document)
        chars += len(document.text)
        if chars > COUNTED_CHARS:
            break
    else:
        texts = [
            (document.id, tokens)
            for batch in _batches(first)
            for document, tokens in zip(batch, count_texts(tokenizer, _texts(batch)), strict=True)
        ]
        return Counted(texts, f"{sum(tokens for _, tokens in texts)} tokens of text", errors)
    return Counted(*_estimate(list(_sample(tokenizer, chain(first, stream)))), errors)


def count_texts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Count the tokens of several texts as `encode_text` would."""
    if not getattr(tokenizer, "is_fast", False) or not texts:
        return [len(encode_text(tokenizer, text)) for text in texts]
    found = tokenizer(
        list(texts), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]
    control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    return [
        len(ids) if control.isdisjoint(ids) else len(encode_text(tokenizer, text))
        for text, ids in zip(texts, found, strict=True)
    ]


def _sample(tokenizer: Any, documents: Iterable[Document]) -> Iterator[_Sample]:
    """Tokenise excerpts of all documents, and about every hundredth document as a whole."""
    seen = counted = 0
    for batch in _batches(documents):
        chosen = []
        for number, text in enumerate(_texts(batch)):
            seen += len(text)
            if text and counted <= CONTROL_SHARE * seen:
                counted += len(text)
                chosen.append(number)
        texts = _texts(batch)
        whole = dict(zip(chosen, count_texts(tokenizer, [texts[number] for number in chosen]), strict=True))
        excerpts = [_excerpts(text) for text in texts]
        counts = iter(count_texts(tokenizer, [piece for pieces in excerpts for piece in pieces]))
        for number, (document, pieces) in enumerate(zip(batch, excerpts, strict=True)):
            tokens = sum(next(counts) for _ in pieces)
            yield _Sample(document.id, len(texts[number]), sum(map(len, pieces)), tokens, whole.get(number))


def _noting(documents: Iterable[Document], errors: dict[str, str]) -> Iterator[Document]:
    for document in documents:
        if document.error is not None:
            errors[document.id] = document.error
        yield document


def _estimate(samples: Sequence[_Sample]) -> tuple[list[tuple[str, int]], str]:
    """Scale up every document's excerpts, corrected by the ratio found on the documents counted in full."""

    def scaled(sample: _Sample) -> float:
        return sample.sampled_tokens * sample.chars / max(1, sample.sampled_chars)

    control = [sample for sample in samples if sample.tokens is not None and sample.sampled_chars < sample.chars]
    truth = np.array([sample.tokens for sample in control], dtype=float)
    guessed = np.array([scaled(sample) for sample in control])
    factor = float(truth.sum() / guessed.sum()) if len(control) else 1.0
    texts = [
        (
            sample.id,
            sample.tokens
            if sample.tokens is not None
            else sample.sampled_tokens
            if sample.sampled_chars == sample.chars
            else max(1, round(factor * scaled(sample))),
        )
        for sample in samples
    ]
    how = f"about {sum(tokens for _, tokens in texts)} tokens of text, estimated from two excerpts of each document"
    if len(control) > 1:
        errors = 100 * np.abs(factor * guessed / truth - 1)
        how += (
            f" ({len(control)} were counted: the median error of their estimates is {np.median(errors):.1f} %, the "
            f"90th percentile {np.quantile(errors, 0.9):.1f} %)"
        )
    return texts, how


def _excerpts(text: str) -> list[str]:
    """Return excerpts that start at one and three quarters of the text; all of a short text."""
    if len(text) <= 4 * EXCERPT_CHARS:
        return [text] if text else []
    starts = (len(text) // 4, 3 * len(text) // 4)
    return [text[start : start + EXCERPT_CHARS] for start in starts]


def _texts(batch: Sequence[Document]) -> list[str]:
    return [document.text if document.error is None else "" for document in batch]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if chars > BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
