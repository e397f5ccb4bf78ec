"""Every step of `make test-gpu` runs through on a CPU, with small sizes: no slip of the pen waits for the first GPU.

What a step finds there says nothing of a GPU. What it would have of one is stood in for: FlexAttention is not compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import gpu_features
import pytest
import torch
from constants import SMOLLM
from gpu_steps import Absent, Given, Step
from run_all import STEPS
from torch.nn.attention import flex_attention as torchs

from kvr_mpi.kv import attention

# Those that take longest, most of them steps of several processes.
LONG = {
    "flex",
    "pretrained",
    "staged",
    "doctor",
    "nccl, 2 ranks",
    "tensor-parallel",
    "asking",
    "first token, ranks",
    "profile",
}
ABSENT = {
    **{f"nccl, {ranks} ranks": f"one for each of {ranks} ranks" for ranks in (4, 8)},
    **{"cuda-aware mpi": "GPU", "vllm": "vllm is not installed"},
}


@pytest.fixture
def flexible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    for module in (gpu_features, attention):
        monkeypatch.setattr(module, "suits_flex", lambda query, values: True)
    attention.why_no_flex.cache_clear()
    yield
    attention.why_no_flex.cache_clear()


@pytest.mark.parametrize(
    "step", [pytest.param(step, id=step.name, marks=pytest.mark.long if step.name in LONG else ()) for step in STEPS]
)
@pytest.mark.usefixtures("flexible")
def test_a_step_runs_through(step: Step, tmp_path: Path) -> None:
    given = Given(SMOLLM, str(tmp_path), device="cpu", is_small=True)
    module, _, function = step.work.partition(":")
    work = getattr(importlib.import_module(module), function)
    if step.name in ABSENT:
        with pytest.raises(Absent, match=ABSENT[step.name]):
            work(given)
    else:
        assert work(given) and torch.get_default_dtype() == torch.float32
