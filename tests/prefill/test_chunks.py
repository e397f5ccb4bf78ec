"""Slices computed in chunks: the same as at once, whatever the chunks, the slices and the model."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from chains import all_ranks, single
from hypothesis import given
from hypothesis import strategies as st
from models import VOCAB, prompt, tiny

from kvr_mpi.errors import ModelError
from kvr_mpi.kv import chain
from kvr_mpi.kv.relay import Relay, in_two_groups, join_ranges, relays
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill import self_check
from kvr_mpi.prefill.memory_budget import choose_chunks, footprint_of
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr
from kvr_mpi.prefill.self_check import check_chunks


def test_chunks_end_at_the_same_tokens_however_the_prompt_is_cut() -> None:
    """Sums are made in another order where slices end, but not by what runs beside: the bits are the prompt's own."""
    loaded, ids = tiny("llama-gqa"), prompt(70)
    prepare_model(loaded.model, chain=True)
    (after,) = all_ranks(loaded, ids, (0, 70), chunk_tokens=16, prefix=compute_prefix(loaded, ids[:21]))
    (whole,) = all_ranks(loaded, ids, (0, 70), chunk_tokens=16)
    (alone,), (beyond,) = (relays(Partition((0, 70)), known, 16) for known in (0, 21))
    assert beyond.chunks == [(21, 32), (32, 48), (48, 64), (64, 70)]
    assert alone.chunks[1:] == [(16, 32), (32, 48), (48, 64), (64, 70)]
    torch.testing.assert_close(after.logits, whole.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["bloom-own-attention", "lfm2-convolutions"])
@pytest.mark.filterwarnings("ignore")
def test_models_that_take_no_chunks_are_refused_by_name(name: str) -> None:
    loaded = tiny(name)
    with pytest.raises(ModelError, match=rf"{loaded.shape.architecture}: .* so its slices cannot be run in chunks"):
        all_ranks(loaded, prompt(20), (0, 20), chunk_tokens=8)


def test_chunks_need_less_than_half_and_what_they_need_grows_with_the_keys_alone() -> None:
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=144, intermediate_size=384, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=1,
    )  # fmt: skip
    footprint = footprint_of(config, torch.float32)
    assert footprint.takes_chunks and footprint.activation_bytes(100, 128) == footprint.activation_bytes(100)
    assert 0 < footprint.activation_bytes(2048, 128) < footprint.activation_bytes(2048) / 2
    longer = [footprint.activation_bytes(tokens, 128) for tokens in (1024, 1536, 2048)]
    assert longer[2] - longer[1] == pytest.approx(longer[1] - longer[0], abs=2)


def test_memory_decides_on_chunks_only_where_it_is_short() -> None:
    footprint = footprint_of(tiny("llama-gqa").model.config, torch.float32)
    partition = Partition((0, 3000, 5000))

    def chosen(asked: Any, free_bytes: int) -> int | None:
        def fits(chunk_tokens: int | None) -> bool:
            routes = relays(partition, 0, chunk_tokens)
            return max(footprint.slice_bytes(one) for one in routes) <= free_bytes

        return choose_chunks(asked, footprint, fits)

    needs = {size: max(map(footprint.slice_bytes, relays(partition, 0, size))) for size in (None, 2048, 512)}
    assert needs[None] > needs[2048] > needs[512]
    assert chosen("auto", needs[None]) is None
    assert chosen("auto", needs[None] - 1) == 2048
    assert chosen("auto", needs[512]) == 512
    assert chosen("auto", 1000) is None, "in no chunks: it is refused as ever"
    assert choose_chunks("auto", footprint, lambda size: size is not None) == 4096, "the longest that fits"
    assert chosen(700, needs[None]) == 700
    assert choose_chunks("auto", replace(footprint, takes_chunks=False), lambda size: bool(size)) is None


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.sampled_from([None, 1, 7, 16]))
def test_two_groups_cover_all_once(lengths: list[int], chunk_tokens: int | None) -> None:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    relay = Relay(Partition(tuple(bounds)), len(lengths) - 1, chunk_tokens=chunk_tokens)
    groups, tokens = in_two_groups(relay.received), relay.own[0]
    assert len(groups) <= 2
    assert [segment for group in groups for segment in group] == relay.received
    joined = [join_ranges([segment.bounds for segment in group]) for group in groups]
    ranges = sorted(each for group in joined for each in group)
    assert ranges[0][0] == 0 and ranges[-1][1] == tokens
    assert all(one[1] == other[0] for one, other in zip(ranges, ranges[1:], strict=False))
    assert len(groups) == 1 or 2 * sum(last - first for first, last in joined[0]) >= tokens
    # Of each group what is nearer than the rank it ends in, and some chunks of that one.
    assert len(ranges) <= (2 if chunk_tokens is None else 4)


@pytest.mark.parametrize(("chunk_tokens", "calls"), [(None, 2), (2, 4)])
def test_groups_change_no_logits(chunk_tokens: int | None, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, ids, asked = tiny("llama-gqa"), prompt(90), list[int]()
    truth = single(loaded, ids).logits
    monkeypatch.setattr(chain, "GROUPING", ("cpu",))
    attend = chain.attend

    def counted(query: torch.Tensor, keys: torch.Tensor, *args: object, **options: object) -> object:
        if threading.current_thread().name == "rank 4" and not options and query.shape[2] > 1:
            asked.append(keys.shape[2])
        return attend(query, keys, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(chain, "attend", counted)
    found = all_ranks(loaded, ids, (0, 20, 35, 50, 70, 90), chunk_tokens=chunk_tokens)[-1].logits
    assert found is not None and truth is not None
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-4)
    # In all layers but the last, the last rank's first tokens attend to the 70 before its own.
    assert len(asked) <= 2 * calls and sum(asked) == 2 * 70


def test_chunks_that_give_other_logits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_another_prompt(loaded: Any, ids: Any, *given: Any, **how: Any) -> Any:
        return prefill_kvr(loaded, [ids[0] + 1, *ids[1:]], *given, **how)

    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    check_chunks(loaded)
    monkeypatch.setattr(self_check, "prefill_kvr", of_another_prompt)
    with pytest.raises(ModelError, match="in chunks .* differ .* leave parallel.chunk_tokens out"):
        check_chunks(loaded)
