"""Copies of weights, in another order or in fewer bits: the same products, and never where they would do harm."""

from __future__ import annotations

import copy

import pytest
import torch
from chains import chain, greedy, single
from models import CONFIGS, prompt, tiny
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvr_mpi.model import LoadedModel
from kvr_mpi.model import products as weights
from kvr_mpi.model.kernels import PLAIN, always, forget_kernels, kernel_bytes, use_kernels, without_kernels
from kvr_mpi.model.norms import FusedNorm, fuse_norms
from kvr_mpi.model.products import PREPACKED, Product, find_products, give_products

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


# Norms that torch computes in one pass, in the place of those of models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
def test_a_norm_gives_what_it_gave(kind: type[torch.nn.Module], dtype: torch.dtype) -> None:
    norm = kind(48, eps=1e-5).to(dtype)
    norm.weight.data.uniform_(-1, 1)
    model, rows = torch.nn.Sequential(norm), 3 * torch.randn(5, 48, dtype=dtype)
    truth = model(rows)
    assert fuse_norms(model) == 1 and use_kernels(model, True)
    assert isinstance(norm.forward, FusedNorm)
    torch.testing.assert_close(model(rows), truth, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_another_norm_is_left_alone() -> None:
    class ShiftedRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) + 0.1  # type: ignore[no-any-return]

    class GatedRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * gate  # type: ignore[no-any-return]

    class OtherEpsRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(rows, self.weight.shape, self.weight, 3 * self.variance_epsilon)

    loaded = tiny("llama-gqa")
    assert fuse_norms(copy.deepcopy(loaded.model)) == 2 * len(loaded.shape.layers) + 1
    others = ShiftedRMSNorm(48), GatedRMSNorm(48), OtherEpsRMSNorm(48), torch.nn.LayerNorm(48)
    assert not fuse_norms(torch.nn.Sequential(*others))
    assert not fuse_norms(torch.nn.Sequential(torch.nn.Linear(48, 48), LlamaRMSNorm(48).bfloat16()))
