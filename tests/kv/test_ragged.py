"""Heads that keep tokens of their own: the answers of a masked dense reference, in the memory of what is kept."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from chains import chain, greedy
from models import prompt, tiny
from rows import Numbers, alone, batch_of, finish, long_rope, other_prompt, pages_of, pages_read, ready, steps_recorded
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AttentionInterface, AttentionMaskInterface

from benchmarks.kept import keep_only
from kvr_mpi.decode import step_graph
from kvr_mpi.errors import ModelError
from kvr_mpi.kv.pool import Pool
from kvr_mpi.kv.row import Row
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.exactness import continued
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import prefill_packed, run_row

NEW_TOKENS = 14
LENGTHS = [30, 61, 18, 47]
# Grouped, multi-head and multi-query attention, by transformers' interface and by calls of their own.
FULL = ["llama-mha", "falcon-mqa", "falcon-gqa", "stablelm", "phi3", "gpt2"]
Retained = list[list[torch.Tensor] | None]


def choose(loaded: LoadedModel, tokens: int, seed: int = 0, *, alike: bool = False) -> Retained:
    """Some tokens for each head of each layer that sees all; `alike`: as many for each of a layer."""
    draw, found = random.Random(seed * 1000 + tokens), Retained()
    for shape in loaded.shape.layers:
        if shape.visibility.size is not None:
            found.append(None)
            continue
        same = draw.randint(1, tokens)
        counts = [same if alike else draw.randint(1, tokens) for _ in range(shape.num_kv_heads)]
        found.append([torch.tensor(sorted(draw.sample(range(tokens), count))) for count in counts])
    return found


def reference(loaded: LoadedModel, ids: list[int], retained: Retained, tokens: list[int]) -> torch.Tensor:
    """Logits (tokens, vocab) after each of some tokens, of plain transformers: nothing dropped, but masked.

    The answer's queries see what each head keeps of the prompt, and the answer.
    """
    prompt_tokens = len(ids)

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **other: Any
    ) -> Any:
        count, kv_heads = query.shape[2], key.shape[1]
        at = torch.arange(count)
        seen = (at[None, :] <= at[:, None]).expand(kv_heads, count, count).clone()
        if window := loaded.shape.layers[module.layer_idx].visibility.window:
            seen &= at[None, :] > at[:, None] - window
        kept = retained[module.layer_idx]
        if kept is not None:
            for head, positions in enumerate(kept):
                dropped = torch.ones(count, dtype=torch.bool)
                dropped[positions] = False
                dropped[prompt_tokens:] = False
                seen[head, prompt_tokens:, dropped] = False
        group = query.shape[1] // kv_heads
        score = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
        if (cap := other.get("softcap")) is not None:
            score = torch.tanh(score / cap) * cap
        score = score.masked_fill(~seen.repeat_interleave(group, 0), float("-inf"))
        if (sinks := other.get("s_aux")) is not None:
            score = torch.cat([score, sinks.view(1, -1, 1, 1).expand(1, -1, count, 1)], -1)
        weights = torch.softmax(score, -1)[..., :count]
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None

    AttentionInterface.register("masked-reference", attention)
    AttentionMaskInterface.register("masked-reference", lambda *args, **kwargs: None)
    prepare_model(loaded.model, chain=False)
    loaded.model.set_attn_implementation("masked-reference")
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([ids + tokens]), use_cache=False).logits[0, prompt_tokens:]
    prepare_model(loaded.model, chain=True)
    return logits


def logits_after(loaded: LoadedModel, prefill: Prefill, tokens: list[int]) -> torch.Tensor:
    """Logits (tokens, vocab) after each of some tokens, one by one."""
    return torch.stack(continued(loaded.model, prefill, len(tokens), tokens).steps)


@pytest.mark.parametrize("alike", [False, True], ids=["ragged", "alike"])
@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "qwen2", "mixtral-moe", "gemma2-softcap", "gpt-oss-sinks"])
def test_logits_are_those_of_a_masked_dense_reference(name: str, alike: bool) -> None:
    """Of tokens one by one, and of several at once, as of a question after a compressed document."""
    loaded, ids, tokens = ready(name), prompt(50), other_prompt(9)
    retained = choose(loaded, 50, alike=alike)
    truth = reference(loaded, ids, retained, tokens)
    one_by_one, at_once = alone(loaded, ids), alone(loaded, ids)
    for prefill in (one_by_one, at_once):
        keep_only(prefill.cache, retained, len(tokens))
    torch.testing.assert_close(logits_after(loaded, one_by_one, tokens), truth, atol=1e-4, rtol=0)
    with torch.inference_mode():
        found = run_row(loaded, Row([at_once.cache], [len(tokens)]), tokens)[-1]
    torch.testing.assert_close(found, truth[-1], atol=1e-4, rtol=0)
    everything = reference(loaded, ids, [None] * len(loaded.shape.layers), tokens)
    assert float((truth - everything).abs().max()) > 1e-2, "dropping changes nothing: the test sees nothing"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FULL), ("llama-gqa", torch.bfloat16), ("gpt-oss-sinks", torch.bfloat16)],
)
def test_keeping_all_changes_nothing(name: str, dtype: torch.dtype) -> None:
    loaded, tokens = tiny(name, dtype), other_prompt(3)
    prepare_model(loaded.model, chain=True)
    layers, found = loaded.shape.layers, []
    everything = [None if one.visibility.size else [torch.arange(40)] * one.num_kv_heads for one in layers]
    for retained in (None, everything, [None] * len(layers)):
        prefill = alone(loaded, prompt(40), 3)
        if retained is not None:
            keep_only(prefill.cache, retained, 3)
        found.append(logits_after(loaded, prefill, tokens))
    within = 1e-4 if dtype == torch.float32 else 0.05 * float(found[0].abs().max())
    assert all(float((one - found[0]).abs().max()) < within for one in found[1:])


def test_after_a_chain_the_old_memory_is_gone() -> None:
    """At once: what is still sent, and the transfers, hold it too."""
    loaded, ids, tokens = ready("llama-gqa"), prompt(60), other_prompt(5)
    gc.collect()
    gc.disable()
    try:
        prefill = chain(loaded, ids, (0, 25, 45, 60), reserve=NEW_TOKENS)
        held = StorageWeakRef(prefill.cache.layers[0][0].keys.untyped_storage())
        keep_only(prefill.cache, retained := choose(loaded, 60), NEW_TOKENS)
        assert held.expired()
    finally:
        gc.enable()
    truth = reference(loaded, ids, retained, tokens)
    torch.testing.assert_close(logits_after(loaded, prefill, tokens), truth, atol=1e-4, rtol=0)


def compressed(loaded: LoadedModel, tokens: int, pool: Pool | None = None) -> Prefill:
    (prefill,) = prefill_packed(loaded, [other_prompt(tokens)], reserve_tokens=NEW_TOKENS, pool=pool)
    if tokens != 18:  # one stays whole among the others
        keep_only(prefill.cache, choose(loaded, tokens), NEW_TOKENS)
    return prefill


@pytest.mark.parametrize(
    ("name", "pages", "fails"),
    [
        ("qwen2", 0, False),
        ("gemma2-softcap", 0, False),
        ("llama-gqa", 8, False),
        ("qwen2", 40, False),
        ("llama-gqa", 0, True),
    ],
)
def test_in_company_answers_are_the_same(name: str, pages: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory of their own, in pages  in recorded steps; after a step taken back."""
    monkeypatch.setattr(step_graph, "STEPS_BEFORE", 0)
    graphs, failures = steps_recorded(monkeypatch), 0
    loaded, batch = ready(name), batch_of(ready(name), NEW_TOKENS)
    pool = pages_of(loaded, pages) if pages else None
    for tokens in LENGTHS:
        batch.add(tokens, compressed(loaded, tokens, pool), other_prompt(tokens), 0)

    def crowded(module: Any, inputs: Any) -> None:
        nonlocal failures
        if fails and (inputs[0].shape[1] > 2 or failures == 3):  # the row; and later a document alone, once
            failures += 1
            raise torch.OutOfMemoryError("on purpose")

    with pages_read(monkeypatch) if pages else nullcontext():
        first = {each.key: each for each in batch.step()}
        hook = loaded.model.get_decoder().layers[1].mlp.register_forward_pre_hook(crowded)
        found = first | finish(batch)
        hook.remove()
    assert bool(failures) == fails and any(graph.replays for graph in graphs) == bool(pages)
    for tokens in LENGTHS:
        answer = found[tokens].answer
        assert answer is not None
        assert list(answer.token_ids) == greedy(loaded.model, compressed(loaded, tokens), NEW_TOKENS)


def test_an_answer_that_would_begin_anew_is_an_error() -> None:
    """Phi-3 computes all keys anew past 32 tokens: without a word it would go on from the whole prompt."""
    loaded = replace(long_rope(), tokenizer=Numbers())
    batch = batch_of(loaded, NEW_TOKENS)
    for tokens in (10, 25, 40):
        prefill = alone(loaded, other_prompt(tokens), NEW_TOKENS)
        keep_only(prefill.cache, choose(loaded, tokens), NEW_TOKENS)
        batch.add(tokens, prefill, other_prompt(tokens), 0)
    found = finish(batch)
    assert {key: each.error is None for key, each in found.items()} == {10: True, 25: False, 40: True}
    assert "from 33 tokens on" in str(found[25].error)


def test_what_cannot_be_kept_is_refused_and_changes_nothing() -> None:
    loaded, ids = ready("llama-gqa"), prompt(20)
    prefill = alone(loaded, ids, NEW_TOKENS)
    for positions, message in (
        (torch.empty(0, dtype=torch.int64), "would keep nothing"),
        (torch.tensor([-1, 2]), "ascend from 0 to 19"),
        (torch.tensor([5, 20]), "ascend from 0 to 19"),
    ):
        retained = choose(loaded, 20)
        assert retained[2] is not None
        retained[2][1] = positions
        with pytest.raises(ValueError, match=f"layer 2, KV head 1.*{message}"):
            keep_only(prefill.cache, retained, 4)
    with pytest.raises(ValueError, match="2 KV heads, and 1"):
        keep_only(prefill.cache, [[torch.arange(20)]] * 3, 4)
    with pytest.raises(ModelError, match="layer 0 sees a window of 16 tokens"):
        keep_only(alone(ready("mistral-window"), ids).cache, [[torch.arange(20)] * 2] * 3, 4)
    assert not prefill.cache.ragged
    truth = greedy(loaded.model, alone(loaded, ids, 5), 5)
    assert greedy(loaded.model, prefill, 5) == truth
    full = alone(loaded, ids)
    keep_only(full.cache, choose(loaded, 20), 3)
    with pytest.raises(ValueError, match="a cache of 23 tokens is full"):
        logits_after(loaded, full, truth)
