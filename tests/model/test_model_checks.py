"""Models that transformers would load and run wrongly are refused by name; weights go to where they are used."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import random_model, tiny

from benchmarks.options import default_dtype
from benchmarks.tiny import shrink
from kvr_mpi.errors import DocumentError, ModelError
from kvr_mpi.fairkv.shared_heads import why_not_shared
from kvr_mpi.model import LoadedModel, load, load_model, load_outline, probe_shape
from kvr_mpi.model.source import ModelSource
from kvr_mpi.runtime import loading
from kvr_mpi.transport.local import run_local


@pytest.fixture
def changed(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copy the tiny Llama and change its configuration."""

    def change(**values: Any) -> Path:
        folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))
        return folder

    return change


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | parameters}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_attention_heads": 5}, "5"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3, expected a multiple"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0, expected at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
        ({"eos_token_id": 10**6}, "eos_token_id = 1000000"),
        ({"pad_token_id": 10**6}, "[Pp]adding"),
        ({"hidden_size": "48"}, "hidden_size"),
        (rope("default", rope_theta=0), "rope_theta = 0.0, expected a positive number"),
        (rope("linear", factor=0.5), "rope factor = 0.5 of type linear"),
        (rope("yarn", factor=4.0, original_max_position_embeddings=-4), "original_max_position_embeddings = -4"),
        (
            rope("llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=1.0, original_max_position_embeddings=64),
            "low_freq_factor = 4.0 and high_freq_factor = 1.0",
        ),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 1}, "sliding_window = 1"),
        ({"model_type": "t5"}, "cannot build"),
        ({"model_type": "no-such-type"}, "cannot be loaded.*no-such-type"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "fills no cache|not in the files"),
        ({"num_hidden_layers": 5}, "weights that config.json asks for are not in the files .*layers.3"),
        ({"num_hidden_layers": 2}, "weights of layers that config.json does not ask for .*layers.2"),
    ],
)
def test_configurations_that_contradict(changed: Callable[..., Path], values: dict[str, Any], told: str) -> None:
    folder = str(changed(**values))
    with pytest.raises(ModelError, match=told):
        load_model(folder, cache_dir=Path("/nonexistent"), device="cpu")
    if "expected" in told:
        with pytest.raises(ModelError, match=told):  # plans, too, which read no weights
            load_outline(folder, cache_dir=Path("/nonexistent"))


def test_a_window_longer_than_the_context_is_none(changed: Callable[..., Path]) -> None:
    folder = changed(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=4096)
    loaded = load_model(str(folder), cache_dir=Path("/nonexistent"), device="cpu")
    assert loaded.shape.why_single is None and loaded.shape.layers[0].visibility.size is None


@pytest.mark.parametrize(
    ("name", "longest"),
    [("llama", 256), ("mpt", 256), ("whisper", 256), ("roberta", 256 - 2), ("bloom", None)],
)
def test_the_longest_prompt_is_known_under_any_name(name: str, longest: int | None) -> None:
    changes = {"pad_token_id": 1} if name == "roberta" else {}  # which counts positions from the token after that
    assert probe_shape(shrink(name, **changes), torch.float32).max_tokens == longest


def test_tokens_without_an_embedding_in_each_layer_are_refused() -> None:
    config = shrink("gemma3n_text")
    config.vocab_size_per_layer_input = config.vocab_size - 9
    shape = probe_shape(config, torch.float32)
    assert max(shape.sample_ids(2 * config.vocab_size)) == config.vocab_size - 10
    shape.check_ids([config.vocab_size - 10])
    with pytest.raises(DocumentError, match=f"token {config.vocab_size - 9}, and Gemma3nForCausalLM has"):
        shape.check_ids([config.vocab_size - 9])


def test_heads_of_a_model_for_more_than_text_are_not_shared_out() -> None:
    assert why_not_shared(random_model(shrink("moss_transcribe_diarize"))) == "it is not only a language model"


# Weights


def test_only_gpus_are_loaded_to_directly_and_timed_in_the_models_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    assert load.placement(gpu) == {"device_map": {"": gpu}} and load.placement(torch.device("cpu")) == {}
    assert default_dtype("cpu") == default_dtype("auto") == "bfloat16" and default_dtype("cuda") == "auto"
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load.placement(gpu) == {}
    assert default_dtype("auto") == "auto" and default_dtype("cpu") == "bfloat16"


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

    def convert(*_: Any) -> ModelSource:
        told.append(threading.current_thread().name)
        return ModelSource("model")

    def load(path: str, **arguments: Any) -> LoadedModel:
        assert len(set(told)) == 3, "its files are there before any rank reads them"
        all_here.wait()
        return truth

    monkeypatch.setattr(loading, "find_converted", convert)
    monkeypatch.setattr(loading, "load_model", load)
    monkeypatch.setattr(loading, "keep_heap", lambda: None)
    found = run_local(3, lambda rank: loading.load_on_all(rank, "model", kernels="plain", cache_dir=tmp_path))
    assert found == [truth] * 3 and told[0] == "rank 0"
