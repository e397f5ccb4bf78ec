"""Segments that are attended to in two groups."""

from __future__ import annotations

import threading

import pytest
import torch
from chains import single
from hypothesis import given
from hypothesis import strategies as st
from models import prompt, tiny

from kvr_mpi.kv import layer
from kvr_mpi.kv.route import in_two_groups
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.routes import relay
from kvr_mpi.transport.local import run_local


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
    prepare_model(loaded.model, chain=True)
    cut = Partition((0, 20, 35, 50, 70, 90))
    ranks = run_local(5, lambda rank: prefill_kvr(loaded, ids, cut, rank, chunk_tokens=chunk_tokens))
    found = ranks[-1].logits
    assert found is not None and truth is not None
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-4)
    # In all layers but the last, the last rank's first tokens attend to the 70 before its own.
    assert len(asked) <= 2 * calls and sum(asked) == 2 * 70
