"""Log-probabilities of the tokens of an answer, from the model's raw logits.

They are computed from the logits before temperature, top-k, top-p, penalties and grammars. So they are the model's own
probabilities, by which answers can be compared. In greedy decoding, the chosen token is the likeliest one unless a
penalty or a grammar prevented that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of the answer's tokens, in order.

    logprobs : of the chosen tokens (tokens,).
    top_tokens, top_logprobs : the likeliest tokens at each position, in descending order; flat (tokens * top,).
    texts : of all of these tokens, by id.
    """

    logprobs: tuple[float, ...]
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    texts: Mapping[int, str] = field(default_factory=dict)


class LogprobTrace:
    """Collects log-probabilities during decoding; values stay on the device until the end.

    top : number of likeliest tokens to keep at each position.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._row: torch.Tensor | None = None
        self._chosen: list[torch.Tensor] = []
        self._likeliest: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(self, logits: torch.Tensor) -> None:
        """Record the raw logits (vocab_size,) for the next token."""
        self._row = torch.log_softmax(logits.float(), dim=-1)

    def write(self, token: int) -> None:
        """Record the token that was chosen from them."""
        assert self._row is not None, "the logits were seen before"
        self._chosen.append(self._row[token].clone())  # a view would hold on to the whole row
        if self._top:
            values, tokens = self._row.topk(min(self._top, len(self._row)))
            self._likeliest.append((tokens, values))
        self._row = None

    def finish(self, tokenizer: Any, token_ids: list[int]) -> TokenLogprobs:
        logprobs: list[float] = torch.stack(self._chosen).tolist() if self._chosen else []
        tokens: list[int] = torch.cat([found for found, _ in self._likeliest]).tolist() if self._likeliest else []
        values: list[float] = torch.cat([found for _, found in self._likeliest]).tolist() if self._likeliest else []
        texts = {token: token_text(tokenizer, token) for token in sorted({*token_ids, *tokens})}
        return TokenLogprobs(tuple(logprobs), tuple(tokens), tuple(values), texts)


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of a single token; partial characters become U+FFFD.

    Some tokenizers drop the space that a text's first token begins with; it is part of the token.
    """
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    raw = tokenizer.convert_ids_to_tokens(token)
    if isinstance(raw, str) and raw.startswith("\u2581") and not text.startswith(" "):
        return f" {text}"
    return text
