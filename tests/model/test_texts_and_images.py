"""Of models of texts and images, the language model alone is loaded, and computes what the whole one does for texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import made_folders
import pytest
import torch
import transformers as tf
from chains import ids_of, make_folder, on_groups
from made_folders import SMALL, change_config, change_weights
from models import prompt

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LoadedModel, load, load_model, load_outline
from kvr_mpi.model.shape import TEXTS_AND_IMAGES
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.runtime.job_ranks import JobRanks

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_tokenizer", lambda location, **options: None)


def whole_model(name: str, text: str | None = None, **settings: Any) -> Any:
    """A small random model of texts and images."""
    kind = tf.CONFIG_MAPPING[name]
    parts = {key: value for key, value in kind().to_dict().items() if isinstance(value, dict)}
    vision, language = parts["vision_config"], parts["text_config"]
    config = kind(
        text_config={"model_type": text or language["model_type"], **SMALL, **settings},
        vision_config={
            "model_type": vision["model_type"],
            **{key: each for key, each in VISION.items() if key in vision},
        },
    )
    torch.manual_seed(0)
    return tf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def load_here(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32", device="cpu", cache_dir=Path("/nonexistent"))


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.tensor([prompt(90, SMALL["vocab_size"])])).logits
    return found


@pytest.mark.parametrize(("name", "text"), [("mistral3", "ministral3"), *((name, None) for name in TEXTS_AND_IMAGES)])
def test_the_language_model_computes_what_the_whole_does(name: str, text: str | None, tmp_path: Path) -> None:
    whole = whole_model(name, text)
    whole.save_pretrained(tmp_path)
    loaded = load_here(tmp_path)
    torch.testing.assert_close(logits_of(loaded.model), logits_of(whole), rtol=1e-4, atol=1e-5)
    held = {each.data_ptr(): each.numel() for each in loaded.model.parameters()}
    assert sum(held.values()) < sum(each.numel() for each in whole.parameters()), "without what reads images"
    assert type(load_outline(str(tmp_path), cache_dir=tmp_path).model) is type(loaded.model)
    if name != "lfm2_vl":  # with states, for which the check has another path
        check_chain(loaded)


def test_weights_in_fp8_are_expanded(tmp_path: Path) -> None:
    folder, plain = tmp_path / "fp8", tmp_path / "plain"
    for each in (folder, plain):
        whole_model("mistral3").save_pretrained(each)
    is_linear = made_folders.is_linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made_folders, "is_linear", lambda name: is_linear(name) and name.startswith("language_model"))
        made_folders.fp8(folder, plain)
    left = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    change_config(folder, quantization_config={**how, "modules_to_not_convert": left})
    torch.testing.assert_close(
        logits_of(load_here(folder).model), logits_of(load_here(plain).model), rtol=1e-4, atol=1e-4
    )


def test_tensors_that_belong_to_neither_part_are_refused(tmp_path: Path) -> None:
    whole_model("mistral3").save_pretrained(tmp_path)
    change_weights(tmp_path, lambda tensors: {**tensors, "language_model.model.more.weight": torch.ones(2)})
    with pytest.raises(ModelError, match="1 tensors in the files are not used"):
        load_here(tmp_path)


def test_other_models_of_images_are_refused_by_name(tmp_path: Path) -> None:
    config = tf.Qwen3VLConfig(text_config=SMALL)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelError, match="Qwen3VLConfig.*of models of texts and images.*mistral3 can be used"):
        load_here(tmp_path)


def test_ranks_of_a_group_hold_parts_of_the_language_model(tmp_path: Path) -> None:
    whole, ids = whole_model("mistral3", num_key_value_heads=2), ids_of(50)
    folder, _ = make_folder(tmp_path / "tokenizer", "llama")
    whole.save_pretrained(folder)

    def work(ranks: JobRanks, loaded: LoadedModel) -> torch.Tensor | None:
        return prefill_kvr(loaded, ids, Partition.even(len(ids), 1), ranks.lane, reserve_tokens=1).logits

    found = on_groups(folder, 1, 2, work)
    with torch.inference_mode():
        truth = whole(input_ids=torch.tensor([ids])).logits[0, -1]
    for logits in found:
        torch.testing.assert_close(logits.reshape(-1), truth, rtol=1e-4, atol=1e-4)
