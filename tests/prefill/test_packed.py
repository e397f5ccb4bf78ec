"""A packed row gives every document what it would get alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import CONFIGS, random_model, tiny
from rows import alone, long_rope, other_prompt, ready

from benchmarks.tiny import shrink
from kvr_mpi.kv.chain import layer_kv
from kvr_mpi.kv.row import Row
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill import packed
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import decode_packed, prefill_packed
from kvr_mpi.prefill.self_check import why_not_packed

# Around the windows of 16 tokens; one token alone takes paths of its own.
LENGTHS = [5, 30, 1, 18, 16]


def check_equal(loaded: LoadedModel, found: Prefill, truth: Prefill) -> None:
    assert found.logits is not None and truth.logits is not None
    torch.testing.assert_close(found.logits, truth.logits, atol=1e-4, rtol=0)
    for layer in range(len(loaded.shape.layers)):
        mine, theirs = layer_kv(found.cache, layer), layer_kv(truth.cache, layer)
        assert mine is not None and theirs is not None
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [*CONFIGS, "roberta"])  # whose positions begin after the padding id
def test_prompts_together_are_prompts_alone(name: str) -> None:
    loaded = ready(name if name in CONFIGS else random_model(shrink(name)))
    prompts = [other_prompt(tokens) for tokens in LENGTHS]
    assert (why_not_packed(loaded) is None) == (name != "llama4-chunks")
    together = prefill_packed(loaded, prompts, reserve_tokens=3)
    apart = [alone(loaded, ids, reserve=3) for ids in prompts]
    for found, truth in zip(together, apart, strict=True):
        assert found.partition == truth.partition
        check_equal(loaded, found, truth)
    cache = Row([each.cache for each in together])
    for token in (7, 150, 3):  # and after them one token each, over the windows' edges
        logits = decode_packed(loaded, cache, [token] * len(prompts))
        with torch.inference_mode():
            truths = [decode_packed(loaded, Row([each.cache]), [token])[0] for each in apart]
        torch.testing.assert_close(logits, torch.stack(truths), atol=1e-4, rtol=0)
    for found, truth in zip(together, apart, strict=True):
        check_equal(loaded, found, truth)
    with pytest.raises(ValueError, match="a cache of 8 tokens is full"):
        decode_packed(loaded, cache, [1] * len(prompts))


@settings(max_examples=20)
@given(
    st.sampled_from(["llama-gqa", "gpt-oss-sinks", "falcon-mqa", "long-rope"]),
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
)
@example("long-rope", [5, 40])
def test_any_lengths_are_exact(name: str, lengths: list[int]) -> None:
    """In a row of a model, too, that changes its frequencies from 33 tokens on."""
    loaded = long_rope() if name == "long-rope" else ready(name)
    assert why_not_packed(loaded) is None
    together = prefill_packed(loaded, [other_prompt(tokens) for tokens in lengths])
    shares = [each.row_share for each in together]
    assert shares == pytest.approx([tokens / sum(lengths) for tokens in lengths]), "each its part of the row's time"
    for tokens, found in zip(lengths, together, strict=True):
        check_equal(loaded, found, alone(loaded, other_prompt(tokens)))


def test_a_row_that_does_not_fit_is_halved() -> None:
    """Three rows hold what fits, and the prompt that does not fit alone says so."""
    loaded, most = ready("llama-gqa"), 0
    prompts = [other_prompt(tokens) for tokens in (5, 41, 12, 18, 16)]

    def limited(module: Any, inputs: Any) -> None:
        nonlocal most
        if inputs[0].shape[1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        most = max(most, inputs[0].shape[1])

    hook = loaded.model.model.layers[1].mlp.register_forward_pre_hook(limited)
    found = prefill_packed(loaded, prompts)
    hook.remove()
    assert most == 34
    for ids, prefill in zip(prompts, found, strict=True):
        if len(ids) == 41:
            assert prefill.cache is None and prefill.logits is None and "out of memory" in str(prefill.error)
        else:
            assert prefill.error is None
            check_equal(loaded, prefill, alone(loaded, ids))


def test_models_that_cannot_or_would_answer_wrongly_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing crashes, but the second document's tokens stand at wrong positions."""
    for name, why in (("falcon-alibi", "its own attention"), ("lfm2-convolutions", "recurrent")):
        assert why in str(why_not_packed(tiny(name)))
    run_model = packed.run_model

    def run_wrongly(model: Any, ids: Any, cache: Any, *, positions: Any, **rest: Any) -> torch.Tensor:
        return run_model(model, ids, cache, positions=torch.arange(ids.shape[1]).unsqueeze(0), **rest)

    monkeypatch.setattr(packed, "run_model", run_wrongly)
    for name in ("llama-gqa", "gpt2", "opt", "falcon-mqa"):
        assert "differ from each alone" in str(why_not_packed(ready(name)))
