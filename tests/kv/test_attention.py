from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvr_mpi.kv import attention
from kvr_mpi.kv.attention import AttentionParams, PartialAttention, attend, attend_window

pytestmark = pytest.mark.quick


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    seen: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention as in the text book, in float64."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.double().repeat_interleave(group, dim=1) for tensor in (keys, values))
    score = query.double() @ keys.transpose(-1, -2) * params.scale
    if params.softcap is not None:
        score = torch.tanh(score / params.softcap) * params.softcap
    if seen is not None:
        score = score.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        score = torch.cat([score, sinks.double().view(1, -1, 1, 1).expand(*score.shape[:3], 1)], dim=-1)
        return score.softmax(-1)[..., :-1] @ values
    return score.softmax(-1) @ values


def tensors(
    heads: int, kv_heads: int, queries: int, keys: int, dim: int, value_dim: int | None = None
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim or dim))
    return tuple(torch.randn(1, *shape, generator=generator) for shape in shapes)


@settings(max_examples=40)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    queries=st.integers(1, 40),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    softcap=st.sampled_from([None, 5.0]),
    value_dim=st.sampled_from([16, 24]),
)
def test_parts_merge_to_the_whole(
    kv_heads: int, group: int, queries: int, cuts: list[int], softcap: float | None, value_dim: int
) -> None:
    query, keys, values = tensors(kv_heads * group, kv_heads, queries, sum(cuts), 16, value_dim)
    params = AttentionParams(0.25, softcap)
    part: PartialAttention | None = None
    at = 0
    for cut in cuts:
        piece = attend(query, keys[:, :, at : at + cut], values[:, :, at : at + cut], params)
        part = piece if part is None else part.merge(piece)
        at += cut
    assert part is not None
    torch.testing.assert_close(part.out.double(), reference(query, keys, values, params), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("queries", [1, 2, 33])
def test_causal_sees_nothing_behind_the_query(queries: int, softcap: float | None) -> None:
    query, keys, values = tensors(6, 2, queries, queries, 16)
    params = AttentionParams(0.25, softcap)
    seen = torch.ones(queries, queries, dtype=torch.bool).tril()
    found = attend(query, keys, values, params, causal=True).out
    torch.testing.assert_close(found.double(), reference(query, keys, values, params, seen), atol=2e-6, rtol=1e-5)


@settings(max_examples=30)
@given(queries=st.integers(1, 40), before=st.integers(0, 40), window=st.integers(1, 50))
def test_window(queries: int, before: int, window: int) -> None:
    query, keys, values = tensors(4, 2, queries, before + queries, 16)
    after = torch.arange(queries)[:, None] + before - torch.arange(before + queries)
    expected = reference(query, keys, values, AttentionParams(0.25), (after >= 0) & (after < window))
    found = attend_window(query, keys, values, AttentionParams(0.25), window).out
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


def test_sinks_take_their_share() -> None:
    query, keys, values = tensors(4, 2, 9, 20, 16)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 30.0])
    expected = reference(query, keys, values, AttentionParams(0.25), sinks=sinks)
    params = AttentionParams(0.25, sinks=sinks)
    found = attend(query, keys, values, params).finish(params)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


def test_small_score_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values = tensors(4, 2, 50, 70, 16)
    whole = attend(query, keys, values, AttentionParams(0.25, 5.0))
    monkeypatch.setattr(attention, "MAX_SCORES", 4 * 70 * 7)
    blocks = attend(query, keys, values, AttentionParams(0.25, 5.0))
    torch.testing.assert_close(whole.out, blocks.out)
    torch.testing.assert_close(whole.lse, blocks.lse)


def test_far_scores_do_not_overflow() -> None:
    query, keys, values = tensors(2, 2, 3, 8, 16)
    near, far = (
        attend(query, keys, values, AttentionParams(0.25)),
        attend(query * 400, keys, values, AttentionParams(0.25)),
    )
    merged = near.merge(far)
    assert torch.isfinite(merged.out).all()
    assert torch.isfinite(merged.lse).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_in_the_models_dtype_lose_little(dtype: torch.dtype) -> None:
    """Outputs come as kernels give them and are merged in float32: as near to float64 as one pass over all keys."""
    query, keys, values = (each.to(dtype) for each in tensors(6, 2, 40, 1024, 64))
    params = AttentionParams(0.25)
    truth = reference(query, keys, values, params)

    def error(out: torch.Tensor) -> float:
        return float((out.double() - truth).abs().max())

    whole = attend(query, keys, values, params)
    cuts = [slice(at, at + 128) for at in range(0, 1024, 128)]
    parts = [attend(query, keys[:, :, cut], values[:, :, cut], params) for cut in cuts]
    merged, rounded = parts[0], parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
        wide = rounded.merge(part)
        rounded = PartialAttention(wide.out.to(dtype), wide.lse)
    assert whole.out.dtype == parts[0].out.dtype == dtype
    assert merged.out.dtype == merged.lse.dtype == parts[0].lse.dtype == torch.float32
    assert error(merged.out) <= 1.5 * error(whole.out)
    assert error(merged.out) < error(rounded.out), "rounding at every merge would show"
    after = parts[0]
    for part in parts[1:]:
        after = after.merge_after(10, PartialAttention(part.out[:, :, 10:], part.lse[:, :, 10:]))
    torch.testing.assert_close(after.out[:, :, 10:], merged.out[:, :, 10:])
    assert torch.equal(after.out[:, :, :10], parts[0].out[:, :, :10].float()), "the queries before are as they were"
    assert torch.equal(parts[0].merge_after(0, parts[1]).out, parts[0].merge(parts[1]).out)
