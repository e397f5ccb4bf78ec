"""Counts of a run's documents by status and cause of failure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

REASON_CHARS = 240
# Words that are specific to one document: those that contain digits, slashes, quotes or brackets.
PARTICULAR = re.compile(r"""\S*[\d/'"`\[\]{}()]\S*""")

# Marks the message of a cause that other documents have with other words of this kind, which do not count.
SIMILAR = " (and similar)"


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of documents by status.

    reasons : number of failed documents by cause (`count_reasons`), the most frequent first.
    """

    done: int
    failed: int
    reasons: dict[str, int]

    @classmethod
    def of(cls, documents: int, errors: Iterable[tuple[str, str]]) -> Self:
        """Count so many documents, given the ids of those that failed, and their shortened errors."""
        failed = [(name, error, 1) for name, error in errors]
        return cls(documents - len(failed), len(failed), count_reasons(failed))

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.done + self.failed


def shorten(error: str) -> str:
    """Cut an error message to one line of at most `REASON_CHARS`."""
    text = " ".join(error[: 8 * REASON_CHARS].split())
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 3] + "..."


def count_reasons(errors: Iterable[tuple[str, str, int]]) -> dict[str, int]:
    """Map the first message of each cause, marked if others differ, to its number of documents, most frequent first.

    Each error has the id of a document or "", its shortened message, and the number of documents with this message; its
    cause is the words that are not specific to the document, if there are any.
    """
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for document_id, error, count in errors:
        text = re.sub(rf"(?<!\w){re.escape(document_id)}(?!\w)", "", error) if document_id else error
        cause = " ".join(PARTICULAR.sub("", text).split()) or error
        shown = first.setdefault(cause, error)
        if error != shown:
            first[cause] = shown.removesuffix(SIMILAR) + SIMILAR
        counts[cause] += count
    return {first[cause]: count for cause, count in sorted(counts.items(), key=lambda one: (-one[1], first[one[0]]))}
