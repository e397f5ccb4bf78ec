"""Answers that repeat themselves: stopped when they do so endlessly, and made less likely by OpenAI's penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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


class PenaltyProcessor:
    """A logits processor with the penalties of one answer; call it once for every token.

    The prompt's tokens do not count, as in OpenAI's API and in vLLM.
    """

    def __init__(self, penalties: Penalties, prompt_tokens: int) -> None:
        self._penalties, self._seen = penalties, prompt_tokens
        self._counts: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits (1, vocab_size) with penalties for the tokens in ids (1, tokens) after the prompt."""
        if self._counts is None:
            self._counts = torch.zeros(scores.shape[-1], device=scores.device)
        new = input_ids[0, self._seen :]
        self._counts.index_add_(0, new, torch.ones_like(new, dtype=self._counts.dtype))
        self._seen = input_ids.shape[1]
        penalty = self._penalties.frequency * self._counts + self._penalties.presence * (self._counts > 0)
        return scores - penalty.to(scores.dtype)
