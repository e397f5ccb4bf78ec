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
from kvr_mpi.documents.encoding import encoder_of

# For a longer corpus, each document is estimated from two excerpts of this length. Documents with about this share of
# the text are also counted in full, which gives the error of the estimates.
COUNTED_CHARS = 20_000_000
EXCERPT_CHARS, CONTROL_SHARE = 512, 0.01
# Size of a batch for the tokenizer; fast (Rust) tokenizers process its texts in parallel.
BATCH_CHARS = 2_000_000
Batch = list[tuple[str, str]]  # ids and texts


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens of every document (0 if unreadable, with the reason), and how they were counted."""

    texts: list[tuple[str, int]]
    how: str
    errors: dict[str, str]


def count_corpus(tokenizer: Any, documents: Iterable[Document]) -> Counted:
    """Count the tokens of all documents in one pass, or estimate them above 20 million characters."""
    errors: dict[str, str] = {}
    batches, first, chars = _batches(documents, errors), list[Batch](), 0
    for batch in batches:
        first.append(batch)
        chars += sum(len(text) for _, text in batch)
        if chars > COUNTED_CHARS:
            texts, how = _estimate(tokenizer, chain(first, batches))
            return Counted(texts, how, errors)
    names = [name for batch in first for name, _ in batch]
    counts = [count for batch in first for count in count_texts(tokenizer, [text for _, text in batch])]
    return Counted(list(zip(names, counts, strict=True)), f"{sum(counts)} tokens of text", errors)


def count_texts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Count the tokens of several texts as `encode_text` would."""
    return list(map(len, encoder_of(tokenizer).texts(texts)))


def _estimate(tokenizer: Any, batches: Iterable[Batch]) -> tuple[list[tuple[str, int]], str]:
    """Scale up every document's excerpts, corrected by the ratio found on documents that are counted as a whole."""
    names, rows = list[str](), list[tuple[int, int, int, int]]()
    seen = counted = 0
    for batch in batches:
        texts = [text for _, text in batch]
        chosen = []
        for number, text in enumerate(texts):
            seen += len(text)
            if text and counted <= CONTROL_SHARE * seen:
                counted += len(text)
                chosen.append(number)
        whole = dict(zip(chosen, count_texts(tokenizer, [texts[number] for number in chosen]), strict=True))
        excerpts = [_excerpts(text) for text in texts]
        counts = iter(count_texts(tokenizer, [piece for pieces in excerpts for piece in pieces]))
        names += [name for name, _ in batch]
        rows += [
            (len(text), sum(map(len, pieces)), sum(next(counts) for _ in pieces), whole.get(number, -1))
            for number, (text, pieces) in enumerate(zip(texts, excerpts, strict=True))
        ]
    chars, sampled_chars, sampled_tokens, truth = np.array(rows, dtype=np.int64).T
    scaled = sampled_tokens * chars / np.maximum(1, sampled_chars)
    control = (truth >= 0) & (sampled_chars < chars)
    factor = float(truth[control].sum() / scaled[control].sum()) if control.any() else 1.0
    estimates = np.where(sampled_chars == chars, sampled_tokens, np.maximum(1, np.round(factor * scaled)))
    tokens = np.where(truth >= 0, truth, estimates).astype(np.int64).tolist()
    how = f"about {sum(tokens)} tokens of text, estimated from two excerpts of each document"
    if control.sum() > 1:
        errors = 100 * np.abs(factor * scaled[control] / truth[control] - 1)
        how += (
            f" ({control.sum()} were counted: the median error of their estimates is {np.median(errors):.1f} %, the "
            f"90th percentile {np.quantile(errors, 0.9):.1f} %)"
        )
    return list(zip(names, tokens, strict=True)), how


def _excerpts(text: str) -> list[str]:
    """Return excerpts that start at one and three quarters of the text; all of a short text."""
    if len(text) <= 4 * EXCERPT_CHARS:
        return [text] if text else []
    starts = (len(text) // 4, 3 * len(text) // 4)
    return [text[start : start + EXCERPT_CHARS] for start in starts]


def _batches(documents: Iterable[Document], errors: dict[str, str]) -> Iterator[Batch]:
    """Yield ids and texts, which are empty for documents with errors; these are added to `errors`."""
    batch, chars = Batch(), 0
    for document in documents:
        if document.error is not None:
            errors[document.id] = document.error
        batch.append((document.id, document.text if document.error is None else ""))
        chars += len(document.text)
        if chars > BATCH_CHARS:
            yield batch
            batch, chars = Batch(), 0
    if batch:
        yield batch
