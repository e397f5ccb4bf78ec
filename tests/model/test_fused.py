"""Gates and rotary embeddings that torch compiles: here by inductor's C++ backend, for GPUs in `gpu/test_wheel`."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from chains import chain, single
from made_logs import logger_to
from models import prompt, tiny
from torch._inductor.compile_fx import compile_fx
from transformers.models.llama.modeling_llama import LlamaMLP

from kvr_mpi.kv.row import Row
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.fused import TRIAL_TOKENS, FusedForward, FusedFunction, fuse_functions, fused_in_graph
from kvr_mpi.model.kernels import give_kernel, kernels_of
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import allowed_error, error_share
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.packed import decode_packed, prefill_packed
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning import kernels


class Inductor:
    """torch's compiler, which counts what it compiles, and how often that runs.

    processes : of its pool, 1 if it compiles in this one.
    fault : applied to its results.
    """

    processes = 0

    def __init__(self, fault: Callable[[Any], Any] = lambda found: found) -> None:
        self.compiled, self.ran, self.fault = 0, 0, fault

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1
        self.processes = max(self.processes, inductor.compile_threads)
        work: Any = compile_fx(graph, inputs)

        def run(*given: Any) -> Any:
            self.ran += 1
            return self.fault(work(*given))

        return run


def ignored(graph: Any, inputs: Any) -> Any:
    """Stand in for a compiler; what it compiles is not what it was given."""
    return lambda *given: [torch.zeros_like(each) for each in graph(*given)]


def fresh(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A model that no other test has."""
    loaded = tiny(name, dtype)
    return replace(loaded, model=copy.deepcopy(loaded.model))


def use(loaded: LoadedModel, backend: Any) -> list[FusedFunction]:
    fused = fuse_functions(loaded.model, prompt(TRIAL_TOKENS), backend)
    for module, kernel in fused.items():
        give_kernel(module, kernel)
    return functions_of(fused)


def functions_of(fused: dict[torch.nn.Module, FusedForward]) -> list[FusedFunction]:
    return list({kernel.function: None for kernel in fused.values()})


@torch.inference_mode()
@pytest.mark.parametrize(("name", "dtype"), [("llama-gqa", torch.bfloat16), ("gemma2-softcap", torch.float32)])
def test_prefills_run_what_is_compiled_and_steps_do_not(name: str, dtype: torch.dtype) -> None:
    """Slices of any length, in chunks or packed; nothing is compiled for them, nor for tensors of another kind."""
    loaded, backend, ids = fresh(name, dtype), Inductor(), prompt(900)
    truth, layers = single(loaded, ids).logits, len(loaded.shape.layers)
    assert truth is not None
    rotary, gates = use(loaded, backend)
    assert (rotary.name, rotary.why_not, gates.name, gates.why_not) == ("rotary embeddings", "", "gates", "")
    compiled, backend.ran = backend.compiled, 0
    prefill = chain(loaded, ids, (0, 200, 500, 900))
    assert backend.ran == 3 * (2 * layers - 1), "the last layer's gate is for one token"
    assert prefill.logits is not None and error_share(prefill.logits, truth) <= allowed_error(dtype)
    backend.ran = 0
    chunked = prefill_kvr(loaded, ids, Partition((0, 900)), LocalTransport(), chunk_tokens=300)
    assert backend.ran == 3 * (2 * layers - 1)
    backend.ran = 0
    packed, other = prefill_packed(loaded, [ids, prompt(40)], reserve_tokens=2)
    assert backend.ran == 2 * layers
    decode_packed(loaded, row := Row([packed.cache, other.cache]), [3, 4])
    assert backend.ran == 2 * layers
    with fused_in_graph(loaded.model):
        decode_packed(loaded, row, [3, 4])
    assert backend.ran == 4 * layers
    gates(*torch.ones(2, 1, 900, 7, dtype=dtype))
    for found in (chunked.logits, packed.logits):
        assert found is not None and error_share(found, truth) <= allowed_error(dtype)
    assert backend.compiled == compiled == 2 and backend.processes == 1, "a pool would run beside each rank"


def fails(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(("backend", "why"), [(ignored, "its results differ"), (fails, "no compiler")])
def test_what_differs_or_fails_is_not_used(backend: Any, why: str) -> None:
    loaded = fresh("llama-gqa")
    truth = single(loaded, prompt(300)).logits
    fused = fuse_functions(loaded.model, prompt(TRIAL_TOKENS), backend)
    assert [why in each.why_not for each in functions_of(fused)] == [True, True]
    found = single(loaded, prompt(300)).logits
    assert truth is not None and found is not None and torch.equal(found, truth)


def test_a_model_is_let_go_and_another_mlp_is_left_alone() -> None:
    class ScaledMLP(LlamaMLP):  # type: ignore[misc]
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * rows)  # type: ignore[no-any-return]

    loaded = fresh("llama-gqa")
    first = loaded.model.model.layers[0]
    first.mlp = ScaledMLP(loaded.model.config)
    use(loaded, "eager")
    fused = {name for name, kernel in kernels_of(loaded.model).items() if isinstance(kernel, FusedForward)}
    assert fused == {f"model.layers.{at}.{part}" for at in range(3) for part in ("self_attn", "mlp")} - {
        "model.layers.0.mlp"
    }
    gone = weakref.ref(first.self_attn)
    del loaded, first
    gc.collect()
    assert gone() is None


def test_a_function_is_fused_on_all_ranks_or_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [replace(fresh("llama-gqa"), device=torch.device("cuda", rank)) for rank in range(2)]

    def fuse(model: Any, ids: Any) -> Any:
        fused = fuse_functions(model, ids, "eager")
        if model is models[1].model:
            functions_of(fused)[0].why_not = "no compiler"
        return fused

    monkeypatch.setattr(kernels, "fuse_functions", fuse)
    monkeypatch.setattr(kernels, "name_attention", lambda device: "flash")
    monkeypatch.setattr(kernels, "why_no_new_flash", lambda device, dtype: None)
    said: list[str] = []
    run_local(2, lambda rank: kernels.fuse_on_gpus(models[rank.rank], rank, logger_to(said, logging.DEBUG)))
    for loaded in models:
        fused = {name.rpartition(".")[2] for name in kernels_of(loaded.model)}
        assert fused == {"mlp", "norm", "input_layernorm", "post_attention_layernorm"}
    assert "rotary embeddings are not fused: no compiler" in said and "gates are fused" in said
