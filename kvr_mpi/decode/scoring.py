"""How likely given continuations of a prompt are: each from the same cache, which is as it was before in the end.

A continuation's first token is judged by the prefill's own logits, all others by one pass over the tokens before them.
The log-probabilities are the model's own (see ``logprobs``): nothing of a job's sampling has a say in them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvr_mpi.documents.prompts import encode_text
from kvr_mpi.errors import DocumentError
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.model.rope import begins_anew_at
from kvr_mpi.prefill.one_prompt import Prefill, run_next


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is.

    logprobs : natural logarithms of the probabilities of its tokens (tokens,), each after all before it.
    is_greedy : whether each of them is the likeliest in its place: greedy decoding would write it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        """Of the whole continuation: the sum of its tokens'."""
        return sum(self.logprobs)


@torch.inference_mode()
def score_continuations(
    loaded: LoadedModel, prefill: Prefill, prompt_tokens: int, texts: Sequence[str]
) -> tuple[Score, ...]:
    """Score continuations of a prompt.

    Parameters
    ----------
    prefill : Prefill
        Of the decode rank, whole, with room for the longest continuation.
    prompt_tokens : int
        Of the prompt.
    texts : sequence of str
        Each is tokenised by itself, after the prompt's last token.

    Raises
    ------
    DocumentError
        If one has no tokens, or they do not fit behind the prompt.
    """
    return tuple(_score(loaded, prefill, prompt_tokens, text) for text in texts)


def _score(loaded: LoadedModel, prefill: Prefill, prompt_tokens: int, text: str) -> Score:
    """Score one of them."""
    ids = continuation_ids(loaded, text)
    most, anew_at = loaded.shape.max_tokens, begins_anew_at(loaded.model)
    what = f"a prompt of {prompt_tokens} tokens and the continuation {text[:40]!r} of {len(ids)}"
    if most and prompt_tokens + len(ids) > most:
        raise DocumentError(f"{what}: the model's context has {most} tokens")
    if anew_at is not None and prompt_tokens < anew_at <= prompt_tokens + len(ids):
        raise DocumentError(
            f"{what}: from {anew_at} tokens on, this model's rotary embedding changes, and the keys of the prompt "
            f"would have to be computed again; shorten it"
        )
    assert prefill.logits is not None, "only the decode rank of a chain can score"
    rows = prefill.logits.float().unsqueeze(0)
    if len(ids) > 1:
        rows = torch.cat([rows, _run(loaded, prefill, ids[:-1])])
    wanted = torch.tensor(ids, device=rows.device)
    logprobs = torch.log_softmax(rows, dim=-1).gather(1, wanted.unsqueeze(1))[:, 0]
    return Score(text, tuple(ids), tuple(logprobs.tolist()), bool((rows.argmax(-1) == wanted).all()))


def continuation_ids(loaded: LoadedModel, text: str) -> list[int]:
    """Return the tokens of a continuation; control tokens written out in it are plain text.

    Raises
    ------
    DocumentError
        If it has none.
    """
    ids = list(encode_text(loaded.tokenizer, text))
    if not ids:
        raise DocumentError(f"the continuation {text[:40]!r} has no tokens: the tokenizer drops all of it")
    return ids


def _run(loaded: LoadedModel, prefill: Prefill, ids: Sequence[int]) -> torch.Tensor:
    """Compute logits (tokens, vocab_size) after each of some tokens, and leave the cache as it was."""
    if prefill.is_plain:  # which cannot be shortened where layers have windows or states
        behind = replace(prefill, cache=copy.deepcopy(prefill.cache))
        tokens = torch.tensor(ids, device=loaded.device).view(-1, 1, 1)
        return torch.stack([run_next(loaded.model, behind, token) for token in tokens])
    cache = prefill.cache
    length = cache.length
    cache.note_states()
    try:
        row = torch.tensor([list(ids)], device=loaded.device)
        return run_model(loaded.model, row, cache, keep=torch.arange(len(ids), device=loaded.device))
    finally:
        cache.step_back(length)
