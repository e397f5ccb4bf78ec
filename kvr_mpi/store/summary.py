"""What became of the documents of a run, counted; told by its ledgers, so that no file of results is read for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

REASON_CHARS = 160
# What differs from document to document: what stands in quotes, paths, numbers.
QUOTED, NUMBER = re.compile(r"'[^']*'|\"[^\"]*\""), re.compile(r"(?<![\w-])\d+(?:[.,]\d+)*(?!\w)")


@dataclass(frozen=True, slots=True)
class Summary:
    """Documents by status.

    reasons : how many failed for what, the most frequent first.
    """

    done: int
    failed: int
    reasons: dict[str, int]

    @property
    def documents(self) -> int:
        """All of them."""
        return self.done + self.failed


def reason_of(document_id: str, error: str) -> str:
    """Say what went wrong as it is said of every document it went wrong with: without names, paths and numbers."""
    text = " ".join(error[: 8 * REASON_CHARS].split())
    text = re.sub(rf"(?<!\w){re.escape(document_id)}(?!\w)", "...", text) if document_id else text
    text = NUMBER.sub("N", QUOTED.sub("...", text))
    text = " ".join("..." if "/" in word else word for word in text.split())
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 3] + "..."


def count_reasons(reasons: Iterable[str]) -> dict[str, int]:
    """Count them, the most frequent first."""
    return dict(sorted(Counter(reasons).items(), key=lambda one: (-one[1], one[0])))
