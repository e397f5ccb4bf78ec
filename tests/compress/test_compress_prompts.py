"""A prompt is compressed alike however it was cut, and what cannot be compressed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_groups import make_folder, on_groups
from models import prompt, tiny

from kvr_mpi.compress.compression import Compression, open_compression, size_of
from kvr_mpi.compress.registry import METHODS
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.errors import ConfigError
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.model import LoadedModel, load_model
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr
from kvr_mpi.prefill.registry import STRATEGIES
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport, run_local

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


def prefill(compression: Compression, name: str, ranks: int, strategy: str = "kvr", known: int = 0) -> SliceCache:
    """What the rank with the last slice has; the prompt is cut evenly, as far as the window allows."""
    loaded, ids, way = tiny(name), prompt(TOKENS), STRATEGIES[strategy]
    prepare_model(loaded.model, chain=True)
    retain, partition = compression.retain(TOKENS, TEXT), way.cut_evenly(TOKENS, ranks, known)
    if retain is not None and retain.window is not None:
        partition = partition.with_last_from(retain.window[0], known)
    options: dict[str, Any] = {"retain": retain, "prefix": compute_prefix(loaded, ids[:known]) if known else None}
    found = run_local(ranks, lambda rank: prefill_kvr(loaded, ids, partition, rank, way, **options))
    (cache,) = (one.cache for one in found if one.logits is not None)
    assert isinstance(cache, SliceCache)
    return cache


def chosen(cache: SliceCache) -> list[list[list[int]] | None]:
    """What each head of each layer keeps; None of a layer that keeps all it has."""
    return [[head.tolist() for head in layer.positions] if layer.is_ragged else None for layer in cache.layers]


@pytest.mark.parametrize("observes", ["question", "document"])
@pytest.mark.parametrize("method", METHODS)
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
    ways = [(1, "kvr", 0), (2, "kvr", 0), (3, "kvr", 0), (2, "kvr", 9)]
    ways += [(2, "ring", 0)] if STRATEGIES["ring"].misfit(tiny(name)) is None else []
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


@pytest.mark.parametrize("method", ["streaming-llm", "pyramidkv", "ada-snapkv", "headkv"])
def test_heads_of_a_group_keep_what_those_of_one_process_keep(tmp_path: Path, method: str) -> None:
    """Also where all heads of a layer compete."""
    folder, _ = make_folder(tmp_path / "llama", "llama")
    loaded = load_model(str(folder), dtype="float32", device="cpu", cache_dir=folder)
    prepare_model(loaded.model, chain=True)
    settings = settings_of(method, tmp_path)

    def keep(loaded: LoadedModel, chain: Transport) -> Any:
        compression, cut = open_compression(settings, loaded), Partition.even(TOKENS, chain.size)
        cache = prefill_kvr(loaded, prompt(TOKENS), cut, chain, retain=compression.retain(TOKENS, TEXT)).cache
        return (chosen(cache), size_of(loaded, cache, method)) if cache.is_decode_rank else None

    wanted, size = keep(loaded, LocalTransport())
    *_, (first, one), (second, other) = on_groups(folder, 2, 2, lambda ranks, loaded: keep(loaded, ranks.lane))
    assert [low + high for low, high in zip(first, second, strict=True)] == wanted
    assert one == other == size, "what is told of is of all heads"
    if method in ("ada-snapkv", "headkv"):
        assert any(len(low) != len(high) for low, high in wanted), "else heads need not know of each other"
        with pytest.raises(ConfigError, match="choose parallel.tensor_parallel <= 2"):
            on_groups(folder, 1, 6, lambda ranks, loaded: keep(loaded, ranks.lane))  # several ranks have each KV head
