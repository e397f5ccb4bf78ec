"""What FlexAttention is told, on CPUs, where it makes all scores at once, and gives its log-sum-exp, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torchs

from kvr_mpi.kv import attention, flex
from kvr_mpi.kv.attention import AttentionParams, attend, why_no_flex
from kvr_mpi.kv.flex import BLOCK, NotCompiledError, attend_flex, visible_blocks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither compiled nor traced."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    yield
    why_no_flex.cache_clear()


def tensors(heads: int, kv_heads: int, queries: int, keys: int, dims: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = ((heads, queries, dims[0]), (kv_heads, keys, dims[0]), (kv_heads, keys, dims[1]))
    return tuple(torch.randn(1, *shape, generator=draw) for shape in shapes)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("queries", "keys", "offset", "window"),
    [(33, 70, None, None), (130, 130, 0, None), (40, 300, 260, None), (40, 300, 260, 150), (200, 200, 0, 3)],
)
@pytest.mark.parametrize("dims", [(16, 16), (24, 40)])
def test_it_gives_what_the_portable_way_gives(
    queries: int, keys: int, offset: int | None, window: int | None, softcap: float | None, dims: tuple[int, int]
) -> None:
    given = tensors(6, 2, queries, keys, dims)
    out, lse = attend_flex(*given, scale=0.3, softcap=softcap, offset=offset, window=window)
    truth = attention._attend_blocks(*given, AttentionParams(0.3, softcap), offset=offset, window=window)
    torch.testing.assert_close(out, truth.out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, truth.lse, atol=2e-6, rtol=1e-5)


@settings(max_examples=60)
@given(
    queries=st.integers(1, 3 * BLOCK),
    before=st.integers(0, 4 * BLOCK),
    window=st.one_of(st.none(), st.integers(1, 5 * BLOCK)),
)
def test_blocks_are_those_of_the_mask(queries: int, before: int, window: int | None) -> None:
    """Whole ones are seen whole, others in part; together all that is seen, and no block of which nothing is."""
    keys = before + queries
    blocks = visible_blocks(queries, keys, before, window, CPU)
    after = torch.arange(queries)[:, None] + before - torch.arange(keys)
    seen = (after >= 0) & (after < (window or keys))
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    kinds = [listed(blocks.kv_num_blocks, blocks.kv_indices), listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)]
    for row in range(rows):
        for column in range(columns):
            part = seen[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            whole = bool(part.all()) and part.shape[1] == BLOCK
            found = [column in kind[row] for kind in kinds]
            assert found == [bool(part.any()) and not whole, whole], (row, column)
    assert torch.equal(blocks.mask_mod(0, 0, torch.arange(queries)[:, None], torch.arange(keys)[None]), seen)


def listed(counts: torch.Tensor, indices: torch.Tensor) -> list[set[int]]:
    """Blocks of keys of each block of queries."""
    assert counts.dtype == indices.dtype == torch.int32
    rows = zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
    return [set(numbers[:count]) for count, numbers in rows]


def why(softcap: float | None = 5.0) -> str | None:
    return why_no_flex(CPU, torch.float32, 6, 2, (16, 24), softcap)


def bends_less(*given: Any, **options: Any) -> Any:
    return attend_flex(*given, **options | {"softcap": 2 * options["softcap"]})


def fails(*given: Any, **options: Any) -> Any:
    raise RuntimeError("no compiler\nat all")


def to_another_base(*given: Any, **options: Any) -> Any:
    """The kernel counts in powers of two."""
    out, lse = attend_flex(*given, **options)
    return out, lse * 1.44


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (bends_less, "its outputs differ by up to"),
        (fails, "RuntimeError: no compiler"),
        (to_another_base, "its log-sum-exp differ"),
    ],
)
def test_it_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch, wrong: Any, told: str) -> None:
    assert why() is None and why(None) is None
    why_no_flex.cache_clear()
    monkeypatch.setattr(attention, "attend_flex", wrong)
    assert told in str(why()) and "at all" not in str(why())


@pytest.mark.parametrize("refused", ["", "it differs", "too many"])
def test_it_is_used_where_it_holds(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """As if a CPU were the place for it."""
    calls: list[Any] = []

    def counted(*given: Any, **how: Any) -> Any:
        if refused:
            raise NotCompiledError
        calls.append((how["offset"], how["window"], how["softcap"]))
        return attend_flex(*given, **how)

    monkeypatch.setattr(attention, "suits_flex", lambda query, values: True)
    monkeypatch.setattr(attention, "attend_flex", counted)
    monkeypatch.setattr(attention, "why_no_flex", lambda *given: refused if refused == "it differs" else None)
    given, bent = tensors(6, 2, 40, 40, (16, 16)), AttentionParams(0.3, 5.0)
    for window in (None, 7):
        found = attend(*given, bent, causal=True, window=window)
        truth = attention._attend_blocks(*given, bent, offset=0, window=window)
        torch.testing.assert_close(found.out, truth.out, atol=2e-6, rtol=1e-5)
    attend(*given, AttentionParams(0.3))
    assert calls == ([] if refused else [(0, None, 5.0), (0, 7, 5.0)])


def test_a_compiler_that_fails_later_on_is_not_the_end() -> None:
    """What was tried before the job need not be what other lengths ask for; it is not tried for every layer, either."""
    calls: list[Any] = []

    def broken(graph: Any, examples: Any) -> Any:
        calls.append(graph)
        raise RuntimeError("out of resource: shared memory")

    compiled = flex._compiled(lambda tensor: tensor + 1, broken)
    for _ in range(3):
        with pytest.raises(NotCompiledError):
            compiled(torch.zeros(1, 2, 3, 4))
    assert len(calls) == 1
    with pytest.raises(NotCompiledError, match="shared memory"):
        compiled(torch.zeros(1, 4, 3, 4))
    assert len(calls) == 2
    torch._dynamo.reset()
