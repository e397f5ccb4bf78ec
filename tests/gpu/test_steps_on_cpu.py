"""Every step of `make test-gpu` runs through on a CPU, with small sizes: no slip of the pen waits for the first GPU.

What a step finds there says nothing of a GPU. What it would have of one is stood in for: FlexAttention is not compiled,
fused functions are the models' own, the demo's model is a random one, and ranks of our commands are threads.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_correctness
import gpu_features
import gpu_jobs
import gpu_many
import gpu_ranks
import gpu_speed
import pytest
import torch
from gpu_machine import make_model
from gpu_steps import Absent, Given, Step
from run_all import STEPS
from torch.nn.attention import flex_attention as torchs

from kvr_mpi.kv import attention
from kvr_mpi.model.fused import TRIAL_TOKENS, fuse_functions
from kvr_mpi.model.kernels import give_kernel
from kvr_mpi.tuning import kernels

# Those that take longest.
LONG = {"first token, ranks", "flex", "hanging ranks", "failing sums", "links"}
ABSENT = {
    "nccl, all ranks": "one for each of 4 ranks",
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def fuse(loaded: Any, *given: Any) -> None:
    for module, kernel in fuse_functions(loaded.model, loaded.shape.sample_ids(TRIAL_TOKENS), "eager").items():
        give_kernel(module, kernel)


@pytest.mark.parametrize(
    "step", [pytest.param(step, id=step.name, marks=pytest.mark.long if step.name in LONG else ()) for step in STEPS]
)
@pytest.mark.usefixtures("flexible")
def test_a_step_runs_through(
    step: Step, tmp_path: Path, model: Path, run_here: Any, mpirun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(ranks: int, *words: str, timeout_s: float) -> str:
        if words[0] == "python":
            done = mpirun(ranks, [sys.executable, *words[1:]], timeout_s=10 * timeout_s)  # tests share few cores
            assert not done.returncode, done.stderr
            return str(done.stdout + done.stderr)
        command, *arguments = words[1:] if words[0] == "kvr" else ("run", *words[1:])
        settings = [] if command == "doctor" else ["--set", "model.kernels=plain"]
        done = run_here(ranks, [*arguments, *settings], command)
        assert not done.returncode, done.stderr
        return str(done.stdout + done.stderr)

    if step.name == "first token":
        monkeypatch.setattr(kernels, "fuse_on_gpus", fuse)
    for one in (gpu_ranks, gpu_jobs, gpu_many, gpu_speed):
        monkeypatch.setattr(one, "launch", launch)
    monkeypatch.setattr(gpu_correctness, "model_of", lambda given: str(model))
    monkeypatch.setattr("kvr_mpi.runtime.verify.NEW_TOKENS", 2)
    monkeypatch.setattr(gpu_many, "memory_folder", lambda: tmp_path)
    given = Given(str(model), str(tmp_path), device="cpu", is_small=True)
    module, _, function = step.work.partition(":")
    work = getattr(importlib.import_module(module), function)
    if step.name in ABSENT:
        with pytest.raises(Absent, match=ABSENT[step.name]):
            work(given)
    else:
        found = work(given)
        assert found and torch.get_default_dtype() == torch.float32
        if step.name == "profiler":
            assert len(found) == 3 and all("aten::mm" in Path(file).read_text() for file in found.values())
