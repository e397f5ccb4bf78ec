"""Heads that keep tokens of their own: the answers of a masked dense reference, in the memory of what is kept."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import chain
from models import prompt, tiny
from paged_rows import arena_of, pages_read, steps_recorded
from rows import alone, long_rope, other_prompt
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig

from benchmarks.kept import keep_only
from kvr_mpi.decode import step_graph
from kvr_mpi.decode.batch import DecodeBatch, Finished
from kvr_mpi.decode.group import Alone
from kvr_mpi.errors import ModelError
from kvr_mpi.kv.arena import Arena
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.head_store import check_retained
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, run_next
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.prefill.routes import relay

NEW_TOKENS = 14
LENGTHS = [30, 61, 18, 47]
# Grouped, multi-head and multi-query attention; soft caps; queries folded into a group; sinks.
FULL = ["llama-gqa", "llama-mha", "qwen2", "falcon-mqa", "falcon-gqa", "stablelm", "phi3", "gpt2"]
Retained = list[list[torch.Tensor] | None]


class Numbers:
    """A tokenizer whose texts are numbers."""

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, ids))


def ready(name: str) -> LoadedModel:
    loaded = replace(tiny(name), tokenizer=Numbers())
    prepare_model(loaded.model, chain=True)
    return loaded


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


def steps(loaded: LoadedModel, prefill: Prefill, count: int) -> tuple[list[int], torch.Tensor]:
    """Decode greedily; the tokens, and logits (tokens, vocab) after each."""
    tokens, rows, logits = [], [], prefill.logits
    with torch.inference_mode():
        for _ in range(count):
            assert logits is not None
            tokens.append(int(logits.argmax()))
            logits = run_next(loaded.model, prefill, torch.tensor([[tokens[-1]]]))
            rows.append(logits)
    return tokens, torch.stack(rows)


@pytest.mark.parametrize("alike", [False, True], ids=["ragged", "alike"])
@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "qwen2", "mixtral-moe", "gemma2-softcap", "gpt-oss-sinks"])
def test_logits_are_those_of_a_masked_dense_reference(name: str, alike: bool) -> None:
    loaded, ids = ready(name), prompt(50)
    prefill, retained = alone(loaded, ids), choose(loaded, 50, alike=alike)
    keep_only(prefill.cache, retained, NEW_TOKENS)
    tokens, logits = steps(loaded, prefill, NEW_TOKENS)
    truth = reference(loaded, ids, retained, tokens)
    assert float((logits - truth).abs().max()) < 1e-4
    assert tokens[1:] == truth.argmax(-1).tolist()[:-1]
    everything = reference(loaded, ids, [None] * len(loaded.shape.layers), tokens)
    assert float((logits - everything).abs().max()) > 1e-2, "dropping changes nothing: the test sees nothing"


@pytest.mark.parametrize("name", FULL)
def test_keeping_all_changes_nothing(name: str) -> None:
    loaded, ids = ready(name), prompt(40)
    everything: Retained = [[torch.arange(40)] * shape.num_kv_heads for shape in loaded.shape.layers]
    truth = steps(loaded, alone(loaded, ids, NEW_TOKENS), NEW_TOKENS)
    for retained in (everything, [None] * len(everything)):
        prefill = alone(loaded, ids)
        keep_only(prefill.cache, retained, NEW_TOKENS)
        tokens, logits = steps(loaded, prefill, NEW_TOKENS)
        assert tokens == truth[0] and float((logits - truth[1]).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["llama-gqa", "gpt-oss-sinks"])
def test_half_precision_keeps_its_own(name: str) -> None:
    """By other ways than float32, and as near to whole caches as these are to themselves in other blocks."""
    loaded = replace(tiny(name, torch.bfloat16), tokenizer=Numbers())
    prepare_model(loaded.model, chain=True)
    everything: Retained = [
        None if shape.visibility.size is not None else [torch.arange(40)] * shape.num_kv_heads
        for shape in loaded.shape.layers
    ]
    rows = []
    for retained in (everything, None):
        prefill = alone(loaded, prompt(40), 3)
        if retained is not None:
            keep_only(prefill.cache, retained, 3)
        with torch.inference_mode():
            rows.append(run_next(loaded.model, prefill, torch.tensor([[7]])))
    assert float((rows[0] - rows[1]).abs().max()) < 0.05 * float(rows[1].abs().max())


def test_several_tokens_at_once_see_what_one_by_one_see() -> None:
    """A question after a compressed document."""
    loaded, ids = ready("llama-gqa"), prompt(50)
    more, retained = other_prompt(9), choose(loaded, 50)
    prefill = alone(loaded, ids)
    keep_only(prefill.cache, retained, len(more))
    with torch.inference_mode():
        logits = run_next(loaded.model, prefill, torch.tensor([more]))
    assert float((logits - reference(loaded, ids, retained, more)[-1]).abs().max()) < 1e-4


def test_after_a_chain_the_old_memory_is_gone() -> None:
    """At once: what is still sent, and the transfers, hold it too."""
    loaded, ids = ready("llama-gqa"), prompt(60)
    gc.collect()
    gc.disable()
    try:
        prefill = chain(loaded, ids, (0, 25, 45, 60), reserve=NEW_TOKENS)
        held = StorageWeakRef(prefill.cache.layers[0].buffer.untyped_storage())
        keep_only(prefill.cache, retained := choose(loaded, 60), NEW_TOKENS)
        assert held.expired()
    finally:
        gc.enable()
    tokens, logits = steps(loaded, prefill, NEW_TOKENS)
    assert float((logits - reference(loaded, ids, retained, tokens)).abs().max()) < 1e-4


def make_pool(loaded: LoadedModel, **options: Any) -> DecodeBatch[str]:
    config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return DecodeBatch(loaded, config, stop=(), max_new_tokens=NEW_TOKENS, group=Alone(loaded, **options))


def answers(pool: DecodeBatch[str]) -> dict[str, Finished[str]]:
    found: dict[str, Finished[str]] = {}
    for _ in range(1000):
        if not pool.running:
            return found
        found |= {each.key: each for each in pool.step()}
    raise AssertionError("the pool never ends")


def compressed(loaded: LoadedModel, tokens: int, arena: Arena | None = None) -> Prefill:
    (prefill,) = prefill_packed(loaded, [other_prompt(tokens)], reserve_tokens=NEW_TOKENS, arena=arena)
    if tokens != 18:  # one stays whole among the others
        keep_only(prefill.cache, choose(loaded, tokens), NEW_TOKENS)
    return prefill


@pytest.mark.parametrize(
    ("name", "pages"), [("llama-gqa", 0), ("qwen2", 0), ("gemma2-softcap", 0), ("llama-gqa", 1), ("qwen2", 40)]
)
def test_in_company_answers_are_the_same(name: str, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory of their own, or (with a page to an extent, or many) in pages, in steps that are recorded."""
    monkeypatch.setattr(step_graph, "STEPS_BEFORE", 0)
    graphs = steps_recorded(monkeypatch)
    loaded, pool = ready(name), make_pool(ready(name))
    arena = arena_of(loaded, pages) if pages else None
    for tokens in LENGTHS:
        pool.add(str(tokens), compressed(loaded, tokens, arena), other_prompt(tokens), 0)
    with pages_read(monkeypatch) if pages else nullcontext():
        found = answers(pool)
    assert any(graph.replays for graph in graphs) == bool(pages)
    for tokens in LENGTHS:
        answer = found[str(tokens)].answer
        assert answer is not None and list(answer.token_ids) == steps(loaded, compressed(loaded, tokens), NEW_TOKENS)[0]


def test_a_failed_step_is_taken_back_and_halves() -> None:
    loaded, pool = ready("llama-gqa"), make_pool(ready("llama-gqa"))
    for tokens in LENGTHS:
        pool.add(str(tokens), compressed(loaded, tokens), other_prompt(tokens), 0)
    pool.step()
    failures = 0

    def crowded(module: Any, inputs: Any) -> None:
        nonlocal failures
        if inputs[0].shape[1] > 2 or failures == 3:  # the row; and later a document alone, once
            failures += 1
            raise torch.OutOfMemoryError("on purpose")

    hook = loaded.model.model.layers[1].mlp.register_forward_pre_hook(crowded)
    found = answers(pool)
    hook.remove()
    assert failures >= 1
    for tokens in LENGTHS:
        answer = found[str(tokens)].answer
        assert answer is not None and list(answer.token_ids) == steps(loaded, compressed(loaded, tokens), NEW_TOKENS)[0]


def test_an_answer_that_would_begin_anew_is_an_error() -> None:
    """Phi-3 computes all keys anew past 32 tokens: without a word it would go on from the whole prompt."""
    loaded = replace(long_rope(), tokenizer=Numbers())
    pool = make_pool(loaded)
    for tokens in (10, 25, 40):
        prefill = alone(loaded, other_prompt(tokens), NEW_TOKENS)
        keep_only(prefill.cache, choose(loaded, tokens), NEW_TOKENS)
        pool.add(str(tokens), prefill, other_prompt(tokens), 0)
    found = answers(pool)
    assert {key: each.error is None for key, each in found.items()} == {"10": True, "25": False, "40": True}
    assert "compute" in str(found["25"].error) and "from 33 tokens on" in str(found["25"].error)


def test_a_full_cache_says_so() -> None:
    loaded = ready("llama-gqa")
    prefill = alone(loaded, prompt(20))
    keep_only(prefill.cache, choose(loaded, 20), 3)
    with pytest.raises(ValueError, match="have room for 3 more"):
        steps(loaded, prefill, 4)


def test_what_cannot_be_kept_is_refused_and_changes_nothing() -> None:
    loaded = ready("llama-gqa")
    prefill = alone(loaded, prompt(20), NEW_TOKENS)
    for positions, message in (
        (torch.empty(0, dtype=torch.int64), "would keep nothing"),
        (torch.tensor([3, 3]), "ascend from 0 to 19"),
        (torch.tensor([4, 2]), "ascend from 0 to 19"),
        (torch.tensor([-1, 2]), "ascend from 0 to 19"),
        (torch.tensor([5, 20]), "ascend from 0 to 19"),
        (torch.arange(20).int(), "int64"),
    ):
        retained = choose(loaded, 20)
        assert retained[2] is not None
        retained[2][1] = positions
        with pytest.raises(ValueError, match=f"layer 2, KV head 1.*{message}"):
            keep_only(prefill.cache, retained, 4)
    with pytest.raises(ValueError, match="2 KV heads, and 1"):
        keep_only(prefill.cache, [[torch.arange(20)]] * 3, 4)
    with pytest.raises(ModelError, match="layer 0 sees a window of 16 tokens"):
        keep_only(alone(ready("mistral-window"), prompt(20)).cache, [[torch.arange(20)] * 2] * 3, 4)
    assert not prefill.cache.is_ragged
    assert steps(loaded, prefill, 5)[0] == steps(loaded, alone(loaded, prompt(20), 5), 5)[0]


def test_what_is_kept_is_checked_without_reading_heads_one_by_one() -> None:
    """Each number that is read by itself would wait for all that a GPU was told before."""

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    kept = [torch.arange(0, 20, 1 + head) for head in range(8)]
    with Reads() as reads:
        check_retained(kept, LayerShape(8, 8, 8), 20, 0)
    assert reads.count == 0
    with Reads() as reads:
        bool((kept[0] >= 0).all())
    assert reads.count == 1, "it sees what is read"


def resident_bytes(which: str = "VmRSS") -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(which))


@pytest.mark.long  # in a process that other tests have left alone
def test_memory_is_given_back() -> None:
    """As the process sees it: 250 MB of keys and values, of which a quarter is kept."""
    loaded, tokens, slack = tiny("llama-gqa"), 800_000, 100
    retained: Retained = [[torch.arange(tokens // 8), torch.arange(3 * tokens // 8)] for _ in range(3)]
    gc.collect()
    before = resident_bytes()
    cache = SliceCache(loaded, relay(Partition((0, tokens)), 0), None)
    cache.finish()
    for layer in cache.layers:
        layer.post()
        layer.buffer.fill_(1.0)
        layer.length = tokens
    whole = cache.held_bytes
    assert whole == 3 * tokens * 2 * 2 * 8 * 4 and resident_bytes() - before > 0.95 * whole
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    keep_only(cache, retained, slack)
    peak = resident_bytes("VmHWM") - before
    kept = sum(len(positions) + slack for heads in retained if heads for positions in heads) * 2 * 8 * 4
    assert cache.held_bytes == kept < 0.26 * whole
    assert peak <= whole + 0.5 * kept, "a layer at a time"
    assert resident_bytes() - before <= 1.05 * kept + 0.02 * whole  # the heap's own coming and going
    del cache, layer
    assert resident_bytes() - before <= 0.05 * whole
