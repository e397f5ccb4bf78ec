"""Continuations are scored as plain transformers scores them, from one prefill, which is the same afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import prompt
from rows import alone, long_rope, ready
from transformers import GenerationConfig

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.group import Alone
from kvr_mpi.decode.scoring import Score, score_continuations
from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.errors import DocumentError
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr, prefill_single, run_next
from kvr_mpi.transport.local import LocalTransport, run_local

IDS = prompt(40)
TEXTS = ("7 8 9 10 11 12", "5", "190 3", "7 8 9 10 11 13")
CLOSE = 2e-5
# Of each way that a layer keeps what it keeps.
KINDS = ["llama-gqa", "mistral-window", "llama4-chunks", "gpt-oss-sinks", "deepseek-latents", "falcon-h1-both"]


def scored(loaded: LoadedModel, prefill: Prefill, texts: Sequence[str]) -> tuple[Score, ...]:
    return score_continuations(loaded, prefill, prefill.partition.tokens, texts, Alone[str](loaded).look_ahead)


def truth_of(loaded: LoadedModel, text: str) -> torch.Tensor:
    """What transformers says of the whole vocabulary in each place of a continuation, without any cache of ours."""
    prepare_model(loaded.model, chain=False)
    ids = [int(word) for word in text.split()]
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([IDS + ids]), use_cache=False).logits[0].float()
    prepare_model(loaded.model, chain=loaded.attends_in_parts)
    return torch.log_softmax(logits[len(IDS) - 1 : -1], -1)


def prefill_alone(loaded: LoadedModel) -> Prefill:
    return alone(loaded, IDS, 6)


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_scores_are_transformers_own(name: str) -> None:
    loaded = ready(name)
    truths = {text: truth_of(loaded, text) for text in TEXTS}
    greedy = " ".join(map(str, [int(truths["5"][0].argmax())]))
    prefill = prefill_alone(loaded)
    before = run_next(loaded.model, prefill_alone(loaded), torch.tensor([[3]]))
    for score in scored(loaded, prefill, TEXTS):
        truth, ids = truths[score.text], torch.tensor(score.token_ids)
        mine = truth[torch.arange(len(ids)), ids]
        torch.testing.assert_close(torch.tensor(score.logprobs), mine, atol=CLOSE, rtol=1e-5)
        assert score.logprob == pytest.approx(float(mine.sum()), abs=1e-4)
        assert score.is_greedy == bool((truth.argmax(-1) == ids).all())
    assert scored(loaded, prefill, [greedy])[0].is_greedy
    # The cache is as it was: what is decoded from it now is what would have been decoded without.
    after = run_next(loaded.model, prefill, torch.tensor([[3]]))
    torch.testing.assert_close(after, before, atol=CLOSE, rtol=1e-5)


@pytest.mark.parametrize(("ranks", "name"), [(2, "mistral-window"), (2, "llama4-chunks"), (3, "llama-gqa")])
def test_chains_score_alike(ranks: int, name: str) -> None:
    loaded = ready(name)
    expected = scored(loaded, prefill_alone(loaded), TEXTS)

    def rank(chain: LocalTransport) -> Any:
        found = prefill_kvr(loaded, IDS, Partition.even(len(IDS), ranks), chain, reserve_tokens=6)
        return None if found.logits is None else scored(loaded, found, TEXTS)

    (found,) = [each for each in run_local(ranks, rank) if each is not None]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=CLOSE) and one.is_greedy == other.is_greedy


def test_plain_transformers_cache_is_left_alone() -> None:
    loaded = ready("mistral-window", chain=False)
    prefill = prefill_single(loaded.model, IDS, loaded.device)
    found = scored(loaded, prefill, TEXTS)
    assert prefill.cache.get_seq_length() == len(IDS)
    for score in found:
        mine = truth_of(loaded, score.text)[torch.arange(len(score.token_ids)), torch.tensor(score.token_ids)]
        torch.testing.assert_close(torch.tensor(score.logprobs), mine, atol=CLOSE, rtol=1e-5)


def test_what_cannot_be_scored_is_said() -> None:
    loaded = ready("llama-gqa")
    long = " ".join(["5"] * 500)
    with pytest.raises(DocumentError, match="context has 512 tokens"):
        scored(loaded, prefill_alone(loaded), [long])
    with pytest.raises(DocumentError, match="has no tokens"):
        scored(loaded, prefill_alone(loaded), ["nothing"])
    changing = ready(long_rope())
    short = alone(changing, IDS[:30], 6)
    with pytest.raises(DocumentError, match="rotary embedding changes"):
        scored(changing, short, [TEXTS[0]])
    batch: DecodeBatch[str] = DecodeBatch(loaded, GenerationConfig(), stop=(), max_new_tokens=0)
    batch.add("a", prefill_alone(loaded), IDS, 0, OwnGeneration(score=("nothing",)))
    batch.add("b", prefill_alone(loaded), IDS, 0, OwnGeneration(score=TEXTS))
    bad, good = sorted(batch.step(), key=lambda one: one.key)
    assert bad.answer is None and "has no tokens" in (bad.error or "")
    assert good.answer is not None and [score.text for score in good.answer.scores] == list(TEXTS)


def test_what_would_cut_an_answer_by_a_schema_is_refused() -> None:
    """A row's schema and the job's stop strings: the answer would be no JSON, and end as if it were."""
    loaded, own = ready("llama-gqa"), OwnGeneration(json_schema='{"type": "object"}', max_new_tokens=4)
    for config, said in (
        ({"min_new_tokens": 3}, "min_new_tokens = 3"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram"),
    ):
        batch: DecodeBatch[str] = DecodeBatch(loaded, GenerationConfig(**config), stop=(), max_new_tokens=4)
        batch.add("a", prefill_alone(loaded), IDS, 0, own)
        (found,) = batch.step()
        assert found.answer is None and said in (found.error or "")
        assert "cannot be combined with a JSON schema" in (found.error or "")


def test_a_prompt_is_answered_several_times_only_where_that_can_be() -> None:
    states, changing = ready("falcon-h1-both"), ready(long_rope())
    warm = GenerationConfig(do_sample=True, top_k=5)
    for loaded, config, ids, said in (
        (ready("llama-gqa"), GenerationConfig(do_sample=False), IDS, "without sampling would all be the same"),
        (states, warm, IDS, "keeps states"),
        (changing, warm, IDS[:30], "rotary embedding changes"),
    ):
        batch: DecodeBatch[str] = DecodeBatch(loaded, config, stop=(), max_new_tokens=6)
        batch.add("a", alone(loaded, ids, 6), ids, 0, OwnGeneration(n=2))
        (found,) = batch.step()
        assert found.answer is None and said in (found.error or "")
