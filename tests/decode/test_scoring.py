"""Continuations are scored as plain transformers scores them, from one prefill, which is the same afterwards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import prompt
from rows import alone, batch_of, finish, long_rope, ready

from kvr_mpi.decode.group import Group
from kvr_mpi.decode.scoring import Score, score_continuations
from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.exactness import continued
from kvr_mpi.prefill.one_prompt import Prefill, prefill_single

IDS = prompt(40)
TEXTS = ("7 8 9 10 11 12", "5", "190 3", "7 8 9 10 11 13")
CLOSE = 2e-5
# Of each way that a layer keeps what it keeps.
KINDS = ["llama-gqa", "mistral-window", "llama4-chunks", "gpt-oss-sinks", "deepseek-latents", "falcon-h1-both"]


def scored(loaded: LoadedModel, prefill: Prefill, texts: Sequence[str]) -> tuple[Score, ...]:
    return score_continuations(loaded, prefill, texts, Group(loaded).look_ahead)


def truth_of(loaded: LoadedModel, text: str) -> torch.Tensor:
    """What transformers says of the whole vocabulary in each place of a continuation, without any cache of ours."""
    prepare_model(loaded.model, chain=False)
    ids = [int(word) for word in text.split()]
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([IDS + ids]), use_cache=False).logits[0].float()
    prepare_model(loaded.model, chain=loaded.attends_in_parts)
    return torch.log_softmax(logits[len(IDS) - 1 : -1], -1)


@pytest.mark.parametrize("name", [*KINDS, "mistral-window as transformers caches it"])
@torch.inference_mode()
def test_scores_are_transformers_own(name: str) -> None:
    is_plain = name not in KINDS
    loaded = ready(name.split()[0], chain=not is_plain)
    truths = {text: truth_of(loaded, text) for text in TEXTS}
    greedy = str(int(truths["5"][0].argmax()))
    prepare_model(loaded.model, chain=not is_plain, in_parts=loaded.attends_in_parts)
    untouched, prefill = (
        prefill_single(loaded.model, IDS, loaded.device) if is_plain else alone(loaded, IDS, 6) for _ in range(2)
    )
    for score in scored(loaded, prefill, TEXTS):
        truth, ids = truths[score.text], torch.tensor(score.token_ids)
        mine = truth[torch.arange(len(ids)), ids]
        torch.testing.assert_close(torch.tensor(score.logprobs), mine, atol=CLOSE, rtol=1e-5)
        assert score.logprob == pytest.approx(float(mine.sum()), abs=1e-4)
        assert score.is_greedy == bool((truth.argmax(-1) == ids).all())
    is_greedy = [score.is_greedy for score in scored(loaded, prefill, [greedy, f"{greedy} 5", f"{greedy} 6"])]
    assert is_greedy[0] and not all(is_greedy), "only if each of its tokens is the likeliest"
    # The cache is as it was: what is decoded from it now is what would have been decoded without.
    after, before = (continued(loaded.model, one, 1, [3]).steps[0] for one in (prefill, untouched))
    torch.testing.assert_close(after, before, atol=CLOSE, rtol=1e-5)


GREEDY, WARM = {"do_sample": False}, {"do_sample": True, "top_k": 5}
SCHEMA = OwnGeneration(json_schema='{"type": "object"}', max_new_tokens=4)
ONE, TWO = OwnGeneration(score=TEXTS[:1]), OwnGeneration(n=2)


@pytest.mark.parametrize(
    ("name", "own", "config", "said"),
    [
        ("llama-gqa", OwnGeneration(score=(" ".join(["5"] * 500),)), GREEDY, "context has 512 tokens"),
        ("llama-gqa", OwnGeneration(score=("nothing",)), GREEDY, "has no tokens"),
        ("long-rope", ONE, GREEDY, "rotary embedding changes"),
        # The answer would be no JSON, and end as if it were.
        ("llama-gqa", SCHEMA, {"min_new_tokens": 3}, "min_new_tokens = 3.* cannot be combined with a JSON schema"),
        ("llama-gqa", SCHEMA, {"no_repeat_ngram_size": 2}, "no_repeat_ngram.* cannot be combined with a JSON schema"),
        ("llama-gqa", TWO, GREEDY, "without sampling would all be the same"),
        ("falcon-h1-both", TWO, WARM, "keeps states"),
        ("long-rope", TWO, WARM, "rotary embedding changes"),
    ],
)
def test_what_a_prompt_cannot_be_asked_is_its_error_alone(
    name: str, own: OwnGeneration, config: dict[str, Any], said: str
) -> None:
    loaded, ids = ready(long_rope() if name == "long-rope" else name), IDS[:30]
    batch = batch_of(loaded, 6, **config)
    for key, asked in (("bad", own), ("good", OwnGeneration(max_new_tokens=1))):
        batch.add(key, alone(loaded, ids, 6), ids, 0, asked)
    found = finish(batch)
    assert found["bad"].answer is None and re.search(said, str(found["bad"].error))
    assert found["good"].answer is not None
