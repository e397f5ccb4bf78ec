"""What a folder contains is what is used: settings and tensors that nothing reads, and files that are no models."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from chains import on_groups
from made_folders import SMALL, Tensors, change_config, change_weights, save_plain
from models import prompt
from safetensors.torch import load_file, save_file

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LoadedModel, load, load_model, load_outline
from kvr_mpi.model.settings import unread_settings

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_tokenizer", lambda location, **options: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_plain(tmp_path / "folder")


def load_here(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32", device="cpu", cache_dir=Path("/nonexistent"))


def as_rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": None, "rope_scaling": settings}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (as_rope(factor=4.0), "factor = 4.0 is not read for rope_type 'default'.*known keys: partial_rotary_factor"),
        (as_rope(rope_typ="linear", factor=4.0), "rope_typ = linear is not read"),
        (as_rope(**YARN, beta_slwo=2), "beta_slwo = 2 is not read for rope_type 'yarn'.*beta_slow"),
        (as_rope(type="yarn", rope_type="linear", factor=4.0), "type = 'yarn' and rope_type = 'linear'"),
        (as_rope(rope_type="dynamic", factor=2.0, original_max_position_embeddings=64), "original_max_position_embed"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters differ"),
        ({"rope_scalling": YARN}, "rope_scalling is not read by LlamaConfig: correct it to rope_scaling"),
        ({"rms_norm_epsilon": 1e-5, "rms_norm_eps": None}, "rms_norm_epsilon .*correct it to rms_norm_eps"),
        ({"rope_theta": 5e5}, "rope_theta = 500000.0, but 10000.0 in the rope settings"),
    ],
)
def test_settings_that_nothing_reads(folder: Path, settings: dict[str, Any], told: str) -> None:
    change_config(folder, **settings)
    for read in (load_here, lambda where: load_outline(str(where), cache_dir=where)):
        with pytest.raises(ModelError, match=told):
            read(folder)


PUBLIC: dict[str, dict[str, Any]] = {
    "a context made shorter": as_rope(**YARN) | {"max_position_embeddings": 64},
    "keys of the training": as_rope(**YARN, finetuned=True),
    "no scaling": as_rope(rope_type="default", factor=1.0, original_max_position_embeddings=512),
    "the old name": as_rope(type="linear", factor=2.0),
    "other keys": {"use_mrope": False, "pretraining_tp": 1, "unsloth_fixed": True, "rope_scaling": None},
    "null": as_rope(**YARN, attention_factor=None, truncate=False),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_settings_of_public_models_are_accepted(folder: Path, name: str) -> None:
    change_config(folder, **PUBLIC[name])
    loaded = load_here(folder)
    truth = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt(90, SMALL["vocab_size"])])
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, truth(ids).logits)


SIZES = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
TEXT = SIZES | {"model_type": "gemma3_text", "num_key_value_heads": 2}
LINEAR = {"factor": 8.0, "rope_type": "linear"}
LONG = {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        # From the files of public models.
        ({"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, **SIZES}, ""),
        ({"model_type": "gemma3_text", "rope_scaling": LINEAR, "rope_local_base_freq": 1e4, "rope_theta": 1e6}, ""),
        ({"model_type": "gemma3", "text_config": TEXT | {"rope_scaling": LINEAR}}, ""),
        ({"model_type": "phi3", "original_max_position_embeddings": 64, "pad_token_id": 0, **SIZES}
         | {"rope_scaling": {"type": "longrope", **LONG}}, ""),
        ({"model_type": "hunyuan_v1_dense", **SIZES}
         | {"rope_scaling": {"alpha": 9.0, "beta_fast": 32, "factor": 1.0, "mscale": 1.0, "type": "dynamic"}}, ""),
        ({"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000, **SIZES}, ""),
        # With mistakes.
        ({"model_type": "gemma3", "rope_scaling": LINEAR, "text_config": TEXT}, "move it into the settings"),
        ({"model_type": "gemma3_text", "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "factor": 3.0}},
         "factor = 8.0 of full_attention is not read.*factor is beside those"),
        ({"model_type": "gpt2", "rope_scaling": LINEAR}, "is not read by GPT2Config"),
    ],
)  # fmt: skip
def test_settings_at_every_level(given: dict[str, Any], told: str) -> None:
    config = tf.AutoConfig.for_model(**json.loads(json.dumps(given)))
    found = "; ".join(unread_settings(config, given))
    assert re.search(told, found) if told else not found


# Tensors


def extra_bias(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}


def extra_norm(tensors: Tensors) -> Tensors:
    return tensors | {f"model.layers.{layer}.self_attn.q_norm.weight": torch.ones(16) for layer in (0, 1)}


def other_shape(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.1.mlp.up_proj.weight": torch.ones(80, 64)}


def one_missing(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}


def twice(tensors: Tensors) -> Tensors:
    return tensors | {"norm.weight": torch.zeros(64)}


def in_int8(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.1.mlp.up_proj.weight": torch.ones(96, 64, dtype=torch.int8)}


CHANGES: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (extra_bias, "1 tensors in the files are not used by LlamaForCausalLM .*q_proj.bias"),
    (extra_norm, "2 tensors in the files are not used .*q_norm"),
    (other_shape, r"up_proj.weight: \([84]0, 64\), not \((96|48), 64\)"),
    (one_missing, "are not in the files .*up_proj"),
    (twice, "lack the prefix 'model.'.*norm.weight"),
    (in_int8, "1 weights are quantised .*up_proj.weight: I8"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_tensors_that_are_not_those_of_the_model(folder: Path, change: Any, told: str) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelError, match=told):
        load_here(folder)


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_ranks_of_a_group_refuse_the_same(folder: Path, change: Any, told: str) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelError, match=told):
        on_groups(folder, 1, 2, lambda ranks, loaded: None)


def test_tensors_of_other_tasks_are_left_alone(folder: Path) -> None:
    more = ("vision_tower.patch.weight", "model.mtp.layers.0.proj.weight", "score.weight", "model.rotary.inv_freq")
    change_weights(folder, lambda tensors: tensors | {name: torch.ones(4) for name in more})
    load_here(folder)


# Files


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_pointers_of_git_lfs_are_called_that(folder: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (folder / name).write_text(pointer)
    with pytest.raises(ModelError, match=rf"{name} .*pointers of git-LFS.*git lfs pull"):
        load_here(folder)


def test_a_missing_part_and_an_adapter_beside_the_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + name.startswith('model.layers.1')}-of-00002.safetensors" for name in tensors}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    load_here(folder)
    copied = shutil.copytree(folder, folder.parent / "copy")
    (copied / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002.safetensors .*are not in"):
        load_here(copied)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapter_config.json.*model.adapter"):
        load_here(folder)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"eos_token_id": 2,', "generation_config.json is not valid JSON"),
        ('{"repetition_penalti": 1.3}', "repetition_penalti is not a setting: correct it to repetition_penalty"),
    ],
)
def test_generation_settings_that_cannot_be_read(folder: Path, text: str, told: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=told):
        load_here(folder)


def test_commits_of_a_hub_model_are_different_models(tmp_path: Path) -> None:
    """As the hub's library keeps them, without internet; in a process of its own, since it reads the path once."""
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        save_plain(cached / "snapshots" / commit)
    program = (
        "import sys\nfrom pathlib import Path\nfrom kvr_mpi.model import load, load_model, load_outline\n"
        "load.load_tokenizer = lambda location, **options: None\n"
        "found, cache = [], Path('no such folder')\n"
        "for commit in ('a' * 40, 'b' * 40, 'a' * 40):\n"
        "    Path(sys.argv[1]).write_text(commit)\n"
        "    found.append(load_outline('org/name', offline=True, cache_dir=cache).fingerprint)\n"
        "loaded = load_model('org/name', dtype='float32', device='cpu', offline=True, cache_dir=cache)\n"
        "assert found[0] == found[2] == loaded.fingerprint != found[1]\nprint('right')"
    )
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, "-c", program, str(cached / "refs" / "main")]
    assert subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout == "right\n"
