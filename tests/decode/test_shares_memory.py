"""Memory that runs out on one of the ranks that hold prompts together: one document fails on all, the rest goes on."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from chains import greedy, single
from made_documents import questions_after, store_rows
from models import prompt, tiny
from rows import batch_of, count_down, finish, ready, run_out_at, tokens_of

from kvr_mpi.decode.batch import Finished
from kvr_mpi.decode.token_parallel import TokenGroup
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.prefill.stored_shares import prefill_stored
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local

NEW_TOKENS = 10
LENGTHS = (90, 60, 75)
# Where a rank's memory runs out: before a layer's attention, in it (before the ranks tell each other), after it, last.
PLACES = ("layers.0", "layers.1.self_attn.o_proj", "layers.1.mlp", "lm_head")


Answers = dict[int, Finished[int]]


def decode(loaded: LoadedModel, run: threading.local, chain: Transport) -> Answers:
    """Answer prompts of all `LENGTHS` together on a rank."""
    run.rank = -1  # nothing fails while prompts are prefilled
    batch = batch_of(loaded, NEW_TOKENS, TokenGroup(loaded, chain))
    for number, tokens in enumerate(LENGTHS):
        ids, last = prompt(tokens), number % chain.size
        partition = Partition.even(tokens, chain.size)
        done = prefill_kvr(loaded, ids, partition, chain, reserve_tokens=NEW_TOKENS, is_spread=True, last=last)
        batch.add(tokens, done, ids, 0)
    run.rank = chain.rank
    return finish(batch)


def of_all(ranks: list[Answers]) -> Answers:
    """Put together what ranks have handed out: each prompt once, by its home."""
    found = {tokens: one for rank in ranks for tokens, one in rank.items()}
    assert len(found) == sum(map(len, ranks)) == len(LENGTHS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_a_row_that_is_too_much_is_run_in_halves(name: str, place: str) -> None:
    """Every answer is that of one rank; the random numbers and the grammar of none are moved on by what failed."""
    loaded = ready(name)
    truths = {tokens: greedy(loaded.model, single(loaded, prompt(tokens)), NEW_TOKENS) for tokens in LENGTHS}
    ready(name)
    left = {1: 2, 2: 1}  # times that a rank fails
    hook, run = run_out_at(loaded, place, count_down(left))
    found = of_all(run_local(3, lambda chain: decode(loaded, run, chain)))
    assert {tokens: list(ids) for tokens, ids in tokens_of(found).items()} == truths
    hook.remove()
    assert all(count < 0 for count in left.values())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_document_without_memory_is_an_error_on_all_ranks(rank: int) -> None:
    """Its chain goes on with the others."""
    loaded = ready("llama-gqa")
    truths = {tokens: greedy(loaded.model, single(loaded, prompt(tokens)), NEW_TOKENS) for tokens in LENGTHS}
    ready("llama-gqa")
    run = threading.local()

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if run.rank == rank and 63 in kwargs["position_ids"]:  # of the prompt of 60 tokens
            raise torch.OutOfMemoryError("CUDA out of memory (on purpose)")

    layer = next(module for name, module in loaded.model.named_modules() if name.endswith("layers.1"))
    hook = layer.register_forward_pre_hook(fail, with_kwargs=True)
    found = of_all(run_local(3, lambda chain: decode(loaded, run, chain)))
    bad = found.pop(60)
    assert bad.answer is None and bad.prefill.share is None
    assert f"rank {rank} of its chain ran out of memory" in str(bad.error)
    del truths[60]
    assert {tokens: list(ids) for tokens, ids in tokens_of(found).items()} == truths
    hook.remove()


@pytest.mark.parametrize("place", PLACES)
def test_questions_without_memory_are_run_in_halves_or_are_errors_on_all_ranks(place: str) -> None:
    """And the next ones are answered, by what was read of the document before."""
    loaded = tiny("llama-gqa")
    ids = questions_after(prompt(70), [20, 9, 4])
    wholes = [single(loaded, each).logits for each in ids]
    stored = store_rows(loaded, 70)
    left = {1: 3}  # times that a rank fails: with three prompts, with the first of them alone, and with two
    hook, run = run_out_at(loaded, place, count_down(left))

    def work(chain: Transport) -> list[Prefill]:
        run.rank = chain.rank
        document = stored.open_on(chain, 30)
        return prefill_stored(loaded, ids, document, chain, reserve_tokens=[1, 1, 1], last=chain.size - 1)

    ranks = run_local(3, work)
    hook.remove()
    assert sorted((rank, layer) for rank, layer, *_ in stored.reads) == [(at // 3, at % 3) for at in range(9)]
    for failed, *answered in ranks:
        assert failed.share is None and "rank 1 of its chain ran out of memory" in str(failed.error)
        assert all(one.error is None and one.share is not None for one in answered)
    for prefill, whole in zip(ranks[-1][1:], wholes[1:], strict=True):
        torch.testing.assert_close(prefill.logits, whole, rtol=1e-4, atol=1e-4)


def test_a_layer_that_there_was_no_memory_to_read_is_read_again() -> None:
    """Its document is not given up for that."""
    loaded = tiny("llama-gqa")
    stored = store_rows(loaded, 70)
    (ids,) = questions_after(stored.ids, [20])
    due = {1}

    def work(chain: Transport) -> list[Prefill]:
        document = stored.open_on(chain, 30)
        read = document.prefix.read
        assert read is not None

        def run_out(number: int, first: int, last: int) -> torch.Tensor | None:
            if number == 1 and chain.rank in due:
                due.discard(chain.rank)
                raise MemoryError("no room for a layer")
            return read(number, first, last)

        document.prefix = replace(document.prefix, read=run_out)
        options: dict[str, Any] = {"reserve_tokens": [1], "last": 1}
        return [prefill_stored(loaded, [ids], document, chain, **options)[0] for _ in range(2)]

    for failed, answered in run_local(2, work):
        assert "rank 1 of its chain ran out of memory" in str(failed.error)
        assert answered.error is None and answered.share is not None
