"""Tiny random models of every kind of attention, built from configurations."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.memory_budget import Footprint, footprint_of

VOCAB = 199
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
FALCON = {name: value for name, value in COMMON.items() if name != "intermediate_size"}

# The issue of attention is what distinguishes them: MHA, GQA, MQA, windows, caps, sinks, latents, own SDPA calls.
CONFIGS: dict[str, Any] = {
    "llama-gqa": lambda: tf.LlamaConfig(**COMMON, num_key_value_heads=2),
    "llama-mha": lambda: tf.LlamaConfig(**COMMON, num_key_value_heads=6),
    "mistral-window": lambda: tf.MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=16),
    "qwen2": lambda: tf.Qwen2Config(**COMMON, num_key_value_heads=3),
    "qwen2-some-windows": lambda: tf.Qwen2Config(
        **COMMON, num_key_value_heads=3, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=6, n_positions=512, initializer_range=0.2
    ),
    "falcon-mqa": lambda: tf.FalconConfig(**FALCON, multi_query=True, new_decoder_architecture=False),
    "falcon-mha": lambda: tf.FalconConfig(**FALCON, multi_query=False, new_decoder_architecture=False),
    "falcon-gqa": lambda: tf.FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "stablelm": lambda: tf.StableLmConfig(**COMMON, num_key_value_heads=2),
    "gemma2-softcap": lambda: tf.Gemma2Config(**COMMON, num_key_value_heads=2, head_dim=8, sliding_window=16),
    "gpt-oss-sinks": lambda: tf.GptOssConfig(
        **COMMON, num_key_value_heads=2, head_dim=8, sliding_window=16, num_local_experts=4
    ),
    "mixtral-moe": lambda: tf.MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=4),
    "phi3": lambda: tf.Phi3Config(**COMMON, num_key_value_heads=2, pad_token_id=0),
    "llama4-chunks": lambda: tf.Llama4TextConfig(
        **COMMON, num_key_value_heads=2, head_dim=8, num_local_experts=2, attention_chunk_size=32
    ),
    "deepseek-latents": lambda: tf.DeepseekV3Config(
        **COMMON,
        num_key_value_heads=6,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
    ),
    "opt": lambda: tf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=512,
        word_embed_proj_dim=48,
        init_std=0.2,
    ),
}

# Their attention cannot be taken over: ALiBi, a bias of their own.
WHOLE: dict[str, Any] = {
    "bloom-own-attention": lambda: tf.BloomConfig(
        vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=6, initializer_range=0.2
    ),
    "falcon-alibi": lambda: tf.FalconConfig(**FALCON, alibi=True, new_decoder_architecture=False),
}

# Some of their layers keep a state: a convolution's, a recurrence's, or both beside attention.
STATES: dict[str, Any] = {
    "lfm2-convolutions": lambda: tf.Lfm2Config(
        **COMMON, num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], conv_L_cache=3
    ),
    "qwen3-next-delta-rule": lambda: tf.Qwen3NextConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "falcon-h1-both": lambda: tf.FalconH1Config(
        **COMMON, num_key_value_heads=2, head_dim=8, mamba_d_ssm=48, mamba_n_heads=6, mamba_d_head=8, mamba_d_state=8
    ),
}

# transformers itself does not go on from their cache with several tokens; they run with strategy = "single".
SINGLE_ONLY: dict[str, Any] = {
    "mamba-no-attention": lambda: tf.MambaConfig(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2),
}


def random_model(config: Any, dtype: torch.dtype = torch.float32, name: str = "tiny") -> LoadedModel:
    """A random model; the same weights in every dtype."""
    torch.manual_seed(0)
    return LoadedModel(
        model=tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(dtype),
        tokenizer=None,
        shape=probe_shape(config, dtype),
        name=name,
        fingerprint=name,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def save_tiny_model(folder: Path, tokenizer: Any, layers: int = 3) -> Path:
    """Save a tiny random Llama with a tokenizer."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@functools.cache
def tiny(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A random model of a kind."""
    return replace(
        random_model({**CONFIGS, **WHOLE, **STATES, **SINGLE_ONLY}[name](), dtype, name),
        attends_in_parts=name not in WHOLE,
        cuts_last_layer=name not in {*WHOLE, "llama4-chunks"},
    )


def deep(layers: int) -> LoadedModel:
    """A tiny Llama of so many layers."""
    loaded = random_model(tf.LlamaConfig(**{**COMMON, "num_hidden_layers": layers}, num_key_value_heads=2))
    prepare_model(loaded.model, chain=True)
    return loaded


KNOWN: dict[tuple[str, ...], Footprint] = {}


def known_footprint(config: Any, dtype: torch.dtype, **how: Any) -> Footprint:
    """What prompts of a model take, counted once for all jobs with it: half of what a tiny job computes."""
    key = config.to_json_string(use_diff=False), str(dtype), repr(how)
    if key not in KNOWN:
        KNOWN[key] = footprint_of(config, dtype, **how)
    return KNOWN[key]


def prompt(tokens: int, vocab: int = VOCAB) -> list[int]:
    """Ids without a pattern a model could use."""
    return [(position * position * 7 + 31 * position + 3) % vocab for position in range(tokens)]
