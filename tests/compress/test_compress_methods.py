"""Which tokens heads keep: every method's rule, against references that are written down plainly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi.compress.registry import FLOOR, adakv_counts, pyramidkv_weights, share_budget
from kvr_mpi.compress.scores import KERNEL, recency_scores, top_tokens, window_scores
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.model.attention_hook import AttentionParams

BUDGETS = st.tuples(*(st.integers(*bounds) for bounds in ((1, 60), (0, 60), (1, 6), (1, 5))))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_scores_are_the_mean_softmax_of_the_window(softcap: float | None, has_sinks: bool) -> None:
    torch.manual_seed(0)
    window, start, heads, kv_heads, kernel = 5, 20, 6, 2, KERNEL
    query, keys = torch.randn(1, heads, window, 8), torch.randn(1, kv_heads, start + window, 8)
    sinks = torch.randn(heads) if has_sinks else None
    found = window_scores(query, keys, AttentionParams(0.7, softcap, sinks), start=start)
    expected = torch.zeros(kv_heads, start + kernel - 1)  # two tokens on either side that are none
    for head in range(heads):
        for row in range(window):
            products = [float(query[0, head, row] @ keys[0, head // 3, at]) * 0.7 for at in range(start + row + 1)]
            scores = torch.tensor(products)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            expected[head // 3, kernel // 2 : start + kernel // 2] += torch.softmax(scores, 0)[:start] / (3 * window)
    pooled = sum(expected[:, at : at + start] for at in range(kernel)) / kernel
    torch.testing.assert_close(found, pooled, rtol=1e-5, atol=1e-7)


def test_the_best_tokens_are_kept_and_of_equals_the_first() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert [found.tolist() for found in top_tokens(scores, torch.tensor([2, 3]))] == [[1, 2], [0, 1, 2]]
    assert [found.tolist() for found in top_tokens(scores, torch.tensor([0, 1]))] == [[], [0]]
    (kept,) = top_tokens(recency_scores(100, 1, torch.device("cpu")), torch.tensor([10]))
    assert kept.tolist() == [0, 1, 2, 3, 94, 95, 96, 97, 98, 99], "streaming-llm: sinks and the most recent"


@given(BUDGETS, st.lists(st.floats(0, 1e6), min_size=30, max_size=30))
def test_shares_add_up_to_the_budget_and_no_head_outgrows_the_text(
    budget: tuple[int, int, int, int], weights: list[float]
) -> None:
    candidates, each, layers, heads = budget
    each, even = min(each, candidates), np.ones((layers, heads))
    pyramid = share_budget(even * pyramidkv_weights(each, candidates, layers, None), each, candidates)
    for counts in (share_budget(np.array(weights[: even.size]).reshape(even.shape), each, candidates), pyramid):
        assert counts.sum() == each * counts.size
        assert counts.min() >= 0 and counts.max() <= candidates
    assert (share_budget(even, each, candidates) == each).all()
    assert (np.diff(pyramid.mean(1)) <= 1).all(), "it falls from layer to layer, but for rounding"
    assert (pyramid.max(1) - pyramid.min(1)).max() <= 1, "heads of a layer alike"


@pytest.mark.parametrize(
    ("weights", "each", "candidates", "expected"),
    [
        ([[1, 2], [3, 4]], 100, 1000, [[40, 80], [120, 160]]),
        ([[0, 0], [1, 1]], 100, 130, [[70, 70], [130, 130]]),
        (pyramidkv_weights(400, 10_000, 5, None), 400, 10_000, [[780], [590], [400], [210], [20]]),
    ],
)
def test_shares_by_hand(weights: Any, each: int, candidates: int, expected: list[list[int]]) -> None:
    assert share_budget(np.array(weights), each, candidates).tolist() == expected


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 5))
def test_adakv_takes_the_best_of_the_layer_above_the_floor(candidates: int, each: int, heads: int) -> None:
    each = min(each, candidates)
    scores = torch.rand(heads, candidates, generator=torch.Generator().manual_seed(candidates))
    counts = adakv_counts(scores, each)
    assert int(counts.sum()) == heads * each
    assert int(counts.min()) >= int(FLOOR * each) and int(counts.max()) <= candidates
    kept, left = [], []
    for head, tokens in enumerate(top_tokens(scores, counts)):
        dropped = sorted(set(range(candidates)) - set(tokens.tolist()))
        beyond = scores[head, tokens].sort(descending=True).values[int(FLOOR * each) :]
        kept, left = kept + beyond.tolist(), left + scores[head, dropped].tolist()
    assert not kept or not left or min(kept) >= max(left), "beyond the floor no token is kept for a better one"


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(512, [(100, 100), (512, 512), (5000, 512)]), (0.25, [(60, 60), (100, 64), (400, 100), (401, 101)])],
)
def test_short_texts_are_kept_whole_and_the_window_always(budget: Any, expected: list[tuple[int, int]]) -> None:
    made = CompressSettings(method="snapkv", budget=budget)
    assert [(tokens, made.kept_of(tokens)) for tokens, _ in expected] == expected
