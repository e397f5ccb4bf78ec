"""Weights laid out for the processor: the same products, faster, and never where they would do harm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from chains import chain, greedy, single
from models import CONFIGS, prompt, tiny
from torch.overrides import TorchFunctionMode

from benchmarks.first_token import Trial
from kvr_mpi.model import products as weights
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.kernels import always, forget_kernels, kernel_bytes, use_kernels, without_kernels
from kvr_mpi.model.products import PREPACKED, Product, find_products, give_products
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import footprint_of
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.transport.local import LocalTransport

ALWAYS = always(PREPACKED)

pytestmark = pytest.mark.skipif(weights.MULTIPLY is None, reason="this torch has no oneDNN")


def prepack_all(model: torch.nn.Module) -> None:
    give_products(model, dict.fromkeys(find_products(model), ALWAYS))


@pytest.fixture
def packed() -> Any:
    """Give a model of which nobody else has seen the weights laid out."""
    made = []

    def make(name: str) -> Any:
        loaded = tiny(name)
        prepack_all(loaded.model)
        made.append(loaded.model)
        return loaded

    yield make
    for model in made:
        forget_kernels(model)


def forwards(model: torch.nn.Module) -> int:
    return sum(isinstance(vars(module).get("forward"), Product) for module in model.modules())


def linears(model: torch.nn.Module) -> int:
    return sum(type(module) is torch.nn.Linear for module in model.modules())


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 2, 48), (1, 77, 48), (3, 48), (2, 5, 7, 48)])
def test_the_product_is_the_same(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 80, bias=bias, dtype=dtype)
    rows = torch.randn(shape, dtype=dtype)
    with torch.inference_mode():
        found, expected = Product(layer, ALWAYS)(rows), layer(rows)
    assert found.shape == expected.shape and found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=1e-2)


def test_rows_that_do_not_lie_one_behind_the_other() -> None:
    layer, rows = torch.nn.Linear(48, 80), torch.randn(48, 33).t()[::2]
    with torch.inference_mode():
        torch.testing.assert_close(Product(layer, ALWAYS)(rows), layer(rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("bounds", [(0, 60), (0, 44, 60)])
def test_a_chain_with_packed_weights_equals_plain_transformers(packed: Any, name: str, bounds: tuple[int, ...]) -> None:
    loaded, ids = packed(name), prompt(60)
    truth = single(loaded, ids)
    assert forwards(loaded.model) == 0 and truth.logits is not None
    logits, answer = truth.logits, greedy(loaded.model, truth, 8)
    found = chain(loaded, ids, bounds, reserve=8)
    assert forwards(loaded.model) == linears(loaded.model) > 0
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=0)
    assert greedy(loaded.model, found, 8) == answer


def test_they_are_used_while_ours_runs_and_only_then(packed: Any) -> None:
    model = packed("llama-gqa").model
    layers = linears(model)
    prepare_model(model, chain=True)
    assert forwards(model) == layers
    with without_kernels(model):
        assert forwards(model) == 0
        assert forwards(copy.deepcopy(model)) == 0
    assert forwards(model) == layers
    prepare_model(model, chain=False)
    with without_kernels(model):
        pass
    assert forwards(model) == 0


@pytest.mark.parametrize(
    ("strategy", "lends", "expected"),
    [("ring", False, False), ("tsp-dense", False, False), ("ring", True, True), ("kvr-e", False, True)],
)
def test_rivals_have_them_if_they_are_lent(
    packed: Any, monkeypatch: pytest.MonkeyPatch, strategy: str, lends: bool, expected: bool
) -> None:
    loaded, calls, right = packed("llama-gqa"), [], Product.__call__
    monkeypatch.setattr(Product, "__call__", lambda self, rows: calls.append(1) or right(self, rows))
    prepare_model(loaded.model, chain=True)
    partition = Partition((0, 64)) if strategy == "kvr-e" else None
    footprint = footprint_of(loaded.model.config, loaded.dtype)
    run = Trial(loaded, LocalTransport(), strategy, 64, partition, footprint, lends).measure()
    assert run.ttft_s > 0 and bool(calls) == expected
    assert forwards(loaded.model) == linears(loaded.model)


def test_copies_are_made_and_read_where_it_is_said() -> None:
    model = tiny("llama-gqa").model
    shape, layers = next(iter(find_products(model).items()))
    give_products(model, {shape: ("plain", PREPACKED, "plain", "plain"), "7x7": ALWAYS})
    try:
        assert kernel_bytes(model) == sum(layer.weight.nbytes for layer in layers)
        use_kernels(model, True)
        assert forwards(model) == len(layers)
        rows = torch.randn(1, 8, layers[0].in_features)
        seen: list[Any] = []
        with torch.inference_mode(), Seen(seen):
            layers[0](rows[:, :1]), layers[0](rows), layers[0](rows.repeat(1, 9, 1))
        assert [func is weights.MULTIPLY for func in seen] == [False, True, False]
    finally:
        forget_kernels(model)
    assert kernel_bytes(model) == 0 and forwards(model) == 0


class Seen(TorchFunctionMode):
    """Note which products are called."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (weights.MULTIPLY, torch.nn.functional.linear):
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_other_types_and_machines_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.float16))
    prepack_all(half)
    assert not find_products(half) and kernel_bytes(half) == 0
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    prepack_all(plain)
    assert kernel_bytes(plain) == 0 and use_kernels(plain, True)
    rows = torch.randn(3, 8)
    assert torch.equal(plain(rows), torch.nn.functional.linear(rows, plain[0].weight, plain[0].bias))


def test_a_product_that_is_wrong_here_is_not_used(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = packed("llama-gqa")
    right = Product.__call__
    monkeypatch.setattr(Product, "__call__", lambda self, rows: 1.1 * right(self, rows))
    check_chain(loaded)
    assert forwards(loaded.model) == 0 and kernel_bytes(loaded.model) == 0


def test_parts_that_are_wrong_without_them_are_not_taken_over(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("kvr_mpi.kv.attention.PartialAttention.merge", lambda self, other: self)
    assert not check_chain(packed("llama-gqa"), say=said.append).attends_in_parts
    assert "differ from those of plain transformers" in said[0]
