"""Ranks that are about to compute different things end the job: no answer is stored under another document's name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import prompt, tiny

from kvr_mpi.errors import EXIT_BUG, EXIT_CONFIG, AgreementError
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import digest_of
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.runtime.plan import Plan
from kvr_mpi.runtime.prompt import Prompt
from kvr_mpi.transport import FailedTogetherError, Transport, check_alike
from kvr_mpi.transport.local import run_local

TOKENS = 48


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_with_another_prompt_of_the_same_length_is_found(rank: int) -> None:
    loaded, ids = tiny("llama-gqa"), prompt(TOKENS)
    prepare_model(loaded.model, chain=True)

    def prefill(chain: Transport) -> str:
        mine = [*ids[:-20], (ids[-20] + 1) % 50, *ids[-19:]] if chain.rank == rank else ids
        options: Any = {"spares_chain": True, "last": 2}
        try:
            prefill_kvr(loaded, mine, Partition.even(TOKENS, chain.size), chain, **options)
        except AgreementError as error:
            return str(error)
        return ""

    messages = run_local(3, prefill)
    assert messages[:2] == ["", ""] and "has computed another prompt" in messages[2]
    assert all(f"rank {named}" in messages[2] for named in ({0, 1, 2} & {rank, 2} if rank != 2 else {2}))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.lists(st.integers(0, 100)), st.data())
def test_a_digest_depends_on_every_id_and_on_the_slices(ids: list[int], bounds: list[int], data: st.DataObject) -> None:
    digest = digest_of(ids, bounds)
    assert 0 <= digest < 2**63 and digest == digest_of(tuple(ids), tuple(bounds))
    at = data.draw(st.integers(0, len(ids) - 1))
    assert digest_of([*ids[:at], ids[at] ^ 1, *ids[at + 1 :]], bounds) != digest
    assert digest_of(ids, [*bounds, 1]) != digest
    assert torch.full((1,), digest, dtype=torch.int64).item() == digest, "it travels as 64-bit integer"


def test_ranks_that_loaded_different_things_end_together() -> None:
    def compare(world: Transport) -> str:
        with pytest.raises(FailedTogetherError) as caught:
            check_alike(world, {"the tokenizer": "a" if world.rank != 2 else "b", "software": "1"})
        assert caught.value.exit_code == EXIT_CONFIG
        return str(caught.value)

    found = run_local(4, compare)
    assert all(word in found[0] for word in ("the tokenizer", "'b' on rank 2", "'a' on rank 0"))


def change_prompt(plain: Any, ids: bytes, receive: Any = Prompt.from_wire) -> Prompt:
    found: Prompt = receive(plain, ids)
    return dataclasses.replace(found, ids=(*found.ids[:-1], found.ids[-1] ^ 1))


@pytest.mark.parametrize(
    "change",
    [
        {"ids_sha256": "0" * 64},  # the leader sends the hash of other ids
        {"key": "of another"},  # or the plan of another prompt
        None,  # or the prompt arrives with another id in it
    ],
)
def test_a_plan_of_another_prompt_ends_the_job(
    job: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, str] | None
) -> None:
    whole = Plan.to_wire
    if change is None:
        monkeypatch.setattr(Prompt, "from_wire", change_prompt)
    else:
        monkeypatch.setattr(Plan, "to_wire", lambda plan: whole(plan) | change)
    run = run_here(2, [job])
    assert run.returncode and f"exit code {EXIT_BUG}" in run.stderr and "received the plan of prompt" in run.stderr
    assert "Traceback" not in run.stderr
