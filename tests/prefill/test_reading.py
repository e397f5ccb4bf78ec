"""What ranks of a chain read of a prompt, pooled states and log-probabilities, is what one process computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from chains import ids_of
from models import tiny

from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill import reading as of_reading
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr, run_plain
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.prefill.reading import Reading
from kvr_mpi.transport.local import run_local

TOKENS, SCORED = 61, (3, 58)
CLOSE = 1e-5  # float32, of states around 1
KINDS = ("llama-gqa", "qwen2-some-windows", "gemma2-softcap", "lfm2-convolutions")
READINGS = {"last": Reading("last"), "mean": Reading("mean"), "scored": Reading(None, SCORED)}


def truth(loaded: LoadedModel, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """What plain transformers has: its last hidden states, and all logits at once."""
    prepare_model(loaded.model, chain=False)
    row = torch.tensor([ids])
    with torch.inference_mode():
        states = loaded.model.get_decoder()(input_ids=row).last_hidden_state[0].double()
        logprobs = torch.log_softmax(loaded.model(input_ids=row).logits[0].double(), -1)
    scored = torch.stack([logprobs[at - 1, ids[at]] for at in range(*SCORED)])
    return {"last": states[-1], "mean": states.mean(0), "scored": scored}


def read_on(loaded: LoadedModel, ids: Sequence[int], cut: Partition, reading: Reading, **how: Any) -> Prefill:
    found: list[Prefill] = run_local(
        cut.size, lambda rank: prefill_kvr(loaded, ids, cut, rank, reading=reading, spares_chain=True, **how)
    )
    assert [one.read is None for one in found].count(False) == 1 and all(one.logits is None for one in found)
    return next(one for one in found if one.read is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_that_of_one_process(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(of_reading.LOGITS, "cpu", 4 * 199)  # logits of four tokens at a time
    loaded, ids = tiny(kind), ids_of(TOKENS)
    expected = truth(loaded, ids)
    found: dict[str, tuple[str, Any]] = {
        f"{name}, plain": (name, run_plain(loaded, ids, one)[1]) for name, one in READINGS.items()
    }
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    for name, reading in READINGS.items():
        for cut in ((0, TOKENS), (0, 2, 3, TOKENS), (0, 9, 30, 58, TOKENS)):
            found[f"{name}, {cut}"] = name, read_on(loaded, ids, Partition(cut), reading).read
            passing = read_on(loaded, ids, Partition(cut), reading, keeps=False)
            found[f"{name}, {cut}, nothing is kept"] = name, passing.read
            assert passing.cache is None
        if loaded.attends_in_parts and not loaded.shape.has_states:
            halves = Partition((0, 20, TOKENS))
            found[f"{name}, chunks"] = name, read_on(loaded, ids, halves, reading, chunk_tokens=7, last=0).read
            others = [ids, ids[5:40]]
            packed, other = prefill_packed(loaded, others, readings=[reading, Reading(reading.pooling, (0, 35))])
            found[f"{name}, packed"] = name, packed.read
            alone = read_on(loaded, others[1], Partition((0, 35)), Reading(reading.pooling, (0, 35))).read
            torch.testing.assert_close(other.read, alone, atol=CLOSE, rtol=0)
    for what, (name, values) in found.items():
        torch.testing.assert_close(values, expected[name], atol=CLOSE, rtol=1e-5, msg=lambda why: f"{what}: {why}")  # noqa: B023


def test_no_logits_are_computed_for_an_embedding_and_never_those_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, ids, rows = tiny("llama-gqa"), ids_of(TOKENS), list[int]()
    monkeypatch.setitem(of_reading.LOGITS, "cpu", 4 * 199)
    prepare_model(loaded.model, chain=True)
    hook = loaded.model.lm_head.register_forward_hook(lambda head, given, made: rows.append(made.shape[1]))
    try:
        for name in ("last", "mean"):
            read_on(loaded, ids, Partition((0, 20, TOKENS)), READINGS[name])
        assert not rows
        read_on(loaded, ids, Partition((0, 20, TOKENS)), Reading(None, (0, TOKENS)))
        assert max(rows) == 4 and sum(rows) == TOKENS - 1
    finally:
        hook.remove()
