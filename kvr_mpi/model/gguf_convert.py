"""Converts GGUF models to folders of safetensors that compute what llama.cpp computes.

Every tensor of a file is used, every parameter of the model is filled, and every metadata key is applied or known to
have no effect; anything else is refused by its name. `ARCHITECTURES` lists what is accepted, which the tests compare
with llama.cpp.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvr_mpi.errors import ModelError
from kvr_mpi.model.gguf import GgufModel, GgufTensor
from kvr_mpi.model.gguf_tokenizer import build_tokenizer, end_tokens
from kvr_mpi.model.metadata import Metadata
from kvr_mpi.model.shape import meta_model

# Names of a layer's parameters in transformers, without the layer, and of the tensors that they consist of.
Names = Mapping[str, tuple[str, ...]]

GLOBAL: Names = {
    "model.embed_tokens.weight": ("token_embd.weight",),
    "model.norm.weight": ("output_norm.weight",),
    "lm_head.weight": ("output.weight",),
}
ATTENTION: Names = {
    "self_attn.q_proj.weight": ("attn_q.weight",),
    "self_attn.k_proj.weight": ("attn_k.weight",),
    "self_attn.v_proj.weight": ("attn_v.weight",),
    "self_attn.o_proj.weight": ("attn_output.weight",),
}
BIASES: Names = {name.replace("weight", "bias"): (of[0].replace("weight", "bias"),) for name, of in ATTENTION.items()}
HEAD_NORMS: Names = {
    "self_attn.q_norm.weight": ("attn_q_norm.weight",),
    "self_attn.k_norm.weight": ("attn_k_norm.weight",),
}
NORMS: Names = {
    "input_layernorm.weight": ("attn_norm.weight",),
    "post_attention_layernorm.weight": ("ffn_norm.weight",),
}
POST_NORMS: Names = {
    "post_attention_layernorm.weight": ("post_attention_norm.weight",),
    "post_feedforward_layernorm.weight": ("post_ffw_norm.weight",),
}
FOUR_NORMS: Names = {
    "input_layernorm.weight": ("attn_norm.weight",),
    "pre_feedforward_layernorm.weight": ("ffn_norm.weight",),
    **POST_NORMS,
}
MLP: Names = {
    "mlp.gate_proj.weight": ("ffn_gate.weight",),
    "mlp.up_proj.weight": ("ffn_up.weight",),
    "mlp.down_proj.weight": ("ffn_down.weight",),
}
MLP_BIASES: Names = {name.replace("weight", "bias"): (of[0].replace("weight", "bias"),) for name, of in MLP.items()}
EXPERTS: Names = {
    "mlp.gate.weight": ("ffn_gate_inp.weight",),
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
}
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# Settings of Llama 3.1 and later, which a file contains only as the divisors of frequencies that follow from them.
LLAMA3: Mapping[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a GGUF architecture becomes a model of transformers.

    model_type : transformers' name.
    layer : the parameters of a layer. Biases of products that a file lacks are zero.
    configure : returns the settings of the configuration that are its own.
    interleaved : pairs of rotated dimensions are adjacent in queries and keys; transformers' are half a head apart.
    norm_offset : what was added to the weights of norms.
    is_partial : transformers' model can rotate a part of each head.
    divisors : tensors that may divide its rotary frequencies.
    """

    model_type: str
    layer: Names
    configure: Callable[[Metadata, GgufModel], dict[str, Any]] = lambda keys, model: {}
    interleaved: bool = False
    norm_offset: float = 0.0
    is_partial: bool = False
    divisors: tuple[str, ...] = ()


def write_model(model: GgufModel, folder: Path) -> None:
    """Write a model as a folder that transformers loads: float32 weights, configuration and tokenizer.

    Raises `ModelError` if the architecture, a key or a tensor is not known, or a tensor is missing or has another
    shape than the configuration says.
    """
    import torch
    from transformers import GenerationConfig

    metadata = Metadata(model.metadata)
    architecture, config = _configure(metadata, model)
    tokenizer = build_tokenizer(metadata)
    ends = end_tokens(metadata)
    metadata.check_all_used()
    built = meta_model(config, torch.float32)
    values = dict(_fill(built, architecture, config, model))
    built.load_state_dict(values, strict=True, assign=True)
    built.tie_weights()
    built.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=config.pad_token_id
    )
    with contextlib.redirect_stderr(io.StringIO()):  # hide the progress bar from the batch log
        built.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_architecture(metadata: Metadata) -> str:
    """Return the architecture of a GGUF model; raise `ModelError` if it is not one that is accepted."""
    kind, name = metadata.text("general.type", "model"), metadata.text("general.architecture")
    if kind != "model":
        raise ModelError(f"general.type = {kind!r}, expected 'model': the file is no language model of its own")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"general.architecture = {name!r}; GGUF files are accepted for {', '.join(sorted(ARCHITECTURES))}, for "
            f"which the results are tested against llama.cpp: use the model's folder of safetensors instead"
        )
    return name


def config_of(model: GgufModel) -> Any:
    """Return transformers' configuration for a GGUF model; `ModelError` as for `write_model`."""
    return _configure(Metadata(model.metadata), model)[1]


def _configure(metadata: Metadata, model: GgufModel) -> tuple[Architecture, Any]:
    """Return a model's architecture and its configuration."""
    from transformers import AutoConfig

    name = check_architecture(metadata)
    architecture, keys = ARCHITECTURES[name], metadata.below(name)
    hidden, heads = keys.number("embedding_length"), keys.number("attention.head_count")
    if heads < 1 or hidden < 1:
        raise ModelError(f"{name}.embedding_length = {hidden} with {name}.attention.head_count = {heads}")
    head_dim = keys.number("attention.key_length", hidden // heads)
    keys.expect("attention.value_length", head_dim)
    keys.expect("attention.causal", True)
    keys.expect("pooling_type", 0)
    tokens = metadata.texts("tokenizer.ggml.tokens")
    keys.expect("vocab_size", len(tokens))
    context = keys.number("context_length")
    settings: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": keys.number("block_count"),
        "max_position_embeddings": context,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "vocab_size": len(tokens),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_parameters": _rope(keys, model, architecture, head_dim, context),
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "pad_token_id": metadata.token("padding"),
    }
    settings |= architecture.configure(keys, model)
    if local := settings.pop("local_rope", None):
        settings["rope_parameters"] = {"full_attention": settings["rope_parameters"], "sliding_attention": local}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.dtype = "float32"
    return architecture, config


def _rope(keys: Metadata, model: GgufModel, architecture: Architecture, head_dim: int, context: int) -> dict[str, Any]:
    """Return transformers' ``rope_parameters`` for the keys and tensors of rotary embeddings."""
    rotated = keys.number("rope.dimension_count", head_dim)
    if rotated != head_dim and not (architecture.is_partial and 0 < rotated < head_dim and rotated % 2 == 0):
        raise ModelError(
            f"{keys.prefix}rope.dimension_count = {rotated}, but heads have {head_dim} dimensions, and transformers' "
            f"model of this architecture rotates all of them"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 10000.0)}
    if architecture.is_partial:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 0.0)) or 1.0
    original = keys.number("rope.scaling.original_context_length", context)
    attention = keys.real("rope.scaling.attn_factor", 1.0)
    keys.ignore("rope.scaling.finetuned")
    if kind == "none":
        factor = 1.0
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope["beta_fast"] = keys.real("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = keys.real("rope.scaling.yarn_beta_slow", 1.0)
        keys.expect("rope.scaling.yarn_ext_factor", 1.0)
        keys.expect("rope.scaling.yarn_attn_factor", 1.0)
        rope["attention_factor"] = float(attention * (1 + 0.1 * np.log(factor)))
    elif kind not in ("linear", "longrope"):
        raise ModelError(f"{keys.prefix}rope.scaling.type = {kind!r}; expected none, linear, yarn or longrope")
    elif factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    factors = {name: _values(model.tensors[name]) for name in architecture.divisors if name in model.tensors}
    for name, values in factors.items():
        if values.shape != (rotated // 2,) or not np.all(np.isfinite(values) & (values > 0)):
            raise ModelError(f"{name} has shape {values.shape}, expected {rotated // 2} positive numbers")
    # Of Phi-3, llama.cpp uses both factors whatever the type is, and its converter does not write the type.
    is_long = kind == "longrope" or (ROPE_FREQS not in architecture.divisors and ROPE_LONG in factors)
    wanted = {ROPE_LONG, ROPE_SHORT} if is_long else factors.keys() & {ROPE_FREQS}
    if factors.keys() != wanted or (factors and rope["rope_type"] != "default") or (is_long and factor != 1.0):
        raise ModelError(
            f"{keys.prefix}rope.scaling.type = {kind!r} and factor = {factor} with the tensors {sorted(factors)}: "
            f"longrope needs {ROPE_LONG} and {ROPE_SHORT} and no factor, and other types need none of them"
        )
    if is_long:
        return rope | _explicit(factors[ROPE_LONG], factors[ROPE_SHORT], attention, original)
    if kind != "yarn" and attention != 1.0:
        raise ModelError(f"{keys.prefix}rope.scaling.attn_factor = {attention} with type {kind!r}, expected 1")
    if not factors:
        return rope
    divisors = factors[ROPE_FREQS]
    largest, original = float(divisors.max()), LLAMA3["original_max_position_embeddings"]
    if context >= original and np.allclose(divisors, llama3_divisors(rope["rope_theta"], largest, rotated), rtol=1e-5):
        return {**rope, "rope_type": "llama3", "factor": largest, **LLAMA3}
    return rope | _explicit(divisors, divisors, 1.0, context)


def _explicit(long: np.ndarray, short: np.ndarray, attention: float, original: int) -> dict[str, Any]:
    """Return parameters with one divisor for each frequency, as stored in a file."""
    return {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def llama3_divisors(theta: float, factor: float, dimensions: int) -> np.ndarray:
    """Return the divisors of the frequencies of Llama 3.1 and later."""
    waves = 2 * np.pi * theta ** (np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    low, high, original = LLAMA3.values()
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    divisors: np.ndarray = 1 / ((1 - smooth) / factor + smooth)
    return divisors


def _llama(keys: Metadata, model: GgufModel) -> dict[str, Any]:
    biases = _has(model, BIASES), _has(model, MLP_BIASES)
    if keys.number("expert_count", 0):
        experts, used = _experts(keys)
        if any(biases):
            raise ModelError("it has experts and biases; transformers' Mixtral has no biases")
        return {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": used}
    keys.expect("expert_used_count", 0)
    return {"attention_bias": biases[0], "mlp_bias": biases[1], **_without_window(keys, model)}


def _experts(keys: Metadata) -> tuple[int, int]:
    """Return the number of experts of each layer, and of those that each token uses."""
    experts, used = keys.number("expert_count"), keys.number("expert_used_count")
    if not 1 <= used <= experts:
        raise ModelError(f"{keys.prefix}expert_used_count = {used} of {keys.prefix}expert_count = {experts}")
    return experts, used


def _qwen3_moe(keys: Metadata, model: GgufModel) -> dict[str, Any]:
    experts, used = _experts(keys)
    return {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma2(keys: Metadata, model: GgufModel) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
    } | _windows(keys, pattern=2, largest=46)


def _gemma3(keys: Metadata, model: GgufModel) -> dict[str, Any]:
    return {
        "final_logit_softcapping": keys.real("final_logit_softcapping", 0.0) or None,
        "local_rope": {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 10000.0)},
    } | _windows(keys, pattern=6, largest=62)


def _without_window(keys: Metadata, model: GgufModel) -> dict[str, Any]:
    """Refuse a window that llama.cpp ignores for this architecture, although the model was trained with it."""
    window, context = keys.number("attention.sliding_window", 0), keys.number("context_length")
    if 0 < window < context:
        raise ModelError(f"{keys.prefix}attention.sliding_window = {window} below the context of {context} tokens")
    return {}


def _windows(keys: Metadata, *, pattern: int, largest: int) -> dict[str, Any]:
    """Return settings of the attention of Gemma 2 and 3.

    pattern : every so many layers, one sees all tokens.
    largest : number of layers of the model of 27 billion parameters, whose scale follows from other sizes.
    """
    layers = keys.number("block_count")
    width = keys.number("embedding_length") // keys.number("attention.head_count")
    head_dim = _head_dim(keys)
    keys.expect("attention.sliding_window_pattern", pattern)
    for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        keys.expect(key, head_dim)
    return {
        "sliding_window": keys.number("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (idx + 1) % pattern else "full_attention" for idx in range(layers)],
        "query_pre_attn_scalar": width if layers == largest else head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _granite(keys: Metadata, model: GgufModel) -> dict[str, Any]:
    keys.expect("rope.scaling.finetuned", True)  # without it, nothing is rotated
    return {
        "attention_bias": _has(model, BIASES),
        "mlp_bias": _has(model, MLP_BIASES),
        "logits_scaling": keys.real("logit_scale"),
        "residual_multiplier": keys.real("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": keys.real("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": keys.real("attention.scale", 0.0) or _head_dim(keys) ** -0.5,
    }


def _smollm3(keys: Metadata, model: GgufModel) -> dict[str, Any]:
    layers = keys.number("block_count")
    return {"no_rope_layers": [int((idx + 1) % 4 != 0) for idx in range(layers)]}


def _head_dim(keys: Metadata) -> int:
    width = keys.number("embedding_length") // keys.number("attention.head_count")
    return keys.number("attention.key_length", width)


def _phi3(keys: Metadata, model: GgufModel) -> dict[str, Any]:
    window, context = keys.number("attention.sliding_window", 0), keys.number("context_length")
    return {
        "sliding_window": window if 0 < window < context else None,
        "original_max_position_embeddings": keys.number("rope.scaling.original_context_length", context),
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        {**NORMS, **ATTENTION, **BIASES, **MLP, **MLP_BIASES, **EXPERTS},
        _llama,
        interleaved=True,
        divisors=(ROPE_FREQS, ROPE_LONG, ROPE_SHORT),
    ),
    "qwen2": Architecture("qwen2", {**NORMS, **ATTENTION, **BIASES, **MLP}, _without_window),
    "qwen3": Architecture("qwen3", {**NORMS, **ATTENTION, **HEAD_NORMS, **MLP}, _without_window),
    "qwen3moe": Architecture("qwen3_moe", {**NORMS, **ATTENTION, **HEAD_NORMS, **EXPERTS}, _qwen3_moe),
    "gemma": Architecture(
        "gemma",
        {**NORMS, **ATTENTION, **MLP},
        lambda keys, model: {"hidden_act": "gelu_pytorch_tanh"},
        norm_offset=1.0,
    ),
    "gemma2": Architecture("gemma2", {**FOUR_NORMS, **ATTENTION, **MLP}, _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", {**FOUR_NORMS, **ATTENTION, **HEAD_NORMS, **MLP}, _gemma3, norm_offset=1.0),
    "granite": Architecture(
        "granite",
        {**NORMS, **ATTENTION, **BIASES, **MLP, **MLP_BIASES},
        _granite,
        interleaved=True,
        divisors=(ROPE_FREQS, ROPE_LONG, ROPE_SHORT),
    ),
    "smollm3": Architecture("smollm3", {**NORMS, **ATTENTION, **MLP}, _smollm3, interleaved=True),
    "olmo2": Architecture("olmo2", {**POST_NORMS, **ATTENTION, **HEAD_NORMS, **MLP}),
    "phi3": Architecture(
        "phi3",
        {
            **NORMS,
            "self_attn.qkv_proj.weight": ("attn_qkv.weight",),
            "self_attn.o_proj.weight": ("attn_output.weight",),
            "mlp.gate_up_proj.weight": ("ffn_up.weight",),
            "mlp.down_proj.weight": ("ffn_down.weight",),
        },
        _phi3,
        is_partial=True,
        divisors=(ROPE_LONG, ROPE_SHORT),
    ),
}


def _has(model: GgufModel, names: Names) -> bool:
    """Whether any layer has one of some parameters."""
    wanted = {name for sources in names.values() for name in sources}
    return any(name.split(".", 2)[-1] in wanted for name in model.tensors if name.startswith("blk."))


def _fill(built: Any, architecture: Architecture, config: Any, model: GgufModel) -> Sequence[tuple[str, Any]]:
    """Return the values of all parameters of a model; refuse missing and unused tensors."""
    import torch

    filled, missing, used = [], [], set(architecture.divisors)
    tied = {"lm_head.weight": GLOBAL["model.embed_tokens.weight"]} if config.tie_word_embeddings else {}
    for name, parameter in built.state_dict().items():
        sources = _sources(name, architecture, {**GLOBAL, **tied})
        absent = [source for source in sources if source not in model.tensors]
        used.update(sources)
        if absent and name.endswith("_proj.bias"):
            filled.append((name, torch.zeros(parameter.shape)))
            continue
        if absent:
            missing += absent
            continue
        value = np.concatenate([_values(model.tensors[each]) for each in sources], axis=1 if len(sources) > 1 else 0)
        if value.shape != tuple(parameter.shape):
            raise ModelError(
                f"the tensor {' + '.join(sources)} has shape {value.shape}, but the metadata asks for "
                f"{tuple(parameter.shape)}"
            )
        if architecture.norm_offset and name.endswith("norm.weight"):
            value = value - np.float32(architecture.norm_offset)
        if architecture.interleaved and name.split(".")[-2] in ("q_proj", "k_proj"):
            value = _half_apart(value, config.head_dim)
        filled.append((name, torch.from_numpy(np.ascontiguousarray(value))))
    if missing:
        raise ModelError(
            f"{len(missing)} tensors that the metadata asks for are not in the file ({_some(missing)}): it is "
            f"incomplete, or in parts, or has another layout"
        )
    if unused := sorted(model.tensors.keys() - used):
        raise ModelError(
            f"{len(unused)} tensors in the file have no place in {type(built).__name__} ({_some(unused)}): answers "
            f"would be wrong without them; use the model's folder of safetensors instead"
        )
    return filled


def _sources(name: str, architecture: Architecture, outside: Names) -> tuple[str, ...]:
    """Return the tensors that a parameter of transformers consists of."""
    if name in outside:
        return outside[name]
    _, _, layer, inside = name.split(".", 3)
    return tuple(f"blk.{layer}.{source}" for source in architecture.layer[inside])


def _half_apart(value: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder the outputs of a projection, (heads * head_dim, ...), from adjacent rotated pairs to halves of heads."""
    pairs = value.reshape(-1, head_dim // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)


def _values(tensor: GgufTensor) -> np.ndarray:
    """Return the values of a tensor in float32."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(tensor.kind)
    except ValueError:
        raise ModelError(f"the tensor {tensor.name} has the unknown type {tensor.kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count, width = int(np.prod(tensor.shape, dtype=np.int64)), tensor.shape[-1] if tensor.shape else 1
    if width % block:
        raise ModelError(f"the tensor {tensor.name} has rows of {width} values, which is no multiple of {block}")
    nbytes = count // block * block_bytes
    if tensor.offset + nbytes > tensor.file.stat().st_size:
        raise ModelError(f"{tensor.file.name} is cut short: the tensor {tensor.name} ends after the file")
    data = np.fromfile(tensor.file, np.uint8, nbytes, offset=tensor.offset)
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.F64):
        return (
            data.view({0: np.float32, 1: np.float16}.get(tensor.kind, np.float64))
            .reshape(tensor.shape)
            .astype(np.float32)
        )
    try:
        values: np.ndarray = dequantize(data.reshape(*tensor.shape[:-1], -1), kind)
    except NotImplementedError as error:
        raise ModelError(f"the tensor {tensor.name} has type {kind.name}, which gguf cannot dequantize") from error
    return values.reshape(tensor.shape)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
