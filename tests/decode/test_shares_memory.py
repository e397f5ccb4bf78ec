"""Memory that runs out on one of the ranks that hold prompts together: one document fails on all, the rest goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from chains import greedy, single
from models import prompt, tiny
from transformers import GenerationConfig

from kvr_mpi.decode.batch import Finished
from kvr_mpi.decode.shares_batch import SharesBatch
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.stored_shares import prefill_stored, share_out_stored
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local

NEW_TOKENS = 10
LENGTHS = (90, 60, 75)
# Where a rank's memory runs out: before a layer's attention, in it (before the ranks tell each other), after it, last.
PLACES = ("layers.0", "layers.1.self_attn.o_proj", "layers.1.mlp", "lm_head")


class Numbers:
    """A tokenizer whose texts are numbers."""

    def decode(self, ids: Any, **options: Any) -> str:
        return " ".join(map(str, ids))


def run_out_at(loaded: LoadedModel, place: str, is_due: Callable[[int], bool]) -> tuple[Any, threading.local]:
    """Let a module fail on the ranks, and in the runs of them, that are asked for; returns its hook, and who runs."""
    run = threading.local()

    def fail(module: Any, *args: Any) -> None:
        if is_due(run.rank):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    module = next(module for name, module in loaded.model.named_modules() if name.endswith(place))
    return module.register_forward_pre_hook(fail), run


def decode(loaded: LoadedModel, run: threading.local, chain: Transport) -> dict[int, Finished[int]]:
    """Answer prompts of all `LENGTHS` together on a rank."""
    run.rank = -1  # nothing fails while prompts are prefilled
    config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    batch = SharesBatch[int](loaded, config, stop=(), max_new_tokens=NEW_TOKENS, chain=chain)
    for number, tokens in enumerate(LENGTHS):
        ids, last = prompt(tokens), number % chain.size
        partition = Partition.even(tokens, chain.size)
        done = prefill_kvr(loaded, ids, partition, chain, reserve_tokens=NEW_TOKENS, is_spread=True, last=last)
        batch.add(tokens, done, ids, 0)
    run.rank, found, steps = chain.rank, dict[int, Finished[int]](), 0
    while batch.running:
        assert (steps := steps + 1) < 100, "it never ends"
        found |= {one.key: one for one in batch.step()}
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_a_row_that_is_too_much_is_run_in_halves(name: str, place: str) -> None:
    """Every answer is that of one rank; the random numbers and the grammar of none are moved on by what failed."""
    loaded = replace(tiny(name), tokenizer=Numbers())
    truths = {tokens: greedy(loaded.model, single(loaded, prompt(tokens)), NEW_TOKENS) for tokens in LENGTHS}
    prepare_model(loaded.model, chain=True)
    left = {1: 2, 2: 1}  # times that a rank fails

    def is_due(rank: int) -> bool:
        left[rank] = left.get(rank, 0) - 1
        return left[rank] >= 0

    hook, run = run_out_at(loaded, place, is_due)
    for found in run_local(3, lambda chain: decode(loaded, run, chain)):
        assert {tokens: list(one.answer.token_ids) for tokens, one in found.items()} == truths
    hook.remove()
    assert all(count < 0 for count in left.values())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_document_without_memory_is_an_error_on_all_ranks(rank: int) -> None:
    """Its chain goes on with the others."""
    loaded = replace(tiny("llama-gqa"), tokenizer=Numbers())
    truths = {tokens: greedy(loaded.model, single(loaded, prompt(tokens)), NEW_TOKENS) for tokens in LENGTHS}
    prepare_model(loaded.model, chain=True)
    run = threading.local()

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if run.rank == rank and 63 in kwargs["position_ids"]:  # of the prompt of 60 tokens
            raise torch.OutOfMemoryError("CUDA out of memory (on purpose)")

    layer = next(module for name, module in loaded.model.named_modules() if name.endswith("layers.1"))
    hook = layer.register_forward_pre_hook(fail, with_kwargs=True)
    for found in run_local(3, lambda chain: decode(loaded, run, chain)):
        bad = found.pop(60)
        assert bad.answer is None and bad.prefill.share is None
        assert f"rank {rank} of its chain ran out of memory" in str(bad.error)
        assert {tokens: list(one.answer.token_ids) for tokens, one in found.items()} == {
            tokens: truth for tokens, truth in truths.items() if tokens != 60
        }
    hook.remove()


@pytest.mark.parametrize("place", PLACES)
def test_a_question_without_memory_is_an_error_on_all_ranks(place: str) -> None:
    """And the next one is answered."""
    loaded, ids = tiny("llama-gqa"), prompt(90)
    whole = single(loaded, ids)
    prepare_model(loaded.model, chain=True)
    layers = [
        torch.cat([each[0].transpose(0, 1).flatten(1) for each in (layer.keys, layer.values)], 1)
        for layer in whole.cache.layers
    ]
    due = {1}

    def is_due(rank: int) -> bool:
        is_now = rank in due
        due.discard(rank)
        return is_now

    hook, run = run_out_at(loaded, place, is_due)

    def work(chain: Transport) -> list[Any]:
        run.rank = chain.rank
        prefix = SharedPrefix(tuple(ids[:70]), (), read=lambda number, first, last: layers[number][first:last])
        partition = share_out_stored(70, 90, chain.size)
        last = chain.size - 1
        return [prefill_stored(loaded, ids, prefix, partition, chain, reserve_tokens=1, last=last) for _ in range(2)]

    ranks = run_local(3, work)
    hook.remove()
    for failed, answered in ranks:
        assert failed.share is None and "rank 1 of its chain ran out of memory" in str(failed.error)
        assert answered.error is None and answered.share is not None
    torch.testing.assert_close(ranks[-1][1].logits, whole.logits, rtol=1e-4, atol=1e-4)
