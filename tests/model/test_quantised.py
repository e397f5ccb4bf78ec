"""Folders of quantised weights: each layout runs and agrees with the weights it stands for, or is refused by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_folders
import pytest
import torch
import transformers as tf
from made_folders import Tensors, change_config, change_weights, in_fp8, is_linear, packed, save_plain
from models import prompt

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LoadedModel, load, load_model, load_outline
from kvr_mpi.model.fused import fuse_functions
from kvr_mpi.model.kernels import is_plain_linear
from kvr_mpi.model.products import find_products
from kvr_mpi.prefill.self_check import check_chain

pytestmark = pytest.mark.filterwarnings("default")  # of the libraries for quantised weights
VOCAB = made_folders.SMALL["vocab_size"]
NEEDS = {"compressed_tensors": "compressed_tensors", "bitsandbytes": "bitsandbytes"}


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_tokenizer", lambda location, **options: None)


def load_here(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32", device="cpu", cache_dir=Path("/nonexistent"))


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([prompt(90, VOCAB)])).logits
    return found


@pytest.mark.parametrize("layout", ["fp8", "mxfp4", "compressed_tensors", "bitsandbytes"])
def test_quantised_weights_are_those_they_stand_for(layout: str, tmp_path: Path) -> None:
    folder, plain = save_plain(tmp_path / "folder"), save_plain(tmp_path / "plain")
    if (package := NEEDS.get(layout)) and importlib.util.find_spec(package) is None:
        method = layout.replace("_", "-")
        change_config(folder, quantization_config={"quant_method": method, "load_in_4bit": layout == "bitsandbytes"})
        with pytest.raises(ModelError, match=f"pip install.*{method}"):
            load_here(folder)
        return
    getattr(made_folders, layout)(folder, plain)
    loaded = load_here(folder)
    truth = logits_of(tf.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    torch.testing.assert_close(logits_of(loaded.model), truth, rtol=1e-4, atol=1e-4)
    # Our kernels would compute with the stored numbers of layers that are still quantised.
    quantised = {id(each) for each in loaded.model.modules() if "Linear" in type(each).__name__} - {
        id(each) for each in loaded.model.modules() if is_plain_linear(each)
    }
    assert bool(quantised) == (layout in NEEDS)
    assert not quantised & {id(layer) for layers in find_products(loaded.model).values() for layer in layers}
    fuse_functions(loaded.model, prompt(64, VOCAB), "eager")
    torch.testing.assert_close(logits_of(loaded.model), truth, rtol=1e-4, atol=1e-4)
    check_chain(loaded)


@pytest.mark.parametrize("layout", ["fp8", "mxfp4"])
def test_quantised_weights_are_expanded_where_nothing_multiplies_them(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model on the CPU of a machine with a GPU, transformers keeps layers that only a GPU can run."""
    folder, plain = save_plain(tmp_path / "folder"), save_plain(tmp_path / "plain")
    getattr(made_folders, layout)(folder, plain)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *given: (9, 0))
    loaded = load_here(folder)
    assert not any("Linear" in type(each).__name__ and not is_plain_linear(each) for each in loaded.model.modules())
    truth = logits_of(tf.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    torch.testing.assert_close(logits_of(loaded.model), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_expanded_weights_have_the_dtype_of_the_job(stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    """Folders have norms and embeddings in 16 bits, and jobs on CPUs compute in float32."""
    folder, plain = save_plain(tmp_path / "folder"), save_plain(tmp_path / "plain")
    made_folders.fp8(folder, plain)
    change_weights(
        folder,
        lambda tensors: {n: one if is_linear(n) or "scale" in n else one.to(stored) for n, one in tensors.items()},
    )
    loaded = load_model(str(folder), dtype=dtype, device="cpu", cache_dir=Path("/nonexistent"))
    assert {each.dtype for each in loaded.model.parameters()} == {loaded.dtype}
    logits_of(loaded.model)


class Fp8Linear(torch.nn.Linear):
    """As transformers' own on GPUs, whose weights are of a type that torch does not compute with."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        rounded, self.scale = in_fp8(plain.weight.detach())
        self.weight = torch.nn.Parameter(rounded, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply with the weights that are meant."""
        return torch.nn.functional.linear(rows, self.weight.float() * self.scale)


def test_gates_of_quantised_layers_are_not_fused(tmp_path: Path) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(save_plain(tmp_path / "folder"), dtype=torch.float32)
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = Fp8Linear(mlp.gate_proj)
    fused = fuse_functions(model, prompt(64, VOCAB), "eager")
    assert mlp not in fused and model.model.layers[1].mlp in fused


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_packages_that_a_layout_needs_are_named(method: str, tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "folder")
    packed(folder, method)
    if importlib.util.find_spec("gptqmodel") is not None:
        pytest.skip("its package is installed")
    with pytest.raises(ModelError, match="pip install (gptqmodel|optimum)"):
        load_here(folder)


def without_scales(tensors: Tensors) -> Tensors:
    return {name: in_fp8(weight)[0] if is_linear(name) else weight for name, weight in tensors.items()}


def with_scales(tensors: Tensors) -> Tensors:
    scales = {name.replace("weight", "weight_scale"): torch.ones(1) for name in filter(is_linear, tensors)}
    return without_scales(tensors) | scales


def in_int8(tensors: Tensors) -> Tensors:
    return {name: (16 * weight).to(torch.int8) if is_linear(name) else weight for name, weight in tensors.items()}


def scales_only(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.mlp.down_proj.zero_point": torch.ones(1)}


@pytest.mark.parametrize(
    ("change", "settings", "told"),
    [
        (with_scales, None, "14 weights are quantised .*F8_E4M3.* no quantization_config"),
        (in_int8, None, "14 weights are quantised .*I8.* no quantization_config"),
        (scales_only, None, "tensors of quantised weights are not used .*zero_point"),
        (with_scales, {"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt' .*unknown to transformers"),
        (with_scales, {"bits": 4, "group_size": 64}, "quantised for MLX"),
        (
            without_scales,
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "14 quantised weights have no scale",
        ),
        (with_scales, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "scale"),
    ],
)
def test_weights_without_their_scales_are_refused(
    change: Callable[[Tensors], Tensors], settings: Any, told: str, tmp_path: Path
) -> None:
    folder = save_plain(tmp_path / "folder")
    change_weights(folder, change)
    change_config(folder, quantization_config=settings)
    with pytest.raises(ModelError, match=told):
        load_here(folder)
    if settings is not None and "method" in told or "MLX" in told:  # plans read no weights
        with pytest.raises(ModelError, match=told):
            load_outline(str(folder), cache_dir=tmp_path)


def test_settings_of_another_program_are_named(tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "folder")
    change_weights(folder, with_scales)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ModelError, match="hf_quant_config.json, of NVIDIA ModelOpt"):
        load_here(folder)


def test_integers_that_are_no_weights_are_left_alone(tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "folder")
    more = {"model.position_ids": torch.arange(8), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    change_weights(folder, lambda tensors: tensors | more)
    load_here(folder)
