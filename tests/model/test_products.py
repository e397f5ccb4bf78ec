"""Copies of weights, in another order or in fewer bits: the same products, and never where they would do harm."""

from __future__ import annotations

import copy

import pytest
import torch
from chains import chain, greedy, single
from models import CONFIGS, prompt, tiny

from benchmarks.first_token import Trial
from kvr_mpi.model import LoadedModel
from kvr_mpi.model import products as weights
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.kernels import PLAIN, always, forget_kernels, kernel_bytes, use_kernels, without_kernels
from kvr_mpi.model.products import PREPACKED, Product, find_products, give_products
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import footprint_of
from kvr_mpi.transport.local import LocalTransport

ALWAYS = always(PREPACKED)

pytestmark = pytest.mark.skipif(weights.MULTIPLY is None, reason="this torch has no oneDNN")


def packed(name: str) -> LoadedModel:
    """A model of which nobody else has seen the weights laid out."""
    loaded = tiny.__wrapped__(name)
    give_products(loaded.model, dict.fromkeys(find_products(loaded.model), ALWAYS))
    return loaded


def forwards(model: torch.nn.Module) -> int:
    return sum(isinstance(vars(module).get("forward"), Product) for module in model.modules())


def linears(model: torch.nn.Module) -> int:
    return sum(type(module) is torch.nn.Linear for module in model.modules())


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 77, 48), (3, 48), (2, 5, 7, 48)])
def test_the_product_is_the_same(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 80, bias=bias, dtype=dtype)
    together = torch.randn(shape, dtype=dtype)
    apart = torch.randn(*shape[:-1], 96, dtype=dtype)[..., ::2]  # not next to each other
    for rows in (together, apart):
        with torch.inference_mode():
            found, expected = Product(layer, ALWAYS)(rows), layer(rows)
        assert found.shape == expected.shape and found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("bounds", [(0, 60), (0, 44, 60)])
def test_a_chain_with_packed_weights_equals_plain_transformers(name: str, bounds: tuple[int, ...]) -> None:
    loaded, ids = packed(name), prompt(60)
    truth = single(loaded, ids)
    assert forwards(loaded.model) == 0 and truth.logits is not None
    logits, answer = truth.logits, greedy(loaded.model, truth, 8)
    found = chain(loaded, ids, bounds, reserve=8)
    with without_kernels(loaded.model):
        assert forwards(loaded.model) == forwards(copy.deepcopy(loaded.model)) == 0
    assert forwards(loaded.model) == linears(loaded.model) > 0
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=0)
    assert greedy(loaded.model, found, 8) == answer


@pytest.mark.parametrize(
    ("strategy", "lends", "expected"),
    [("ring", False, False), ("tsp-dense", False, False), ("ring", True, True), ("kvr-e", False, True)],
)
def test_rivals_have_them_if_they_are_lent(
    monkeypatch: pytest.MonkeyPatch, strategy: str, lends: bool, expected: bool
) -> None:
    loaded, calls, right = packed("llama-gqa"), [], Product.__call__
    monkeypatch.setattr(Product, "__call__", lambda self, rows: calls.append(1) or right(self, rows))
    prepare_model(loaded.model, chain=True)
    partition = Partition((0, 64)) if strategy == "kvr-e" else None
    footprint = footprint_of(loaded.model.config, loaded.dtype)
    Trial(loaded, LocalTransport(), strategy, 64, partition, footprint, lends).measure()
    assert bool(calls) == expected
    assert forwards(loaded.model) == linears(loaded.model)


def test_copies_are_made_and_read_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.__wrapped__("llama-gqa").model
    shape, layers = next(iter(find_products(model).items()))
    give_products(model, {shape: (PLAIN, PREPACKED, PLAIN, PLAIN), "7x7": ALWAYS})
    calls, multiply = [], weights.MULTIPLY
    monkeypatch.setattr(weights, "MULTIPLY", lambda rows, *more: calls.append(len(rows)) or multiply(rows, *more))
    assert kernel_bytes(model) == sum(layer.weight.nbytes for layer in layers)
    use_kernels(model, True)
    assert forwards(model) == len(layers)
    with torch.inference_mode():
        for count in (1, 8, 72):
            layers[0](torch.randn(count, layers[0].in_features))
    assert calls == [8]
    forget_kernels(model)
    assert kernel_bytes(model) == 0 and forwards(model) == 0


def test_other_types_and_machines_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.float16))
    give_products(half, dict.fromkeys(find_products(half), ALWAYS))
    assert not find_products(half) and kernel_bytes(half) == 0
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    give_products(plain, dict.fromkeys(find_products(plain), ALWAYS))
    assert kernel_bytes(plain) == 0 and use_kernels(plain, True)
    rows = torch.randn(3, 8)
    assert torch.equal(plain(rows), torch.nn.functional.linear(rows, plain[0].weight, plain[0].bias))
