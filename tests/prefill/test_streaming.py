"""Prompts through a rolling cache: exact where windows fit, else refused or approximated by name, in flat memory."""

from __future__ import annotations

import pytest
import torch
from chains import greedy, single
from models import prompt, tiny
from rows import batch_of, finish, other_prompt, ready, tokens_of

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.rolling import SINKS, Rolling
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import bytes_of
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.exactness import Continuation, continued
from kvr_mpi.prefill.packed import decode_packed
from kvr_mpi.prefill.streaming import prefill_rolling, prove_rolling

NEW_TOKENS = 12


def streamed(loaded: LoadedModel, ids: list[int], rolling: Rolling) -> Continuation:
    """Logits and the greedy tokens after them."""
    prepare_model(loaded.model, chain=True)
    return continued(loaded.model, prefill_rolling(loaded, ids, rolling), NEW_TOKENS)


@pytest.mark.parametrize(("cache_tokens", "step_tokens"), [(15, 1), (15, 7), (16, 64), (40, 16)])
def test_windows_that_fit_give_what_one_process_gives(cache_tokens: int, step_tokens: int) -> None:
    loaded = tiny("mistral-window")
    assert {layer.visibility.window for layer in loaded.shape.layers} == {16}
    held = set()
    for tokens in (3, 16, 130):
        ids = prompt(tokens)
        truth = continued(loaded.model, single(loaded, ids), NEW_TOKENS)
        found = streamed(loaded, ids, Rolling(cache_tokens, step_tokens))
        torch.testing.assert_close(found.logits, truth.logits, atol=1e-4, rtol=0)
        assert found.tokens == truth.tokens
        held.add(bytes_of([prefill_rolling(loaded, ids, Rolling(cache_tokens, step_tokens)).cache]))
    assert held == {(cache_tokens + step_tokens) * loaded.shape.kv_bytes_per_token}, "however long the prompt"


def test_what_would_be_another_answer_is_refused() -> None:
    prepare_model(tiny("llama-gqa").model, chain=True)
    with pytest.raises(ModelError, match=r"layer 0 sees all tokens, .* 'streaming-llm'"):
        prefill_rolling(tiny("llama-gqa"), prompt(20), Rolling())
    prepare_model(tiny("mistral-window").model, chain=True)
    with pytest.raises(ModelError, match=r"sees a window of 16 tokens, but a rolling cache keeps only the last 14"):
        prefill_rolling(tiny("mistral-window"), prompt(20), Rolling(14, 4))
    with pytest.raises(ModelError, match="attention can be replaced in every layer"):
        prefill_rolling(tiny("lfm2-convolutions"), prompt(20), Rolling())


@pytest.mark.parametrize("step_tokens", [1, 5, 64])
def test_the_approximation_is_that_of_sinks_and_last_tokens(step_tokens: int) -> None:
    """Every token sees the sinks and the last of those after them: as one pass under that mask, whatever the steps."""
    loaded, ids, rolling = tiny("llama-gqa"), prompt(70), Rolling(20, step_tokens, sinks=3)
    prepare_model(loaded.model, chain=False)
    position = torch.arange(len(ids))
    behind = position[:, None] - position
    seen = (behind >= 0) & ((position < 3) | (behind < 20 - 3))
    with torch.inference_mode():
        truth = loaded.model(torch.tensor([ids]), attention_mask=torch.where(seen, 0.0, float("-inf"))[None, None])
    logits = streamed(loaded, ids, rolling).logits
    assert torch.allclose(logits, truth.logits[0, -1], atol=1e-4)
    assert "streaming-llm" in rolling.name and "exact" in Rolling().name
    full = single(loaded, ids).logits
    assert full is not None and not torch.allclose(logits, full, atol=1e-2)


def test_a_token_is_taken_back_far_beyond_the_cache() -> None:
    loaded, ids = tiny("mistral-window"), prompt(40)
    truth = single(loaded, ids)
    expected = greedy(loaded.model, truth, 61)
    prepare_model(loaded.model, chain=True)
    found = prefill_rolling(loaded, ids, Rolling(15, 8))
    assert greedy(loaded.model, found, 60) == expected[:60]
    found.cache.truncate(99)
    again = decode_packed(loaded, Row([found.cache]), [expected[59]])[0]
    assert int(again.argmax()) == expected[60] and found.cache.length == 100
    first = max(spans[-1].first for spans in found.cache.layers)  # some of the last 15 + 8 tokens
    assert first <= 100 - 15
    found.cache.truncate(first + 15)
    with pytest.raises(ModelError, match=f"tokens from {first - 1} on are needed, but only those from {first} on"):
        found.cache.truncate(first + 14)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gpt-oss-sinks", "llama4-chunks"])
def test_a_ring_that_overwrites_what_is_still_seen_does_not_pass_the_check(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny(name)
    prepare_model(loaded.model, chain=True)
    rolling = Rolling(sinks=SINKS)
    prove_rolling(loaded, rolling)
    monkeypatch.setattr(Rolling, "rows", property(lambda rolling: rolling.cache_tokens + rolling.step_tokens - 2))
    with pytest.raises(ModelError, match="does not run a few tokens at a time"):
        prove_rolling(loaded, rolling)


@pytest.mark.parametrize(("name", "rolling"), [("mistral-window", Rolling(15, 7)), ("llama-gqa", Rolling(20, 7, 3))])
def test_prompts_with_rolling_caches_are_decoded_in_one_row(name: str, rolling: Rolling) -> None:
    """Each answer is what it is alone, though they drop their tokens at different steps."""
    loaded, ran = ready(name), list[int]()

    def answers(lengths: list[int]) -> dict[int, tuple[int, ...]]:
        batch = batch_of(loaded, 3 * NEW_TOKENS)
        for tokens in lengths:
            batch.add(tokens, prefill_rolling(loaded, other_prompt(tokens), rolling), other_prompt(tokens), 0)
        hook = loaded.model.register_forward_pre_hook(lambda module, args: ran.append(1))
        try:
            return tokens_of(finish(batch))
        finally:
            hook.remove()

    lengths = [2, 9, 33, 70]
    alone = {key: tokens for each in lengths for key, tokens in answers([each]).items()}
    ran.clear()
    assert answers(lengths) == alone and len(ran) == 3 * NEW_TOKENS - 1
