"""Token counts of the documents of a corpus, for ``kvr plan``. The corpus is read only once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvr_mpi.documents import Document
from kvr_mpi.documents.encoding import encoder_of

# After this much text, each document is estimated from two excerpts of this length.
COUNTED_CHARS, EXCERPT_CHARS = 20_000_000, 1024
# Size of a batch for the tokenizer; fast (Rust) tokenizers process its texts in parallel.
BATCH_CHARS = 2_000_000


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens of every document (0 if unreadable, with the reason), and how they were counted."""

    texts: list[tuple[str, int]]
    how: str
    errors: dict[str, str]


def count_corpus(tokenizer: Any, documents: Iterable[Document]) -> Counted:
    """Count the tokens of documents; of those after the first 20 million characters, estimate them."""
    texts, errors, chars, estimated = list[tuple[str, int]](), dict[str, str](), 0, 0
    for batch in _batches(documents):
        errors |= {document.id: document.error for document in batch if document.error is not None}
        is_sampled = chars > COUNTED_CHARS
        excerpts = [_excerpts(document.text) if is_sampled else [document.text] for document in batch]
        counts = iter(count_texts(tokenizer, [text for some in excerpts for text in some]))
        for document, some in zip(batch, excerpts, strict=True):
            counted, read = sum(next(counts) for _ in some), sum(map(len, some))
            estimated += read < document.chars
            texts.append((document.id, round(counted * document.chars / max(1, read)) if document.error is None else 0))
            chars += document.chars
    total = sum(tokens for _, tokens in texts)
    how = f"about {total} tokens of text: {estimated} documents were estimated from two excerpts each"
    return Counted(texts, how if estimated else f"{total} tokens of text", errors)


def count_texts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Count the tokens of several texts as `encode_text` would."""
    return list(map(len, encoder_of(tokenizer).texts(texts)))


def _excerpts(text: str) -> list[str]:
    """Return excerpts that start at one and three quarters of the text; all of a short text."""
    if len(text) <= 4 * EXCERPT_CHARS:
        return [text]
    return [text[start : start + EXCERPT_CHARS] for start in (len(text) // 4, 3 * len(text) // 4)]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, chars = list[Document](), 0
    for document in documents:
        batch.append(document)
        chars += document.chars
        if chars > BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
