"""Segments that are attended to in two groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from chains import chain, single
from hypothesis import given
from hypothesis import strategies as st
from models import prompt, tiny

from kvr_mpi.prefill import relay
from kvr_mpi.prefill.relay import in_two_groups


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_two_groups_cover_all_once(lengths: list[int]) -> None:
    tokens, arrivals, taken = sum(lengths), [], 0
    for length in lengths:  # the nearest first
        arrivals.append((tokens - taken - length, tokens - taken))
        taken += length

    come: list[tuple[int, int]] = []

    def comes() -> Iterator[tuple[int, int]]:
        for each in arrivals:
            come.append(each)
            yield each

    groups = []
    for group in in_two_groups(comes(), tokens):
        assert come[-1][0] == group[0], "as soon as all of it is here"
        groups.append(group)
    assert len(groups) <= 2 and groups[0][1] == tokens and groups[-1][0] == 0
    assert all(near[0] == far[1] for near, far in zip(groups, groups[1:], strict=False))
    assert len(groups) == 1 or 2 * (tokens - groups[0][0]) >= tokens


def test_what_is_not_next_to_each_other_is_not_joined() -> None:
    assert list(in_two_groups([(80, 100), (30, 60), (0, 30)], 80)) == [(80, 100), (30, 60), (0, 30)]
    assert list(in_two_groups([], 0)) == []


def test_groups_change_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, ids, asked = tiny("llama-gqa"), prompt(90), list[int]()
    truth = single(loaded, ids).logits
    monkeypatch.setattr(relay, "GROUPING", ("cpu",))
    attend = relay.attend

    def counted(query: torch.Tensor, keys: torch.Tensor, *args: object, **options: object) -> object:
        asked.append(keys.shape[2])
        return attend(query, keys, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(relay, "attend", counted)
    found = chain(loaded, ids, [0, 20, 35, 50, 70, 90]).logits
    assert found is not None and truth is not None
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-4)
    # In all layers but the last: the last rank to 70 tokens before its own in two calls, the third to 35 in one.
    assert asked.count(35) == 2 * (2 + 1)
