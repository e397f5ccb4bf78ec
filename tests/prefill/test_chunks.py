"""Slices computed in chunks: the same as at once, whatever the chunks, the slices and the model."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from chains import single
from hypothesis import given
from hypothesis import strategies as st
from made_jobs import TEXT, answers, with_settings
from models import CONFIGS, VOCAB, prompt, random_model, tiny

from kvr_mpi.errors import ModelError
from kvr_mpi.kv import layer
from kvr_mpi.kv.layer import Retain
from kvr_mpi.kv.route import in_two_groups
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import allowed_error, differences, first_difference, follow
from kvr_mpi.prefill.memory_budget import GIB, _Ledger, footprint_of
from kvr_mpi.prefill.one_prompt import Prefill, compute_prefix, prefill_kvr
from kvr_mpi.prefill.registry import KVR, STRATEGIES, choose_chunks
from kvr_mpi.prefill.routes import relay
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
    assert after.cache.layers[0].chunks == (((21, 32),), ((32, 48),), ((48, 64),), ((64, 70),))
    assert whole.cache.layers[0].chunks[1:] == (((16, 32),), ((32, 48),), ((48, 64),), ((64, 70),))
    torch.testing.assert_close(after.logits, whole.logits, atol=1e-4, rtol=0)


def test_what_is_observed_and_what_stays_spread_are_the_same_in_chunks() -> None:
    """The window that compression observes is kept as a whole, in all layers, and so is each rank's share."""
    loaded, ids, cut = tiny("llama-gqa"), prompt(80), (0, 50, 80)
    at_once, in_chunks = (
        chunked(loaded, ids, cut, retain=Retain((59, 78)), chunk_tokens=size)[1] for size in (None, 8)
    )
    torch.testing.assert_close(at_once.logits, in_chunks.logits, atol=1e-4, rtol=0)
    observed, found = ([layer.observed for layer in each.cache.layers] for each in (at_once, in_chunks))
    assert [query.shape[2] for query in observed] == [78 - 59] * 3
    for mine, theirs in zip(found, observed, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    runs = [chunked(loaded, ids, cut, is_spread=True, chunk_tokens=size) for size in (None, 8)]
    for one, other in zip(*runs, strict=True):
        assert one.share is not None and other.share is not None and one.share.start == other.share.start
        for layer_idx in range(3):
            torch.testing.assert_close(one.share.own_kv(layer_idx), other.share.own_kv(layer_idx), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["bloom-own-attention", "lfm2-convolutions"])
@pytest.mark.filterwarnings("ignore")
def test_models_that_take_no_chunks_are_refused_by_name(name: str) -> None:
    loaded = tiny(name)
    with pytest.raises(ModelError, match=rf"{loaded.shape.architecture}: .* so its slices cannot be run in chunks"):
        chunked(loaded, prompt(20), (0, 20), chunk_tokens=8)
    with pytest.raises(ModelError, match="cannot use chunks"):
        STRATEGIES["ring"].check(tiny("llama-gqa"), chunk_tokens=8)


def test_what_is_alive_at_once_is_less_than_half_in_chunks() -> None:
    """On real tensors, the keys and values of all tokens included; and as was counted on meta."""
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=144, intermediate_size=384, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=1,
    )  # fmt: skip
    loaded, footprint, peaks = random_model(config), footprint_of(config, torch.float32), []
    prepare_model(loaded.model, chain=True)
    for chunk_tokens in (None, 128):
        with _Ledger([*loaded.model.parameters(), *loaded.model.buffers()]) as ledger:
            prefill_kvr(loaded, prompt(2048), Partition((0, 2048)), LocalTransport(), chunk_tokens=chunk_tokens)
        peaks.append(ledger.peak_bytes - 2048 * loaded.shape.kv_bytes_per_token)
    assert 0 < peaks[1] < peaks[0] / 2
    assert footprint.takes_chunks and footprint.activation_bytes(100, 128) == footprint.activation_bytes(100)
    assert 0 < footprint.activation_bytes(2048, 128) < footprint.activation_bytes(2048) / 2
    longer = [footprint.activation_bytes(tokens, 128) for tokens in (1024, 1536, 2048)]
    assert longer[2] - longer[1] == pytest.approx(longer[1] - longer[0], abs=2)


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


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.sampled_from([None, 1, 7, 16]))
def test_two_groups_cover_all_once(lengths: list[int], chunk_tokens: int | None) -> None:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    route = relay(Partition(tuple(bounds)), len(lengths) - 1, chunk_tokens=chunk_tokens)
    groups, tokens = in_two_groups(route.steps), route.owned[0][0]
    assert len(groups) <= 2
    assert [segment for group in groups for segment in group.segments] == [
        segment for step in route.steps for segment in step.segments
    ]
    ranges = sorted(each for group in groups for each in group.ranges)
    assert ranges[0][0] == 0 and ranges[-1][1] == tokens
    assert all(one[1] == other[0] for one, other in zip(ranges, ranges[1:], strict=False))
    assert len(groups) == 1 or 2 * sum(last - first for first, last in groups[0].ranges) >= tokens
    # Of each group what is nearer than the rank it ends in, and some chunks of that one.
    assert len(ranges) <= (2 if chunk_tokens is None else 4)


@pytest.mark.parametrize(("chunk_tokens", "calls"), [(None, 2), (2, 4)])
def test_groups_change_no_logits(chunk_tokens: int | None, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, ids, asked = tiny("llama-gqa"), prompt(90), list[int]()
    truth = single(loaded, ids).logits
    monkeypatch.setattr(layer, "GROUPING", ("cpu",))
    attend = layer.attend

    def counted(query: torch.Tensor, keys: torch.Tensor, *args: object, **options: object) -> object:
        if threading.current_thread().name == "rank 4" and not options and query.shape[2] > 1:
            asked.append(keys.shape[2])
        return attend(query, keys, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(layer, "attend", counted)
    found = chunked(loaded, ids, (0, 20, 35, 50, 70, 90), chunk_tokens=chunk_tokens)[-1].logits
    assert found is not None and truth is not None
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-4)
    # In all layers but the last, the last rank's first tokens attend to the 70 before its own.
    assert len(asked) <= 2 * calls and sum(asked) == 2 * 70


@pytest.mark.slow
def test_jobs_run_in_chunks_where_memory_is_short(tmp_path: Path, tiny_model_dir: Path, run_here: Any) -> None:
    """Documents are answered, as ever, instead of refused."""
    rows = [json.dumps({"id": str(sentences), "text": TEXT * sentences}) for sentences in (21, 2, 18)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    (job := tmp_path / "job.toml").write_text(f"""
        model = {{path = "{tiny_model_dir}", dtype = "float32"}}
        documents.path = "{tmp_path / "corpus.jsonl"}"
        generation.max_new_tokens = 6
        parallel.partition = "even"
    """)

    def run(name: str, *changes: str) -> dict[str, tuple[int, ...]]:
        ran = run_here(2, [job, *with_settings(f"output.path={tmp_path / name}", *changes)])
        assert ran.returncode == 0, ran.stderr
        return answers(tmp_path / name)

    found = run("free")
    footprint = footprint_of(tf.AutoConfig.from_pretrained(tiny_model_dir), torch.float32)
    cuts = [Partition(record.slices) for record in open_results(tmp_path / "free") if len(record.slices) == 3]
    needs = {
        size: max(footprint.route_bytes(one, reserve_tokens=6) for cut in cuts for one in KVR.routes(cut, 0, size))
        for size in (None, 128)
    }
    assert len(cuts) == 2 and needs[128] < needs[None]
    assert run("short", f"parallel.memory_gib={needs[128] / GIB + 1e-9:.12f}") == found
