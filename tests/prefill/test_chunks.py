"""Slices computed in chunks: the same as at once, whatever the chunks, the slices and the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from chains import rival, single
from made_jobs import TEXT, answers, with_settings
from models import CONFIGS, STATES, VOCAB, WHOLE, prompt, tiny

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import allowed_error, differences, first_difference, follow
from kvr_mpi.prefill.memory_budget import GIB, _Ledger, footprint_of
from kvr_mpi.prefill.one_prompt import Prefill, compute_prefix, prefill_kvr
from kvr_mpi.prefill.registry import KVR, STRATEGIES, choose_chunks
from kvr_mpi.store.results import open_results
from kvr_mpi.transport.local import LocalTransport, run_local

NEW_TOKENS, NOISE = 8, allowed_error(torch.float32)


def chunked(loaded: LoadedModel, ids: Sequence[int], bounds: Sequence[int], **options: Any) -> list[Prefill]:
    """Run a chain of threads."""
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    partition = Partition(tuple(bounds))
    return run_local(partition.size, lambda rank: prefill_kvr(loaded, ids, partition, rank, **options))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "llama-gqa" else pytest.mark.slow) for name in CONFIGS]
)
@pytest.mark.filterwarnings("ignore")  # a configuration made up for tests makes transformers warn
def test_chunks_give_what_one_process_gives(name: str) -> None:
    loaded, ids = tiny(name), prompt(90)
    truth = follow(loaded.model, single(loaded, ids), NEW_TOKENS)
    cuts = [((0, 90), 16), ((0, 53, 90), 7), ((0, 53, 90), 1000), ((0, 1, 60, 89, 90), 16), ((0, 53, 90), 1)]
    for bounds, chunk_tokens in cuts:
        ranks = chunked(loaded, ids, bounds, chunk_tokens=chunk_tokens, reserve_tokens=NEW_TOKENS, keeps_all=True)
        found = follow(loaded.model, ranks[-1], NEW_TOKENS)
        assert first_difference(differences(found, truth), NOISE) is None, (bounds, chunk_tokens)
        assert found.tokens == truth.tokens


def test_chunks_end_at_the_same_tokens_however_the_prompt_is_cut() -> None:
    """Sums are made in another order where slices end, but not by what runs beside: the bits are the prompt's own."""
    loaded, ids = tiny("llama-gqa"), prompt(70)
    prepare_model(loaded.model, chain=True)
    (after,) = chunked(loaded, ids, (0, 70), chunk_tokens=16, prefix=compute_prefix(loaded, ids[:21]))
    (whole,) = chunked(loaded, ids, (0, 70), chunk_tokens=16)
    assert after.cache.chunks(0) == (((21, 32),), ((32, 48),), ((48, 64),), ((64, 70),))
    assert whole.cache.chunks(0)[1:] == (((16, 32),), ((32, 48),), ((48, 64),), ((64, 70),))
    torch.testing.assert_close(after.logits, whole.logits, atol=1e-4, rtol=0)


def test_a_window_that_is_observed_may_lie_in_several_chunks() -> None:
    """What compression asks for is kept of all of it, in all layers, and logits are as ever."""
    loaded, window = tiny("llama-gqa"), (59, 78)
    at_once, in_chunks = (
        chunked(loaded, prompt(80), (0, 50, 80), window=window, chunk_tokens=size)[1] for size in (None, 8)
    )
    torch.testing.assert_close(at_once.logits, in_chunks.logits, atol=1e-4, rtol=0)
    found = in_chunks.cache.observation.layers
    assert sorted(found) == [0, 1, 2]
    for idx, kept in at_once.cache.observation.layers.items():
        assert kept.query.shape[2] == window[1] - window[0]
        torch.testing.assert_close(found[idx].query, kept.query, atol=1e-4, rtol=0)


def test_shares_of_a_chain_are_the_same_in_chunks() -> None:
    loaded = tiny("llama-gqa")
    runs = [chunked(loaded, prompt(80), (0, 50, 80), is_spread=True, chunk_tokens=size) for size in (None, 8)]
    for one, other in zip(*runs, strict=True):
        mine, theirs = one.share, other.share
        assert mine is not None and theirs is not None and mine.start == theirs.start
        for layer_idx in range(3):
            pair = mine.own_kv(layer_idx), theirs.own_kv(layer_idx)
            torch.testing.assert_close(*pair, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["bloom-own-attention", "lfm2-convolutions"])
@pytest.mark.filterwarnings("ignore")
def test_models_that_take_no_chunks_are_refused_by_name(name: str) -> None:
    loaded = tiny(name)
    assert name in {**WHOLE, **STATES}
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    with pytest.raises(ModelError, match=rf"{loaded.shape.architecture}: .* so its slices cannot be run in chunks"):
        prefill_kvr(loaded, prompt(20), Partition((0, 20)), LocalTransport(), chunk_tokens=8)


def test_rivals_take_no_chunks() -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    for name in ("ring", "tsp-causal"):
        with pytest.raises(ModelError, match="cannot use chunks"):
            rival(name, loaded, prompt(20), LocalTransport(), chunk_tokens=8)


def test_activations_of_chunks_are_under_half_of_those_of_a_slice() -> None:
    """At 4096 tokens of a model of SmolLM2's shape in chunks of 512; what was counted on meta is what is alive."""
    config = tf.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
    )
    footprint = footprint_of(config, torch.float32)
    assert footprint.takes_chunks
    at_once, in_chunks = footprint.activation_bytes(4096), footprint.activation_bytes(4096, 512)
    assert 2 * 4096 * 576 * 4 < in_chunks / footprint.heap_share < in_chunks < at_once / 2
    assert footprint.activation_bytes(4096, 128) < in_chunks
    assert footprint.activation_bytes(500, 512) == footprint.activation_bytes(500)
    longer = [footprint.activation_bytes(tokens, 512) for tokens in (2048, 3072, 4096)]
    assert longer[2] - longer[1] == pytest.approx(longer[1] - longer[0], abs=2)


def test_what_is_alive_at_once_is_less_in_chunks() -> None:
    """On real tensors, the keys and values of all tokens included."""
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=144, intermediate_size=384, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=1,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = replace(tiny("llama-gqa"), model=model, shape=probe_shape(config, torch.float32))
    prepare_model(model, chain=True)
    peaks = []
    for chunk_tokens in (None, 128):
        with _Ledger([*model.parameters(), *model.buffers()]) as ledger:
            prefill_kvr(loaded, prompt(2048), Partition((0, 2048)), LocalTransport(), chunk_tokens=chunk_tokens)
        peaks.append(ledger.peak_bytes)
    kv_bytes = 2048 * loaded.shape.kv_bytes_per_token
    assert kv_bytes < peaks[1] and peaks[1] - kv_bytes < (peaks[0] - kv_bytes) / 2


def test_memory_decides_on_chunks_only_where_it_is_short() -> None:
    footprint = footprint_of(tiny("llama-gqa").model.config, torch.float32)
    partition = Partition((0, 3000, 5000))

    def chosen(asked: Any, free_bytes: int, strategy: str = "kvr") -> int | None:
        def fits(chunk_tokens: int | None) -> bool:
            routes = KVR.routes(partition, 0, chunk_tokens)
            return max(footprint.route_bytes(one) for one in routes) <= free_bytes

        return choose_chunks(asked, STRATEGIES[strategy], footprint, fits)

    needs = {size: max(map(footprint.route_bytes, KVR.routes(partition, 0, size))) for size in (None, 2048, 512)}
    assert needs[None] > needs[2048] > needs[512]
    assert chosen("auto", needs[None]) is None
    assert chosen("auto", needs[None] - 1) == 2048
    assert chosen("auto", needs[512]) == 512
    assert chosen("auto", 1000) is None, "in no chunks: it is refused as ever"
    assert choose_chunks("auto", KVR, footprint, lambda size: size is not None) == 4096, "the longest that fits"
    assert chosen(700, needs[None]) == 700
    assert chosen("auto", needs[512], "ring") is None
    assert choose_chunks("auto", KVR, replace(footprint, takes_chunks=False), lambda size: bool(size)) is None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_jobs_run_in_chunks_and_answer_the_same(
    ranks: int, tmp_path: Path, tiny_model_dir: Path, run_here: Any
) -> None:
    rows = (json.dumps({"id": f"d{n}", "text": f"Document {n}. {TEXT * count}"}) for n, count in enumerate((21, 2, 18)))
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    settings = {
        "model.path": str(tiny_model_dir),
        "model.dtype": "float32",
        "documents.path": str(tmp_path / "corpus.jsonl"),
        "generation.max_new_tokens": 6,
        "parallel.partition": "even",
    }
    job = tmp_path / "job.toml"
    job.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    found = {}
    for chunk_tokens in ('"auto"', 48):
        folder = tmp_path / str(chunk_tokens).strip('"')
        run = run_here(ranks, [job, *with_settings(f"output.path={folder}", f"parallel.chunk_tokens={chunk_tokens}")])
        assert run.returncode == 0, run.stderr
        found[chunk_tokens] = answers(folder)
        told = f"slices are computed in chunks of {chunk_tokens} tokens" in run.stderr
        assert told == (chunk_tokens == 48)
    assert found[48] == found['"auto"'] and len(found[48]) == 3

    # Where memory is short chunks are chosen, and the documents are answered instead of refused.
    footprint = footprint_of(tf.AutoConfig.from_pretrained(tiny_model_dir), torch.float32)
    cuts = [Partition(record.slices) for record in open_results(tmp_path / "auto") if len(record.slices) == 3]
    needs = {
        size: max(footprint.route_bytes(one, reserve_tokens=6) for cut in cuts for one in KVR.routes(cut, 0, size))
        for size in (None, 128)
    }
    assert len(cuts) == 2 and needs[128] < needs[None]
    short = with_settings(f"output.path={tmp_path / 'short'}", f"parallel.memory_gib={needs[128] / GIB + 1e-9:.12f}")
    run = run_here(ranks, [job, *short])
    assert run.returncode == 0, run.stderr
    assert answers(tmp_path / "short") == found[48]
    ring = with_settings(f"output.path={folder}", "parallel.strategy=ring", "parallel.chunk_tokens=48")
    run = run_here(ranks, [job, *ring])
    assert run.returncode == 78 and "parallel.chunk_tokens = 48" in run.stderr
