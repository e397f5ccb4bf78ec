"""Norms and gates are found by what they compute, and computed the same by ours; nothing else is taken over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from chains import chain, greedy, single
from models import CONFIGS, prompt, tiny

from kvr_mpi.model.fused import (
    COMPILED,
    GATES,
    IN_PLACE,
    IN_PLACE_GATES,
    FusedNorm,
    find_gates,
    find_norms,
    give_gate,
    give_norm,
    is_same,
    rms_norm,
)
from kvr_mpi.model.kernels import BOUNDS, ROWS, always, forget_kernels, kernels_of, use_kernels, way_for

# By kind: norms, gates and their activation.
FOUND = {
    "llama-gqa": (7, 3, "silu"),
    "qwen2": (7, 3, "silu"),
    "gemma2-softcap": (13, 3, "gelu"),
    "gpt-oss-sinks": (7, 0, None),
    "phi3": (7, 0, None),  # one product for gate and up
    "gpt2": (0, 0, None),
    "opt": (0, 0, None),
}


@pytest.fixture
def fused() -> Iterator[Any]:
    """Give a model whose norms and gates are all computed by ours."""
    made = []

    def make(name: str, way: str) -> Any:
        loaded = tiny(name)
        made.append(loaded.model)
        for norm in find_norms(loaded.model):
            give_norm(norm, rms_norm, always(way))
        for gate in find_gates(loaded.model):
            gates = {COMPILED: GATES[gate.activation], IN_PLACE: IN_PLACE_GATES.get(gate.activation)}
            give_gate(gate, {name: each for name, each in gates.items() if each}, always(way))
        return loaded

    yield make
    for model in made:
        forget_kernels(model)


@pytest.mark.parametrize("name", FOUND)
def test_they_are_found_whatever_they_are_called(name: str) -> None:
    norms, gates, activation = FOUND[name]
    assert len(find_norms(tiny(name).model)) == norms
    assert [gate.activation for gate in find_gates(tiny(name).model)] == [activation] * gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_the_model_s_own_in_each_type(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, dtype).model
    for found in find_norms(model):
        rows = 3 * torch.randn(2, 7, found.weight.shape[0]).to(dtype)
        with torch.inference_mode():
            assert is_same(found.module(rows), FusedNorm(found, rms_norm, always(COMPILED))(rows))
    assert len(find_norms(model)) == len(find_norms(tiny(name).model))


@pytest.mark.parametrize("way", [COMPILED, IN_PLACE])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2-softcap", "mixtral-moe", "falcon-gqa"])
def test_a_chain_of_them_equals_plain_transformers(fused: Any, name: str, way: str) -> None:
    if name == "gemma2-softcap" and way == IN_PLACE:
        pytest.skip("its gate has no such way")
    ids, truth = prompt(60), single(tiny(name), prompt(60))
    logits, answer = truth.logits, greedy(tiny(name).model, truth, 8)
    loaded = fused(name, way)
    found = chain(loaded, ids, (0, 1, 44, 60), reserve=8)
    assert logits is not None and any("forward" in vars(module) for module in loaded.model.modules()) == bool(
        kernels_of(loaded.model)
    )
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=0)
    assert greedy(loaded.model, found, 8) == answer


class Centred(torch.nn.Module):
    """A norm that takes the mean away first; as far as names go, it is one of ours."""

    def __init__(self, most: float | None = None) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.most = torch.nn.Parameter(torch.rand(32)), 1e-6, most

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states
        if self.most is None:
            rows = rows - rows.mean(-1, keepdim=True)
        else:
            rows = rows.clamp(-self.most, self.most)
        return self.weight * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.variance_epsilon)


class Gated(torch.nn.Module):
    """A gated MLP with something of its own."""

    def __init__(self, bent: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = torch.nn.Linear(32, 48), torch.nn.Linear(32, 48)
        self.down_proj, self.bent = torch.nn.Linear(48, 32), bent

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(rows).clamp(max=self.bent)
        return self.down_proj(torch.nn.functional.silu(gate) * self.up_proj(rows))


def test_what_only_looks_like_one_is_left_alone() -> None:
    assert find_norms(Centred()) == [] and find_norms(Centred(100.0)) == []
    assert len(find_norms(Centred(1e9))) == 1
    assert find_gates(Gated(7.0)) == []
    assert len(find_gates(Gated(1e9))) == 1


def test_compiled_code_is_given_only_what_it_can_read() -> None:
    """It looks at neither type nor strides, and would give numbers all the same."""
    module, seen = Centred(1e9), []

    def norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
        seen.append(rows.shape)
        return rms_norm(rows, weight, epsilon)

    kernel = FusedNorm(find_norms(module)[0], norm, always(COMPILED))
    good = torch.randn(3, 4, 32)
    with torch.inference_mode():
        assert is_same(module(good), kernel(good)) and seen == [(12, 32)]
        for rows in (good.transpose(0, 1), torch.randn(4, 64)[:, ::2], good.double(), good[:0]):
            found, truth = kernel(rows), module(rows)
            assert found.dtype == truth.dtype and torch.equal(found, truth)
    assert seen == [(12, 32)]


def test_a_model_that_is_gone_is_not_held() -> None:
    import gc
    import weakref

    model: torch.nn.Module | None = torch.nn.Sequential(Centred(1e9), Gated(1e9))
    assert model is not None
    give_norm(find_norms(model)[0], rms_norm, always(COMPILED))
    give_gate(find_gates(model)[0], {COMPILED: GATES["silu"]}, always(COMPILED))
    use_kernels(model, True)
    gone = weakref.ref(model[0]), weakref.ref(model[1])
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_rows_between_those_measured_go_the_nearer_way() -> None:
    ways = tuple(str(count) for count in ROWS)
    assert [way_for(ways, count) for count in ROWS] == list(ways)
    for bound, few, many in zip(BOUNDS, ways, ways[1:], strict=False):
        assert (way_for(ways, bound - 1), way_for(ways, bound)) == (few, many)
    assert way_for(ways, 100_000) == ways[-1]
