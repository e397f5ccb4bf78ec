"""Weights that come from disk block by block: the same keys, values and logits to the last bit, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from models import CONFIGS, prompt
from safetensors.torch import load_file, save_file

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.contents import layer_kv
from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.streamed import StreamedWeights
from kvr_mpi.model.weight_files import find_weights
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.in_pass import prefill_in_pass
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport.local import LocalTransport

PROMPTS = [prompt(tokens) for tokens in (1, 17, 40, 5)]
ALL = [(ids, 1) for ids in PROMPTS]
DTYPES = {"qwen2": torch.bfloat16}


def saved(folder: Path, name: str, layers: int = 5, **settings: Any) -> Path:
    """A tiny random model in two files of weights."""
    config = CONFIGS[name]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number % 2] for number in range(layers)]
    for key, value in settings.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def held(folder: Path, dtype: torch.dtype) -> LoadedModel:
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for weight in model.parameters():  # a product's last bit depends on where in a file its weights are mapped
        weight.data = weight.data.clone()
    return loaded_of(model, dtype)


def streamed(folder: Path, dtype: torch.dtype, block_layers: int = 1) -> LoadedModel:
    weights = StreamedWeights(tf.AutoConfig.from_pretrained(folder), find_weights(folder, dtype), block_layers)
    return loaded_of(weights.model, dtype, weights)


def loaded_of(model: Any, dtype: torch.dtype, weights: StreamedWeights | None = None) -> LoadedModel:
    shape = probe_shape(model.config, dtype)
    prepare_model(model, chain=True)
    return LoadedModel(model, None, shape, "", "", dtype, torch.device("cpu"), streamed=weights)


@pytest.mark.parametrize(
    "name",
    ["llama-gqa", "qwen2", *(pytest.param(name, marks=pytest.mark.long) for name in ("mistral-window", "gpt2", "opt"))],
)
def test_a_pass_gives_what_a_held_model_gives_to_the_last_bit(name: str, tmp_path: Path) -> None:
    dtype = DTYPES.get(name, torch.float32)
    folder = saved(tmp_path, name)
    whole, parts = held(folder, dtype), streamed(folder, dtype, block_layers=2)
    weights = parts.streamed
    assert weights is not None and [len(block) for block in weights.blocks] == [2, 2, 1]
    for _ in range(2):
        read = weights.read_bytes
        found = prefill_in_pass(parts, ALL)
        assert weights.read_bytes - read == weights.pass_bytes, "once for all of them"
        for ids, mine in zip(PROMPTS, found, strict=True):
            truth = prefill_kvr(whole, ids, Partition((0, len(ids))), LocalTransport(), reserve_tokens=1)
            assert mine.logits is not None and truth.logits is not None and torch.equal(mine.logits, truth.logits)
            for layer in range(5):
                pairs = layer_kv(mine.cache, layer), layer_kv(truth.cache, layer)
                assert pairs[0] is not None and pairs[1] is not None
                assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))


@pytest.mark.parametrize("block_layers", [1, 2])
def test_no_more_is_held_than_embedding_head_and_two_blocks(block_layers: int, tmp_path: Path) -> None:
    """Tensors are counted, those that are in the model at any layer of any prompt."""
    parts = streamed(saved(tmp_path, "llama-gqa", layers=7), torch.float32, block_layers)
    weights, most = parts.streamed, []
    assert weights is not None
    sizes = [tensor.nbytes for name, tensor in weights.model.named_parameters() if "layers." not in name]
    layer = weights.layer_bytes

    def count(module: Any, args: Any) -> None:
        alive = sum(tensor.nbytes for tensor in weights.model.parameters() if not tensor.is_meta)
        most.append((alive - sum(sizes)) / layer)

    for module in weights.model.model.layers:
        module.mlp.register_forward_pre_hook(count)
    prefill_in_pass(parts, ALL)
    assert len(most) == 7 * len(PROMPTS) and 1 <= max(most) <= 2 * block_layers
    assert (
        weights.most_held_bytes
        <= weights.resident_bytes + 2 * block_layers * layer
        == weights.resident_bytes + (weights.reserved_bytes)
    )
    assert weights.resident_bytes == sum(sizes) == weights.held_bytes, "and what is left is what is always there"
    assert weights.pass_bytes == 7 * layer


def test_a_prompt_that_fails_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvr_mpi.kv.layer import SliceLayer

    folder = saved(tmp_path, "llama-gqa")
    whole, parts = held(folder, torch.float32), streamed(folder, torch.float32)
    update = SliceLayer.update

    def scarce(layer: SliceLayer, keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if keys.shape[2] == 17 and layer.layer_idx == 2:
            raise torch.OutOfMemoryError("none left")
        return update(layer, keys, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(SliceLayer, "update", scarce)
        found = prefill_in_pass(parts, ALL)
    assert [one.error is None for one in found] == [True, False, True, True] and "none left" in str(found[1].error)
    again = prefill_in_pass(parts, ALL[1:2])[0].logits
    truth = prefill_kvr(whole, PROMPTS[1], Partition((0, 17)), LocalTransport()).logits
    assert again is not None and truth is not None and torch.equal(again, truth)


def test_what_cannot_be_read_ends_the_pass_and_says_so(tmp_path: Path) -> None:
    parts = streamed(saved(tmp_path, "llama-gqa"), torch.float32)
    assert parts.streamed is not None
    file = parts.streamed._weights.files["model.layers.3.mlp.up_proj.weight"]
    file.rename(file.with_suffix(".gone"))
    with pytest.raises(ModelError, match="cannot be read any more .*safetensors"):
        prefill_in_pass(parts, ALL)
    file.with_suffix(".gone").rename(file)
    assert prefill_in_pass(parts, ALL[:1])[0].logits is not None
    with pytest.raises(ModelError, match="in passes of many prompts only"):
        prefill_kvr(parts, PROMPTS[1], Partition((0, 17)), LocalTransport())


def test_files_that_are_not_the_models_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the values of model\.embed_tokens\.embed_scale are not in its files"):
        streamed(saved(tmp_path / "gemma", "gemma2-softcap"), torch.float32)
    folder = saved(tmp_path / "llama", "llama-gqa")
    config = json.loads((folder / "config.json").read_text())

    def refusal(**changes: Any) -> str:
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelError) as caught:
            streamed(folder, torch.float32)
        return str(caught.value)

    assert "weights of layers that config.json does not ask for: model.layers.4." in refusal(num_hidden_layers=4)
    assert "no weights of the name model.layers.5.input_layernorm.weight" in refusal(num_hidden_layers=6)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(ModelError, match=r"is of \(64, 48\) in the files, and of \(80, 48\) in the model"):
        prefill_in_pass(streamed(folder, torch.float32), ALL[:1])
    (folder / "config.json").write_text(json.dumps(config))
    file = next(file for file in folder.glob("*.safetensors") if "model.norm.weight" in load_file(file))
    save_file({name: each for name, each in load_file(file).items() if name != "model.norm.weight"}, file)
    with pytest.raises(ModelError, match=r"the values of model\.norm\.weight are not in its files"):
        streamed(folder, torch.float32)
