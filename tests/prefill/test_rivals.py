"""TSP and ring are exact too: a baseline that computes something else would prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from chains import NEW_TOKENS, chain, greedy, rival, single
from models import prompt, tiny

from kvr_mpi.kv.contents import layer_kv
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.prefill.routes import ring
from kvr_mpi.transport.local import run_local

RIVALS: dict[str, Callable[..., Prefill]] = {
    "tsp-dense": partial(rival, "tsp-dense"),
    "tsp-causal": partial(rival, "tsp-causal"),
    "ring": partial(rival, "ring"),
    "tsp-causal with our cut": partial(rival, "tsp-causal", lends=True),
    "ring with our cut": partial(rival, "ring", lends=True),
}


# A length that the ranks divide, and two that they do not.
@pytest.mark.parametrize(("size", "tokens"), [(2, 61), (3, 60), pytest.param(4, 67, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RIVALS)
def test_rivals_equal_one_process(name: str, size: int, tokens: int) -> None:
    # Soft-caps and sinks where that is new: twice.
    more = ("gemma2-softcap", "gpt-oss-sinks") if (size, tokens) in ((2, 61), (4, 67)) else ()
    for model in ("llama-gqa", "mistral-window", "falcon-mqa", "gpt2", *more):
        loaded, ids = tiny(model), prompt(tokens)
        truth = single(loaded, ids)
        assert truth.logits is not None
        logits, answer = truth.logits, greedy(loaded.model, truth, NEW_TOKENS)
        whole = chain(loaded, ids, (0, tokens))
        prepare_model(loaded.model, chain=True)
        ranks = run_local(size, lambda rank: RIVALS[name](loaded, ids, rank, reserve_tokens=NEW_TOKENS))  # noqa: B023
        (found,) = (rank for rank in ranks if rank.logits is not None)
        torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=0)
        for layer in range(3):
            mine, theirs = layer_kv(found.cache, layer), layer_kv(whole.cache, layer)
            assert mine is not None and theirs is not None
            torch.testing.assert_close(mine[0][:tokens], theirs[0], atol=1e-4, rtol=0)
            torch.testing.assert_close(mine[1][:tokens], theirs[1], atol=1e-4, rtol=0)
        assert greedy(loaded.model, found, NEW_TOKENS) == answer


def test_what_crosses_the_links() -> None:
    """KVR sends a segment once over every link after it; a ring and an all-gather send all to all but one."""
    loaded, tokens, size = tiny("llama-gqa"), 64, 4
    ids, row = prompt(tokens), loaded.shape.kv_bytes_per_token
    prepare_model(loaded.model, chain=True)
    for run in RIVALS.values():
        sent = [rank.sent_bytes for rank in run_local(size, lambda rank: run(loaded, ids, rank))]  # noqa: B023
        assert sum(sent) == (size - 1) * tokens * row
    partition = Partition((0, 20, 40, 50, 64))
    sent = [rank.sent_bytes for rank in run_local(size, lambda rank: prefill_kvr(loaded, ids, partition, rank))]
    assert sent == [20 * row, 40 * row, 50 * row, 0]


def test_every_stretch_of_a_ring_has_one_owner() -> None:
    for size in range(1, 6):
        partition = Partition.even(97, 2 * size)
        owned = sorted(bounds for rank in range(size) for bounds in ring(partition, rank).owned)
        assert owned == sorted((partition.start(i), partition.stop(i)) for i in range(2 * size))
        assert ring(partition, 0).owned[-1][1] == 97
