"""Which tokens heads keep, by references written down plainly; prompts are compressed alike however they were cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chains import make_folder, on_groups
from hypothesis import given
from hypothesis import strategies as st
from models import prompt, tiny

from kvr_mpi.compress.compression import Compression, open_compression, size_of
from kvr_mpi.compress.registry import FLOOR, METHODS, adakv_counts, pyramidkv_weights, share_budget
from kvr_mpi.compress.scores import KERNEL, recency_scores, top_tokens, window_scores
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.errors import ConfigError
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel, load_model
from kvr_mpi.model.attention_hook import AttentionParams, prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport, run_local

BUDGETS = st.tuples(*(st.integers(*bounds) for bounds in ((1, 60), (0, 60), (1, 6), (1, 5))))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_scores_are_the_mean_softmax_of_the_window(softcap: float | None, has_sinks: bool) -> None:
    torch.manual_seed(0)
    window, start, heads, kv_heads, kernel = 5, 20, 6, 2, KERNEL
    query, keys = torch.randn(1, heads, window, 8), torch.randn(1, kv_heads, start + window, 8)
    sinks = torch.randn(heads) if has_sinks else None
    found = window_scores(query, keys, AttentionParams(0.7, softcap, sinks), start=start)
    expected = torch.zeros(kv_heads, start + kernel - 1)  # two tokens on either side that are none
    for head in range(heads):
        for row in range(window):
            products = [float(query[0, head, row] @ keys[0, head // 3, at]) * 0.7 for at in range(start + row + 1)]
            scores = torch.tensor(products)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            expected[head // 3, kernel // 2 : start + kernel // 2] += torch.softmax(scores, 0)[:start] / (3 * window)
    pooled = sum(expected[:, at : at + start] for at in range(kernel)) / kernel
    torch.testing.assert_close(found, pooled, rtol=1e-5, atol=1e-7)


def test_the_best_tokens_are_kept_and_of_equals_the_first() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert [found.tolist() for found in top_tokens(scores, torch.tensor([2, 3]))] == [[1, 2], [0, 1, 2]]
    assert [found.tolist() for found in top_tokens(scores, torch.tensor([0, 1]))] == [[], [0]]
    (kept,) = top_tokens(recency_scores(100, 1, torch.device("cpu")), torch.tensor([10]))
    assert kept.tolist() == [0, 1, 2, 3, 94, 95, 96, 97, 98, 99], "streaming-llm: sinks and the most recent"


@given(BUDGETS, st.lists(st.floats(0, 1e6), min_size=30, max_size=30))
def test_shares_add_up_to_the_budget_and_no_head_outgrows_the_text(
    budget: tuple[int, int, int, int], weights: list[float]
) -> None:
    candidates, each, layers, heads = budget
    each, even = min(each, candidates), np.ones((layers, heads))
    pyramid = share_budget(even * pyramidkv_weights(each, candidates, layers, None), each, candidates)
    for counts in (share_budget(np.array(weights[: even.size]).reshape(even.shape), each, candidates), pyramid):
        assert counts.sum() == each * counts.size
        assert counts.min() >= 0 and counts.max() <= candidates
    assert (share_budget(even, each, candidates) == each).all()
    assert (np.diff(pyramid.mean(1)) <= 1).all(), "it falls from layer to layer, but for rounding"
    assert (pyramid.max(1) - pyramid.min(1)).max() <= 1, "heads of a layer alike"


@pytest.mark.parametrize(
    ("weights", "each", "candidates", "expected"),
    [
        ([[1, 2], [3, 4]], 100, 1000, [[40, 80], [120, 160]]),
        ([[0, 0], [1, 1]], 100, 130, [[70, 70], [130, 130]]),
        (pyramidkv_weights(400, 10_000, 5, None), 400, 10_000, [[780], [590], [400], [210], [20]]),
    ],
)
def test_shares_by_hand(weights: Any, each: int, candidates: int, expected: list[list[int]]) -> None:
    assert share_budget(np.array(weights), each, candidates).tolist() == expected


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 5))
def test_adakv_takes_the_best_of_the_layer_above_the_floor(candidates: int, each: int, heads: int) -> None:
    each = min(each, candidates)
    scores = torch.rand(heads, candidates, generator=torch.Generator().manual_seed(candidates))
    counts = adakv_counts(scores, each)
    assert int(counts.sum()) == heads * each
    assert int(counts.min()) >= int(FLOOR * each) and int(counts.max()) <= candidates
    kept, left = [], []
    for head, tokens in enumerate(top_tokens(scores, counts)):
        dropped = sorted(set(range(candidates)) - set(tokens.tolist()))
        beyond = scores[head, tokens].sort(descending=True).values[int(FLOOR * each) :]
        kept, left = kept + beyond.tolist(), left + scores[head, dropped].tolist()
    assert not kept or not left or min(kept) >= max(left), "beyond the floor no token is kept for a better one"


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(512, [(100, 100), (512, 512), (5000, 512)]), (0.25, [(60, 60), (100, 64), (400, 100), (401, 101)])],
)
def test_short_texts_are_kept_whole_and_the_window_always(budget: Any, expected: list[tuple[int, int]]) -> None:
    made = CompressSettings(method="snapkv", budget=budget)
    assert [(tokens, made.kept_of(tokens)) for tokens, _ in expected] == expected


# A prompt is compressed alike however it was cut


TOKENS, TEXT = 90, (10, 75)


def settings_of(method: str, folder: Path | None = None, **more: Any) -> CompressSettings:
    """A small budget; HeadKV's profile is made up in a folder."""
    reads = METHODS[method].reads
    values: dict[str, Any] = {"method": method, "budget": 30}
    values |= {"window": 12} if "window" in reads else {}
    if "profile" in reads:
        assert folder is not None
        (folder / "heads.json").write_text(json.dumps({"counts": [[20, 40], [12, 90], [60, 12]]}))
        values["profile"] = str(folder / "heads.json")
    return CompressSettings(**values | more)


def prefill(compression: Compression, name: str, ranks: int, known: int = 0) -> SequenceKV:
    """What the rank with the last slice has; the prompt is cut evenly, as far as the window allows."""
    loaded, ids = tiny(name), prompt(TOKENS)
    prepare_model(loaded.model, chain=True)
    retain, partition = compression.retain(TOKENS, TEXT), Partition.even(TOKENS - known, ranks).after(known)
    if retain is not None and retain.window is not None:
        partition = partition.with_last_from(retain.window[0], known)
    options: dict[str, Any] = {"retain": retain, "prefix": compute_prefix(loaded, ids[:known]) if known else None}
    found = run_local(ranks, lambda rank: prefill_kvr(loaded, ids, partition, rank, **options))
    (cache,) = (one.cache for one in found if one.logits is not None)
    assert isinstance(cache, SequenceKV)
    return cache


def chosen(cache: SequenceKV) -> list[list[list[int]] | None]:
    """What each head of each layer keeps; None of a layer that keeps all it has."""
    layers = range(len(cache.layers))
    return [[head.tolist() for head in cache.kept_positions(idx)] if idx in cache.ragged else None for idx in layers]


@pytest.mark.parametrize("observes", ["question", "document"])
@pytest.mark.parametrize("method", [name for name, one in METHODS.items() if not one.repeats])
def test_each_head_keeps_the_window_and_what_follows_it_and_the_budget_is_kept(
    method: str, observes: str, tmp_path: Path
) -> None:
    loaded, settings = tiny("llama-gqa"), settings_of(method, tmp_path, observes=observes)
    compression = open_compression(settings, loaded)
    cache, window = prefill(compression, "llama-gqa", 2), compression.window_of(TOKENS, TEXT)
    stop = TEXT[1] if observes == "document" else TOKENS
    assert window == (stop - settings.observed_tokens, stop)
    kept = 0
    for layer in chosen(cache):
        assert layer is not None and len(layer) == 2
        for head in layer:
            assert head == sorted(set(head)) and head[-1] == TOKENS - 1
            assert set(range(window[0], TOKENS)) <= set(head)
            kept += len(head)
    beside = TOKENS - stop
    assert kept == 3 * 2 * (30 + beside)
    if method == "headkv":  # in proportion to what the profile keeps beyond the window
        assert [len(head) - 12 - beside for layer in chosen(cache) for head in layer or ()] == [5, 19, 0, 52, 32, 0]
    size = size_of(loaded, cache, method)
    assert size.tokens == 30 + beside and size.kv_bytes == kept * 2 * 8 * 4
    whole, drop = TOKENS * loaded.shape.kv_bytes_per_token, compression.planned_drop(TOKENS, TEXT)
    assert drop is not None and whole - drop.kv_bytes == size.kv_bytes, "as was planned with"


@pytest.mark.parametrize("method", ["streaming-llm", "snapkv", "ada-snapkv"])
@pytest.mark.parametrize(
    ("name", "compressed"),  # layers with windows keep what they have
    [
        ("llama-gqa", (0, 1, 2)),
        ("falcon-mha", (0, 1, 2)),
        ("qwen2-some-windows", (0,)),
        ("gpt-oss-sinks", (1,)),
        ("gemma2-softcap", (1,)),
    ],
)
def test_what_is_kept_does_not_depend_on_how_a_prompt_was_cut(
    method: str, name: str, compressed: tuple[int, ...]
) -> None:
    compression = open_compression(settings_of(method), tiny(name))
    ways = (1, 0), (2, 0), (3, 0), (2, 9)
    truth, *others = [chosen(prefill(compression, name, *way)) for way in ways]
    assert all(one == truth for one in others)
    assert tuple(idx for idx, layer in enumerate(truth) if layer is not None) == compressed == compression.layers


def test_chosen_tokens_are_those_of_a_dense_attention() -> None:
    """Against transformers' own attention weights, with neither our cache nor our scores."""
    loaded = tiny("llama-gqa")
    compression = open_compression(settings_of("snapkv"), loaded)
    found = chosen(prefill(compression, "llama-gqa", 2))
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        layers = loaded.model(torch.tensor([prompt(TOKENS)]), output_attentions=True).attentions
    for layer, weights in zip(found, layers, strict=True):
        assert layer is not None
        mean = weights[0, :, -12:, : TOKENS - 12].mean(1).view(2, 3, -1).mean(1)
        pooled = torch.nn.functional.avg_pool1d(mean, 5, stride=1, padding=2)
        best = [sorted(head.topk(18).indices.tolist()) for head in pooled]
        assert [head[:18] for head in layer] == best
    assert compression.window_of(30, (1, 30)) is None, "a short prompt is kept whole"
    assert compression.window_of(31, (1, 31)) == (31 - 12, 31)


@pytest.mark.parametrize(
    "name, why",
    [
        ("deepseek-latents", "cannot be compressed per head"),
        ("falcon-alibi", "cannot be compressed per head"),
        ("falcon-h1-both", "recurrent layers"),
        ("qwen3-next-delta-rule", "recurrent layers"),
        ("llama4-chunks", "no layer that sees all tokens"),
        ("mistral-window", "no layer that sees all tokens"),
    ],
)
def test_models_without_keys_of_heads_are_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{tiny(name).shape.architecture}.*{why}"):
        open_compression(settings_of("snapkv"), tiny(name))


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    settings = settings_of("headkv", tmp_path)
    assert open_compression(settings, tiny("llama-gqa")).profile is not None
    with pytest.raises(ConfigError, match="3 layers of 2 KV heads, but .* here has 3 of 6"):
        open_compression(settings, tiny("llama-mha"))


@pytest.mark.parametrize("method", ["streaming-llm", "pyramidkv", "ada-snapkv", "headkv", "kvzip"])
def test_heads_of_a_group_keep_what_those_of_one_process_keep(tmp_path: Path, method: str) -> None:
    """Also where all heads of a layer compete."""
    folder, _ = make_folder(tmp_path / "llama", "llama")
    loaded = load_model(str(folder), dtype="float32", device="cpu", cache_dir=folder)
    prepare_model(loaded.model, chain=True)
    settings = settings_of(method, tmp_path)

    def keep(loaded: LoadedModel, chain: Transport) -> Any:
        compression, cut = open_compression(settings, loaded, [7, 8, 9]), Partition.even(TOKENS, chain.size)
        cache = prefill_kvr(loaded, prompt(TOKENS), cut, chain, retain=compression.retain(TOKENS, TEXT)).cache
        if cache is not None:
            compression.repeat(cache, prompt(TOKENS), TEXT)
        return (chosen(cache), size_of(loaded, cache, method)) if cache is not None else None

    wanted, size = keep(loaded, LocalTransport())
    *_, (first, one), (second, other) = on_groups(folder, 2, 2, lambda ranks, loaded: keep(loaded, ranks.lane))
    assert [low + high for low, high in zip(first, second, strict=True)] == wanted
    assert one == other == size, "what is told of is of all heads"
    if method in ("ada-snapkv", "headkv"):
        assert any(len(low) != len(high) for low, high in wanted), "else heads need not know of each other"
        with pytest.raises(ConfigError, match="choose parallel.tensor_parallel <= 2"):
            on_groups(folder, 1, 6, lambda ranks, loaded: keep(loaded, ranks.lane))  # several ranks have each KV head
