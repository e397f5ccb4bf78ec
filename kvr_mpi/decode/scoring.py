"""Log-probabilities of given continuations, each computed from the same cache, which stays unchanged.

A continuation's first token is scored by the prefill's logits, all others by one forward pass over the continuation.
The log-probabilities are the model's own (see ``logprobs``), and do not depend on the job's sampling settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.errors import DocumentError
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.rope import begins_anew_at
from kvr_mpi.prefill.failure import Failure, attempt
from kvr_mpi.prefill.finite import NOT_FINITE, explain_not_finite, likeliest
from kvr_mpi.prefill.one_prompt import Prefill


@dataclass(frozen=True, slots=True)
class Score:
    """The log-probabilities of a continuation.

    logprobs : natural logarithms of the probabilities of its tokens (tokens,), each after all before it.
    is_greedy : whether each token is the likeliest at its position: greedy decoding would generate this text.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation: the sum over its tokens."""
        return sum(self.logprobs)


@torch.inference_mode()
def score_continuations(
    loaded: LoadedModel,
    prefill: Prefill,
    texts: Sequence[str],
    look_ahead: Callable[[Prefill, Sequence[int]], torch.Tensor],
) -> tuple[Score, ...]:
    """Score continuations of a prompt.

    prefill : with room for the longest continuation.
    texts : each is tokenized by itself, after the prompt's last token; control tokens in it are plain text.
    look_ahead : computes logits (tokens, vocab_size) after each of some tokens that follow the prompt, without changing
        it.

    The result is empty on ranks that take part in computing them, but do not have the prompt's logits. Raises
    `DocumentError` if a continuation has no tokens, or does not fit after the prompt; only on the rank that has the
    prompt's logits, and after all calls of `look_ahead`, `DocumentError` if logits are not finite, or `MemoryError`.
    """
    tokens, most, anew_at = prefill.partition.tokens, loaded.shape.max_tokens, begins_anew_at(loaded.model)
    given = {text: tuple(encode_text(loaded.tokenizer, text, "middle")) for text in texts}
    for text, ids in given.items():
        if not ids:
            raise DocumentError(f"the continuation {text[:40]!r} has no tokens: the tokenizer drops all of it")
        what = f"a prompt of {tokens} tokens and the continuation {text[:40]!r} of {len(ids)}"
        if most and tokens + len(ids) > most:
            raise DocumentError(f"{what}: the model's context has {most} tokens")
        if anew_at is not None and tokens < anew_at <= tokens + len(ids):
            raise DocumentError(
                f"{what}: from {anew_at} tokens on, this model's rotary embedding changes, and the keys of the prompt "
                f"would have to be computed again; shorten it"
            )
    scores = list[Score]()
    problem: Exception | None = None
    for text in texts:
        ids = given[text]
        following = [look_ahead(prefill, ids[:-1])] if len(ids) > 1 else []
        if prefill.logits is None or problem is not None:
            continue
        found = attempt(partial(_score, text, ids, prefill.logits, following), loaded.tp_group)
        if isinstance(found, Failure):
            problem = MemoryError(found.why)
        elif found is None:
            problem = DocumentError(explain_not_finite(loaded.dtype))
        else:
            scores.append(found)
    if problem is not None:
        raise problem
    return tuple(scores)


def _score(text: str, ids: tuple[int, ...], first: torch.Tensor, following: Sequence[torch.Tensor]) -> Score | None:
    """Score a continuation; return None if logits are not finite.

    first, following : logits of the prompt (vocab_size,), and after the continuation's tokens (tokens - 1, vocab_size).
    """
    rows = torch.cat([first.float().unsqueeze(0), *following])
    wanted = torch.tensor(ids, device=rows.device)
    logprobs = torch.log_softmax(rows, dim=-1).gather(1, wanted.unsqueeze(1))[:, 0]
    greedy: list[int] = likeliest(rows).tolist()
    if NOT_FINITE in greedy:
        return None
    return Score(text, ids, tuple(logprobs.tolist()), greedy == list(ids))
