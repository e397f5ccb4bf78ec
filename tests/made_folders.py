"""Small folders of models in every layout of quantised weights, made here rather than by the libraries that write them.

Each has a plain model beside it, with the weights that the quantised ones stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Values of the four bits of MXFP4, the sign first.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_MOST = 448.0
BLOCK = 128

Tensors = dict[str, torch.Tensor]


def save_plain(folder: Path, config: Any = None) -> Path:
    """Save a small random model without a tokenizer."""
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(config or tf.LlamaConfig(**SMALL), dtype=torch.float32).save_pretrained(folder)
    return folder


def change_config(folder: Path, **values: Any) -> None:
    """Change settings of config.json; None removes them."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({name: each for name, each in config.items() if each is not None}))


def change_weights(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Change the tensors of a folder."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})


def is_linear(name: str) -> bool:
    """Whether a tensor is a matrix of a layer, which quantised models have in fewer bits."""
    return name.endswith("_proj.weight")


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix to FP8; return it and its scale."""
    scale = weight.abs().max() / FP8_MOST
    return (weight / scale).to(torch.float8_e4m3fn), scale.float()


def both(folder: Path, plain: Path, change: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]) -> None:
    """Change the matrices of two folders: in one to how they are stored, in the other to what that stands for."""
    stored, meant = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if is_linear(name):
            del stored[name]
            more, meant[name] = change(name, weight)
            stored |= more
    change_weights(folder, lambda tensors: stored)
    change_weights(plain, lambda tensors: meant)


def fp8(folder: Path, plain: Path) -> None:
    """As DeepSeek-V3: a scale for each block of 128 rows and columns."""

    def change(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        largest = torch.nn.functional.max_pool2d(weight.abs()[None, None], BLOCK, ceil_mode=True)[0, 0]
        scales = largest / FP8_MOST
        whole = scales.repeat_interleave(BLOCK, 0)[: len(weight)].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
        rounded = (weight / whole).to(torch.float8_e4m3fn)
        return {name: rounded, f"{name}_scale_inv": scales}, rounded.float() * whole

    both(folder, plain, change)
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    change_config(folder, quantization_config=how)


def compressed_tensors(folder: Path, plain: Path) -> None:
    """As llm-compressor: FP8 with a scale for each row."""

    def change(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rounded, scale = in_fp8(weight)
        return {name: rounded, f"{name}_scale": scale.expand(len(weight), 1).clone()}, rounded.float() * scale

    both(folder, plain, change)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    how = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    change_config(folder, quantization_config=how)


def mxfp4(folder: Path, plain: Path) -> None:
    """As gpt-oss: experts in blocks of 32 values of four bits with a power of two."""
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    shape = SMALL | {"hidden_size": width, "intermediate_size": width * 3 // 2, "head_dim": width // 4}
    config = tf.GptOssConfig(**shape, num_local_experts=4, num_experts_per_tok=2, sliding_window=32)
    save_plain(folder, config)
    save_plain(plain, config)
    generator = torch.Generator().manual_seed(0)
    stored, meant = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, height = stored.pop(name).shape
        codes = torch.randint(0, 16, (experts, height, width // 32, 32), generator=generator, dtype=torch.uint8)
        powers = torch.randint(122, 125, (experts, height, width // 32), generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": powers}
        values = torch.where(codes >= 8, -1.0, 1.0) * FP4[(codes % 8).int()] * 2.0 ** (powers.float() - 127)[..., None]
        meant[name] = values.view(experts, height, width).transpose(1, 2).contiguous()
    change_weights(folder, lambda tensors: stored)
    change_weights(plain, lambda tensors: meant)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    change_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": skipped})


def packed(folder: Path, method: str) -> None:
    """As AutoAWQ and AutoGPTQ: four bits packed in int32, in groups of 32."""

    def change(tensors: Tensors) -> Tensors:
        made = {name: value for name, value in tensors.items() if not is_linear(name)}
        for name in filter(is_linear, tensors):
            rows, columns = tensors[name].shape
            base = name.removesuffix("weight")
            by_rows = (columns, rows // 8) if method == "awq" else (columns // 8, rows)
            made[f"{base}qweight"] = torch.zeros(by_rows, dtype=torch.int32)
            made[f"{base}qzeros"] = torch.zeros(columns // 32, rows // 8, dtype=torch.int32)
            made[f"{base}scales"] = torch.ones(columns // 32, rows, dtype=torch.float16)
        return made

    change_weights(folder, change)
    change_config(folder, quantization_config={"quant_method": method, "bits": 4, "group_size": 32})


def bitsandbytes(folder: Path, plain: Path) -> None:
    """As bitsandbytes itself saves NF4."""
    from bitsandbytes.functional import dequantize_4bit

    how = tf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = tf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)
    model.save_pretrained(folder)
    meant = load_file(plain / "model.safetensors")
    for name in filter(is_linear, meant):
        weight = model.get_parameter(name)
        meant[name] = dequantize_4bit(weight.data, weight.quant_state).float()
    change_weights(plain, lambda tensors: meant)
