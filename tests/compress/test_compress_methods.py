"""Which tokens heads keep: every method's rule, against references that are written down plainly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi.compress.budget import Budget
from kvr_mpi.compress.head_profile import HeadProfile
from kvr_mpi.compress.registry import FLOOR, METHODS, adakv_counts, headkv_counts, pyramidkv_counts
from kvr_mpi.compress.scores import KERNEL, recency_scores, top_tokens, window_scores
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.model.attention_hook import AttentionParams

SIZES = st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(1, 6), st.integers(1, 5))


def budget_of(sizes: tuple[int, int, int, int]) -> Budget:
    candidates, each, layers, heads = sizes
    return Budget(min(each, candidates), candidates, layers, heads)


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


def test_streaming_llm_keeps_sinks_and_the_most_recent() -> None:
    (kept,) = top_tokens(recency_scores(100, 1, torch.device("cpu")), torch.tensor([10]))
    assert kept.tolist() == [0, 1, 2, 3, 94, 95, 96, 97, 98, 99]


@given(SIZES, st.lists(st.floats(0, 1e6), min_size=30, max_size=30))
def test_shares_add_up_to_the_budget_and_no_head_outgrows_the_text(
    sizes: tuple[int, int, int, int], weights: list[float]
) -> None:
    budget = budget_of(sizes)
    counts = budget.by_weight(np.array(weights[: budget.layers * budget.kv_heads]).reshape(budget.layers, -1))
    assert counts.sum() == budget.each * counts.size == budget.evenly().sum()
    assert counts.min() >= 0 and counts.max() <= budget.candidates


def test_shares_are_in_proportion_where_all_have_room() -> None:
    counts = Budget(100, 1000, 2, 2).by_weight(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert counts.tolist() == [[40, 80], [120, 160]]
    assert Budget(100, 130, 2, 2).by_weight(np.array([[0.0, 0.0], [1.0, 1.0]])).tolist() == [[70, 70], [130, 130]]


@given(SIZES)
def test_pyramidkv_falls_from_layer_to_layer_and_keeps_the_mean(sizes: tuple[int, int, int, int]) -> None:
    budget = budget_of(sizes)
    counts = pyramidkv_counts(budget, 0, None)
    assert counts.sum() == budget.evenly().sum() and counts.max() <= budget.candidates
    means = counts.mean(1)
    assert (np.diff(means) <= 1).all(), "but for rounding"
    assert (counts.max(1) - counts.min(1)).max() <= 1, "heads of a layer alike"


def test_pyramidkvs_last_layer_has_its_share() -> None:
    counts = pyramidkv_counts(Budget(400, 10_000, 5, 2), 0, None)
    assert counts[:, 0].tolist() == [780, 590, 400, 210, 20]


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


def test_headkvs_shares_are_the_profiles_beyond_the_window() -> None:
    profile = HeadProfile(np.array([[64.0, 164.0], [264.0, 64.0]]), "made up")
    assert headkv_counts(Budget(75, 1000, 2, 2), 64, profile).tolist() == [[0, 100], [200, 0]]


def test_every_method_names_its_paper_and_reads_known_settings() -> None:
    for name, method in METHODS.items():
        assert method.name == name and method.paper.startswith("arXiv:")
        assert set(method.reads) <= set(CompressSettings.model_fields)


@pytest.mark.parametrize(
    "given_settings, expected",
    [
        ({"budget": 512}, [(100, 100), (512, 512), (5000, 512)]),
        ({"budget": 0.25}, [(60, 60), (100, 64), (400, 100), (401, 101)]),
    ],
)
def test_short_texts_are_kept_whole_and_the_window_always(
    given_settings: dict[str, float], expected: list[tuple[int, int]]
) -> None:
    settings_ = CompressSettings(method="snapkv", **given_settings)  # type: ignore[arg-type]
    assert [(tokens, settings_.kept_of(tokens)) for tokens, _ in expected] == expected
