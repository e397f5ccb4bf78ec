"""Norms that torch computes in one pass, in the place of those of models."""

from __future__ import annotations

import copy

import pytest
import torch
from models import tiny
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvr_mpi.model.kernels import use_kernels
from kvr_mpi.model.norms import FusedNorm, fuse_norms


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
