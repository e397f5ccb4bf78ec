"""Weights that go straight to where they are used, and the dtype that is timed there."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny

from kvr_mpi.cli.launch import default_dtype
from kvr_mpi.model import LoadedModel, load, load_model
from kvr_mpi.setup import loading
from kvr_mpi.transport.local import run_local


def test_only_gpus_are_loaded_to_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    assert load.placement(gpu) == {"device_map": {"": gpu}} and load.placement(torch.device("cpu")) == {}
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    assert load.placement(gpu) == {}


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


def test_gpus_are_timed_in_the_model_s_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_dtype("cpu") == default_dtype("auto") == "float32"
    assert default_dtype("cuda") == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_dtype("auto") == "auto" and default_dtype("cpu") == "float32"


def test_one_rank_of_a_host_reads_before_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has read is in the host's memory when the others ask for it."""
    told: list[str] = []
    truth = tiny("llama-gqa")

    def load(path: str, **arguments: Any) -> LoadedModel:
        name = threading.current_thread().name
        told.append(f"{name} begins")
        if name == "rank 0":
            time.sleep(0.2)
        told.append(f"{name} ends")
        return truth

    monkeypatch.setattr(loading, "load_model", load)
    monkeypatch.setattr(loading, "keep_heap", lambda: None)
    found = run_local(3, lambda rank: loading.load_on_all(rank, "model", kernels="plain", cache_dir=tmp_path))
    assert found == [truth] * 3 and told[:2] == ["rank 0 begins", "rank 0 ends"] and len(told) == 6
