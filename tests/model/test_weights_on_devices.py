"""Weights that go straight to where they are used, and the dtype that is timed there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvr_mpi.cli.launch import default_dtype
from kvr_mpi.model import load, load_model


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
