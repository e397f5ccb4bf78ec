"""Keys and values that stay spread over ranks: the same tokens as on one, and no rank holds more than its share."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from chains import greedy, single
from models import prompt, tiny

from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.stored_shares import run_shares
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local

NEW_TOKENS = 16
MODELS = ("llama-gqa", "mistral-window", "gpt2", "gpt-oss-sinks", "gemma2-softcap", "llama4-chunks")


def spread(loaded: LoadedModel, ids: list[int], bounds: tuple[int, ...], count: int) -> list[Any]:
    """Prefill over threads, and decode the likeliest tokens on all of them: the share, tokens, logits of each rank."""

    @torch.inference_mode()
    def work(chain: Transport) -> Any:
        done = prefill_kvr(loaded, ids, Partition(bounds), chain, reserve_tokens=count, is_spread=True)
        assert done.cache is None and done.share is not None
        first = b"" if done.logits is None else str(int(done.logits.argmax())).encode()
        tokens, rows = [int(chain.broadcast(first, done.last))], []
        while len(tokens) < count:
            rows.append(run_shares(loaded, [done.share], [tokens[-1:]], chain)[0])
            done.share.length += 1
            tokens.append(int(rows[-1].argmax()))
        return done.share, tokens, rows

    return run_local(len(bounds) - 1, work)


@pytest.mark.parametrize("bounds", [(0, 90), (0, 61, 90), (0, 40, 41, 90), (0, 3, 50, 89, 90), (0, 5, 9, 12)])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_as_on_one_rank(name: str, bounds: tuple[int, ...]) -> None:
    """Windows, chunks, sinks, soft caps: whatever a layer sees, on whichever rank it is, and from when on not all."""
    loaded, ids = tiny(name), prompt(bounds[-1])
    expected = greedy(loaded.model, single(loaded, ids), NEW_TOKENS)
    prepare_model(loaded.model, chain=True)
    ranks = spread(loaded, ids, bounds, NEW_TOKENS)
    assert all(tokens == expected for _, tokens, _ in ranks)
    for _, _, rows in ranks[1:]:  # to the bit: they all go on from what they see
        assert all(torch.equal(one, other) for one, other in zip(rows, ranks[0][2], strict=True))


def test_no_rank_holds_more_than_its_share() -> None:
    """1 / p of the keys and values, and the room for new tokens: nothing else of them stays anywhere."""
    loaded, ids, bounds = tiny("llama-gqa"), prompt(240), (0, 60, 120, 180, 240)
    prepare_model(loaded.model, chain=True)
    spread(loaded, ids, bounds, 1)  # what is made once for all prompts is there from now on
    others = live_tensors()
    ranks = spread(loaded, ids, bounds, 1)
    each = loaded.shape.kv_bytes_per_token
    assert [share.bytes for share, *_ in ranks] == [60 * each] * 3 + [61 * each]
    known = {id(one) for one in others}
    made = [one.untyped_storage() for one in live_tensors() if id(one) not in known]
    assert sum({storage.data_ptr(): storage.nbytes() for storage in made}.values()) < 1.1 * 240 * each


def live_tensors() -> list[torch.Tensor]:
    """All of this process; what other tests left may be of any kind."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [one for one in gc.get_objects() if type(one) is torch.Tensor]


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "llama4-chunks"])
def test_several_new_tokens_see_each_other_and_all_before(name: str) -> None:
    """As a question does after a stored document."""
    loaded, ids = tiny(name), prompt(90)
    wanted = single(loaded, ids).logits
    prepare_model(loaded.model, chain=True)

    @torch.inference_mode()
    def work(chain: Transport) -> torch.Tensor:
        done = prefill_kvr(loaded, ids[:70], Partition((0, 30, 70)), chain, reserve_tokens=20, is_spread=True)
        assert done.share is not None
        return run_shares(loaded, [done.share], [ids[70:]], chain, only_last=True)[0]

    for logits in run_local(2, work):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
