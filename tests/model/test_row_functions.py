"""Norms, gates and rotary embeddings in one pass on CPUs have the bits of transformers' own code."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from chains import chain
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, prompt, tiny
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as rotate_wide

from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.cpu_attention import DTYPES, HALVES, KernelLibrary
from kvr_mpi.model.fused import fuse_rows
from kvr_mpi.model.kernels import kernels_of, name_ways, use_kernels
from kvr_mpi.model.norms import fuse_norms
from kvr_mpi.model.row_functions import RowFunctions

EVERY = settings(max_examples=25, deadline=None)
SPECIAL = (float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-40, 3e38)


def are_equal(found: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether all bits are the same, but for those of NaNs."""
    integers = torch.int32 if truth.dtype == torch.float32 else torch.int16
    same = (found.view(integers) == truth.view(integers)) | (found.isnan() & truth.isnan())
    return found.dtype == truth.dtype and found.shape == truth.shape and bool(same.all())


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of all sizes, and some special ones."""
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=draw) * 10 ** (6 * torch.rand(shape[:-1], generator=draw) - 4).unsqueeze(-1)
    flat = made.view(-1)
    flat[torch.randint(len(flat), (3,), generator=draw)] = torch.tensor(SPECIAL)[seed % len(SPECIAL)]
    return made.to(dtype)


@EVERY
@given(
    kind=st.sampled_from([LlamaRMSNorm, Gemma3RMSNorm, Olmo2RMSNorm]),
    dtype=st.sampled_from(DTYPES),
    features=st.one_of(st.integers(8, 300), st.sampled_from([576, 2048, 5000])),
    cut=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_norms(
    library: KernelLibrary, kind: Any, dtype: torch.dtype, features: int, cut: bool, threads: int, seed: int
) -> None:
    norm = kind(features).to(dtype)
    norm.weight.copy_(torch.randn(features, generator=torch.Generator().manual_seed(seed)))
    assert fuse_norms(norm, library.rows) == 1
    rows = numbers(1, 40, 3, features + 5, dtype=dtype, seed=seed)
    rows = rows[:, :, 1, 3:-2] if cut else rows[..., 5:].contiguous()  # of every third row, only some
    torch.set_num_threads(1)
    truth = norm(rows)
    torch.set_num_threads(threads)
    use_kernels(norm, True)
    assert are_equal(norm(rows), truth)
    torch.testing.assert_close(norm(rows.double()), norm.double().forward(rows.double()), equal_nan=True)


@EVERY
@given(
    dtype=st.sampled_from(DTYPES),
    is_wide=st.booleans(),
    dim=st.integers(1, 40),
    rest=st.integers(0, 40),
    tokens=st.integers(1, 70),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_rotary_embeddings(
    library: KernelLibrary, dtype: torch.dtype, is_wide: bool, dim: int, rest: int, tokens: int, seed: int
) -> None:
    rotated, dim = 2 * dim, 2 * dim + rest
    rows = numbers(1, tokens, 3, dim, dtype=dtype, seed=seed).transpose(1, 2)
    angles = numbers(2, 1, tokens, rotated, dtype=torch.float32 if is_wide else dtype, seed=seed + 1).unbind(0)
    found = library.rows.rotate(rows, *angles)
    rotate = rotate_wide if is_wide else apply_rotary_pos_emb
    assert are_equal(found[..., :rotated], rotate(rows[..., :rotated], rows[..., :rotated], *angles)[0])
    assert are_equal(found[..., rotated:], rows[..., rotated:])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "relu2"])
@torch.inference_mode()
def test_gates_of_every_number(library: KernelLibrary, dtype: torch.dtype, name: str) -> None:
    act, every = ACT2FN[name], torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    ups = numbers(1 << 13, 8, dtype=dtype, seed=1)
    assert are_equal(library.rows.gate(act(every), every.view(-1, 8), ups), act(every).view(-1, 8) * ups)
    assert are_equal(library.rows.gate(act(every), every[:77], ups.view(-1)[:77]), act(every)[:77] * ups.view(-1)[:77])


# Functions that each kind of model calls in a pass with kernels, in bfloat16.
CALLED = {
    "llama-gqa": {"norm", "rotate", "gate"},
    "qwen2-some-windows": {"norm", "rotate", "gate"},
    "gemma2-softcap": {"norm", "rotate", "gate"},
    "stablelm": {"rotate", "gate"},
    "phi3": {"norm", "rotate"},
    "mixtral-moe": {"norm", "rotate"},
    "falcon-h1-both": {"norm", "rotate", "gate"},
    "gpt2": set[str](),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CALLED)
@torch.inference_mode()
def test_models_compute_the_same_bits(
    library: KernelLibrary, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: Counter[str] = Counter()

    def counted(each: str, own: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            called[each] += 1
            return own(*args, **options)

        return call

    for each in ("norm", "rotate", "gate"):
        monkeypatch.setattr(RowFunctions, each, counted(each, getattr(RowFunctions, each)))
    loaded = tiny(name, dtype)
    loaded = replace(loaded, model=copy.deepcopy(loaded.model))
    for parameter in loaded.model.parameters():
        if parameter.dim() == 1:  # weights of norms are ones or zeros
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=0.3)
    ids, named = prompt(60), name_ways(loaded.model)
    in_parts = chain(loaded, ids, (0, 31, 60)).logits if name in CONFIGS else None
    prepare_model(loaded.model, chain=False)
    plain = loaded.model(torch.tensor([ids])).logits
    fuse_rows(loaded.model, library.rows)
    called.clear()
    use_kernels(loaded.model, True)
    assert torch.equal(loaded.model(torch.tensor([ids])).logits, plain)
    assert set(called) == CALLED[name] - ({"gate"} if dtype == torch.float32 else set())
    if in_parts is not None:
        found = chain(loaded, ids, (0, 31, 60)).logits
        assert found is not None and torch.equal(found, in_parts)
    assert name_ways(loaded.model) == named, "answers do not depend on them"


@torch.inference_mode()
def test_a_layer_that_computes_something_else_is_left_alone(library: KernelLibrary) -> None:
    loaded = tiny("llama-gqa", torch.bfloat16)
    model: Any = copy.deepcopy(loaded.model)
    first, second, third = model.model.layers

    class DoubledMLP(type(first.mlp)):  # type: ignore[misc]
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)  # type: ignore[no-any-return]

    class MeanRMSNorm(type(first.input_layernorm)):  # type: ignore[misc]
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows - rows.mean(-1, True))  # type: ignore[no-any-return]

    first.mlp.__class__, second.input_layernorm.__class__ = DoubledMLP, MeanRMSNorm
    third.mlp.act_fn = torch.nn.GLU()
    fuse_rows(model, library.rows)
    fused = kernels_of(model).keys()
    assert not fused & {"model.layers.0.mlp", "model.layers.1.input_layernorm", "model.layers.2.mlp"}
    assert fused >= {"model.layers.1.mlp", "model.layers.0.input_layernorm", "model.layers.2.self_attn"}
