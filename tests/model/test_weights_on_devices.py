"""Weights that go straight to where they are used, and the dtype that is timed there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny

from benchmarks.options import default_dtype
from kvr_mpi.model import LoadedModel, load, load_model
from kvr_mpi.model.source import ModelSource
from kvr_mpi.setup import loading
from kvr_mpi.transport.local import run_local


def test_only_gpus_are_loaded_to_directly_and_timed_in_the_models_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    assert load.placement(gpu) == {"device_map": {"": gpu}} and load.placement(torch.device("cpu")) == {}
    assert default_dtype("cpu") == default_dtype("auto") == "float32" and default_dtype("cuda") == "auto"
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load.placement(gpu) == {}
    assert default_dtype("auto") == "auto" and default_dtype("cpu") == "float32"


def test_the_same_weights_come_either_way(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = load_model(str(tiny_model_dir), device="cpu", cache_dir=tmp_path)
    monkeypatch.setattr(load, "placement", lambda device: {"device_map": {"": device}})
    found = load_model(str(tiny_model_dir), device="cpu", cache_dir=tmp_path)
    mine, theirs = found.model.state_dict(), truth.model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert found.fingerprint == truth.fingerprint and not found.model.training
    assert not any(hasattr(module, "_hf_hook") for module in found.model.modules()), "nothing runs between its layers"


def test_ranks_load_at_once_what_one_of_a_host_has_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that loaded one after another would start as many times later as there are ranks on a host."""
    told, all_here, truth = list[str](), threading.Barrier(3, timeout=60), tiny("llama-gqa")

    def convert(*_: Any) -> tuple[ModelSource, dict[str, Any]]:
        told.append(threading.current_thread().name)
        return ModelSource("model"), {}

    def load(path: str, **arguments: Any) -> LoadedModel:
        assert len(set(told)) == 3, "its files are there before any rank reads them"
        all_here.wait()
        return truth

    monkeypatch.setattr(loading, "locate", convert)
    monkeypatch.setattr(loading, "load_model", load)
    monkeypatch.setattr(loading, "keep_heap", lambda: None)
    found = run_local(3, lambda rank: loading.load_on_all(rank, "model", kernels="plain", cache_dir=tmp_path))
    assert found == [truth] * 3 and told[0] == "rank 0"
