from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvr_mpi.kv import attention
from kvr_mpi.kv.attention import AttentionParams, PartialAttention, attend

pytestmark = pytest.mark.quick


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention as in the text book, in float64."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.double().repeat_interleave(group, dim=1) for tensor in (keys, values))
    score = query.double() @ keys.transpose(-1, -2) * params.scale
    if params.softcap is not None:
        score = torch.tanh(score / params.softcap) * params.softcap
    if seen is not None:
        score = score.masked_fill(~seen, float("-inf"))
    if params.sinks is not None:
        score = torch.cat([score, params.sinks.double().view(1, -1, 1, 1).expand(*score.shape[:3], 1)], dim=-1)
    return score.softmax(-1)[..., : keys.shape[2]] @ values


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


@settings(max_examples=60)
@given(
    queries=st.integers(1, 40),
    before=st.integers(0, 40),
    window=st.one_of(st.none(), st.integers(1, 50)),
    softcap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
    most_scores=st.sampled_from([1, 4 * 70 * 7, attention.MAX_SCORES]),
)
def test_a_query_sees_its_window_and_nothing_behind_itself(
    queries: int, before: int, window: int | None, softcap: float | None, has_sinks: bool, most_scores: int
) -> None:
    """In blocks of any size; sinks take their share."""
    before = 0 if window is None else before
    query, keys, values = tensors(4, 2, queries, before + queries, 16)
    params = AttentionParams(0.25, softcap, sinks=torch.tensor([-1.0, 0.0, 2.0, 30.0]) if has_sinks else None)
    after = torch.arange(queries)[:, None] + before - torch.arange(before + queries)
    expected = reference(query, keys, values, params, (after >= 0) & (after < (window or queries)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_SCORES", most_scores)
        found = attend(query, keys, values, params, causal=True, window=window)
    torch.testing.assert_close(found.finish(params).double(), expected, atol=2e-6, rtol=1e-5)


def test_far_scores_do_not_overflow() -> None:
    query, keys, values = tensors(2, 2, 3, 8, 16)
    near, far = (attend(each, keys, values, AttentionParams(0.25)) for each in (query, query * 400))
    merged = near.merge(far)
    assert torch.isfinite(merged.out).all() and torch.isfinite(merged.lse).all()


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
