"""Answers that repeat themselves: stopped when they do so endlessly, and made less likely by OpenAI's penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Number = TypeVar("Number", np.int64, np.float32)

# An answer is stopped if it ends with so many copies of up to so many tokens, which are at least so many tokens
# together: tables, numbers and indentation repeat single tokens.
COPIES, LONGEST_PERIOD, LEAST_REPEATED = 8, 64, 64
# A check takes microseconds, and is made after every so many tokens.
TOKENS_PER_CHECK = 16


def ends_in_repetition(token_ids: Sequence[int]) -> bool:
    """Whether an answer ends with `COPIES` copies of the same tokens."""
    for period in range(1, LONGEST_PERIOD + 1):
        span = max(COPIES * period, LEAST_REPEATED)
        if span > len(token_ids):
            return False
        if token_ids[-1] == token_ids[-1 - period] and token_ids[-span:-period] == token_ids[period - span :]:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Penalties:
    """OpenAI's penalties: subtracted from the logits of tokens that the answer contains.

    frequency : for each occurrence.
    presence : once.
    """

    frequency: float = 0.0
    presence: float = 0.0


NO_PENALTIES = Penalties()


class TokenCounts:
    """How often an answer contains each of its tokens, on the host; the prompt does not count, as in OpenAI's API.

    most : largest number of different tokens.
    tokens, counts : in the order of their first occurrence (most + 1,); then zeros.
    """

    def __init__(self, most: int) -> None:
        self.tokens, self.counts = np.zeros(most + 1, dtype=np.int64), np.zeros(most + 1, dtype=np.float32)
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        self.tokens[place] = token
        self.counts[place] += 1


def penalize(logits: torch.Tensor, penalties: Penalties, answers: Sequence[TokenCounts]) -> torch.Tensor:
    """Return logits (answers, vocab_size) with penalties for the tokens that each answer contains."""
    some = [(each.tokens[: max(1, len(each))], each.counts[: max(1, len(each))]) for each in answers]
    tokens, counts = (torch.from_numpy(stack(each)).to(logits.device) for each in zip(*some, strict=True))
    penalty = penalties.frequency * counts + penalties.presence * (counts > 0)
    return logits.scatter(1, tokens, logits.gather(1, tokens) - penalty.to(logits.dtype))


def stack(rows: Sequence[npt.NDArray[Number]]) -> npt.NDArray[Number]:
    """Stack rows of different lengths; shorter ones go on with copies of their first number."""
    found = np.empty((len(rows), max(map(len, rows))), dtype=rows[0].dtype)
    for into, row in zip(found, rows, strict=True):
        into[: len(row)] = row
        into[len(row) :] = row[:1]
    return found
