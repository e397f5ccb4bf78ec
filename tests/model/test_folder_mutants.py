"""Random damage to a folder: the model is the one that was saved, or the folder is refused; never other logits."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_folders
import pytest
import torch
import transformers as tf
from made_folders import SMALL, Tensors, change_weights, in_fp8, save_plain
from models import prompt

from kvr_mpi.errors import ModelError
from kvr_mpi.model import load, load_model

ORDINARY, MANY = 32, 200
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
KINDS["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
BASES: dict[str, Callable[[], Any]] = {
    "yarn": lambda: tf.LlamaConfig(**SMALL, rope_parameters=dict(YARN)),
    "biases": lambda: tf.Qwen2Config(**SMALL),
    "kinds": lambda: tf.Gemma3TextConfig(
        **SMALL, head_dim=16, layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(KINDS)
    ),
    "experts": lambda: tf.MixtralConfig(**SMALL, num_local_experts=4),
    "fp8": lambda: tf.LlamaConfig(**SMALL),
}
# Settings whose loss no program could notice, since another model is meant without them, and one that would allocate
# a model of billions of random weights first.
NEEDED = {
    "rope_parameters",
    "hidden_size",
    "head_dim",
    "layer_types",
    "num_experts_per_tok",
    "model_type",
    "sliding_window",
}
ENDINGS = ("bias", "weight_scale", "weight_zero_point", "k_norm.weight", "input_scale", "lora_A.weight", "scales")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    made = {name: save_plain(folder / name, config()) for name, config in BASES.items()}
    made_folders.fp8(made["fp8"], save_plain(folder / "plain"))
    return made


def typo(name: str, chance: random.Random) -> str:
    """A name with a letter lost, doubled or changed."""
    at = chance.randrange(len(name))
    return name[:at] + chance.choice(["", 2 * name[at], "x"]) + name[at + 1 :]


def damage_tensors(folder: Path, chance: random.Random) -> str:
    how = chance.choice(["remove", "rename", "move", "unprefix", "add", "copy", "round"])
    told = ""

    def change(tensors: Tensors) -> Tensors:
        nonlocal told
        name = chance.choice(sorted(tensors))
        value = tensors[name]
        other = {
            "rename": typo(name, chance),
            "move": name.replace("layers.1.", "layers.2.").replace("layers.0.", "layers.1."),
            "unprefix": name.removeprefix("model."),
            "add": f"{name.rpartition('.')[0]}.{chance.choice(ENDINGS)}",
            "copy": f"model.{name}" if not name.startswith("model.") else name.removeprefix("model."),
        }.get(how, name)
        told = f"{how} {name} {other}"
        if how in ("remove", "rename", "move", "unprefix"):
            del tensors[name]
        if how in ("rename", "move", "unprefix"):
            tensors[other] = value
        elif how in ("add", "copy"):
            tensors[other] = torch.randn(value.shape).to(value.dtype)
        elif how == "round" and "scale" not in name:  # a rounded scale is another valid scale
            tensors[name] = chance.choice([in_fp8(value.float())[0], (8 * value.float()).to(torch.int8)])
        return tensors

    change_weights(folder, change)
    return told


def damage_config(folder: Path, chance: random.Random) -> str:
    config = json.loads((folder / "config.json").read_text())
    tables = [config]
    for name in ("rope_parameters", "quantization_config"):
        if table := config.get(name):
            tables += [each for each in table.values() if isinstance(each, dict)] or [table]
    table = chance.choice(tables)
    names = sorted(set(table) - NEEDED) or sorted(table)
    name, how = chance.choice(names), chance.choice(["remove", "rename", "add", "twice"])
    told = f"{how} {name} of {'the top' if table is config else sorted(table)}"
    if how == "remove" and table is config:
        del table[name]
    elif how in ("remove", "rename"):
        table[typo(name, chance)] = table.pop(name)
    elif how == "add":
        table[chance.choice(["low_freq_factor", "short_factor", "note"])] = 3.5
    else:
        config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    return told


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([prompt(90, SMALL["vocab_size"])])).logits
    return found


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("seeds", [range(ORDINARY), pytest.param(range(ORDINARY, MANY), marks=pytest.mark.long)])
def test_damaged_folders(seeds: range, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_tokenizer", lambda location, **options: None)
    truth = {
        name: logits_of(tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        for name, folder in bases.items()
    }
    wrong, refused = dict[int, Any](), 0
    for seed in seeds:
        chance, name = random.Random(seed), list(bases)[seed % len(bases)]
        folder = shutil.copytree(bases[name], tmp_path / str(seed))
        told = chance.choice([damage_tensors, damage_config])(folder, chance)
        try:
            loaded = load_model(str(folder), dtype="float32", device="cpu", cache_dir=tmp_path)
        except ModelError as error:
            refused += 1
            if "Traceback" in str(error):
                wrong[seed] = name, told, str(error)
            continue
        if not torch.allclose(logits_of(loaded.model), truth[name], rtol=1e-4, atol=1e-4):
            wrong[seed] = name, told
        shutil.rmtree(folder)
    assert not wrong, "\n".join(f"{seed}: {each}" for seed, each in wrong.items())
    assert len(seeds) / 3 < refused < len(seeds)
