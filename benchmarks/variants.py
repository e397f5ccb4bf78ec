"""What the mapping's own entries do not show: rotary types, windows, heads, caps, shared keys and padding, in turn."""

from __future__ import annotations

from typing import Any

from benchmarks.tiny import CONTEXT, HEADS, KV_HEADS, PAD, WINDOW

Variants = dict[
    str, tuple[str, dict[str, Any]]
]  # by name: a model type, and what is changed in its small configuration


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "rope_type": kind} | parameters


# Factors of longrope.
SHORT, LONG = [1.0, 1.1, 1.3, 1.5], [2.0, 3.0, 4.0, 6.0]


def _rope_variants() -> Variants:
    """Rotary types that know no length, and types that differ from layer to layer."""
    return {
        "llama linear": ("llama", {"rope_parameters": _rope("linear", factor=4.0)}),
        "llama proportional": ("llama", {"rope_parameters": _rope("proportional", partial_rotary_factor=0.5)}),
        "phi partial rotary": ("phi", {"rope_parameters": _rope("default", partial_rotary_factor=0.5)}),
        "gemma3 dynamic full layers": (
            "gemma3_text",
            {
                "max_position_embeddings": 64,
                "rope_parameters": {
                    "sliding_attention": _rope("default"),
                    "full_attention": _rope("dynamic", factor=4.0),
                },
            },
        ),
        "olmo3 longrope full layers": (
            "olmo3",
            {
                "rope_parameters": {
                    "sliding_attention": _rope("default"),
                    "full_attention": _rope(
                        "longrope",
                        factor=4.0,
                        short_factor=SHORT,
                        long_factor=LONG,
                        original_max_position_embeddings=64,
                    ),
                },
            },
        ),
    }


def _length_variants() -> Variants:
    """Every rotary type below and above its threshold (prompts have 90 tokens), and with it in the answer."""
    variants: Variants = {}
    for where, original in {"below": 256, "above": 64, "crossed in the answer": 96}.items():
        context = {"max_position_embeddings": 4 * original}
        yarn = _rope("yarn", factor=4.0, original_max_position_embeddings=original)
        longrope = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": original}
        llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
        variants |= {
            f"llama dynamic {where}": (
                "llama",
                {"max_position_embeddings": original, "rope_parameters": _rope("dynamic", factor=4.0)},
            ),
            f"qwen2 dynamic {where}": (
                "qwen2",
                {"max_position_embeddings": original, "rope_parameters": _rope("dynamic", factor=4.0)},
            ),
            f"llama yarn {where}": ("llama", context | {"rope_parameters": yarn}),
            f"llama longrope {where}": (
                "llama",
                context | {"rope_parameters": _rope("longrope", factor=4.0, **longrope)},
            ),
            f"phi3 longrope {where}": (
                "phi3",
                context
                | {"original_max_position_embeddings": original, "rope_parameters": _rope("longrope", **longrope)},
            ),
            f"phimoe longrope {where}": (
                "phimoe",
                context
                | {
                    "rope_parameters": _rope("longrope", short_mscale=1.1, long_mscale=1.3, **longrope),
                    "sliding_window": WINDOW,
                },
            ),
            f"minicpm3 longrope {where}": (
                "minicpm3",
                context | {"rope_parameters": _rope("longrope", factor=4.0, **longrope)},
            ),
            f"llama llama3 {where}": ("llama", context | {"rope_parameters": _rope("llama3", factor=8.0, **llama3)}),
            f"deepseek_v3 yarn {where}": (
                "deepseek_v3",
                context | {"rope_parameters": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}},
            ),
        }
    return variants


def _window_variants() -> Variants:
    """Windows and chunks."""
    some = ["sliding_attention", "full_attention", "sliding_attention"]
    variants: Variants = {
        "mistral full": ("mistral", {"sliding_window": None}),
        "mistral window of 2": ("mistral", {"sliding_window": 2}),
        "mistral window longer than the prompt": ("mistral", {"sliding_window": 128}),
        "mistral window longer than the context": ("mistral", {"sliding_window": 2 * CONTEXT}),
        "qwen2 some windows": (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 1, "layer_types": some[::-1]},
        ),
        "qwen3 some windows": ("qwen3", {"use_sliding_window": True, "layer_types": some}),
        "smollm3 windows": (
            "smollm3",
            {
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
                "num_hidden_layers": 4,
                "no_rope_layers": [1, 0, 1, 0],
            },
        ),
        **{
            f"{name} window": (name, {"sliding_window": WINDOW})
            for name in (
                "mixtral",
                "starcoder2",
                "phi3",
                "phimoe",
                "doge",
                "ministral3",
                "nemotron_h",
                "phi4_multimodal",
            )
        },
        "doge dynamic mask": ("doge", {"keep_window_size": WINDOW}),
        "laguna windows": ("laguna", {"layer_types": some}),
        "mellum windows": ("mellum", {"layer_types": some}),
        "dots1 windows": ("dots1", {"layer_types": some}),
    }
    return variants


def _head_variants() -> Variants:
    """Heads, biases, and caps."""
    return {
        "llama4 without temperature": ("llama4_text", {"attn_temperature_tuning": False}),
        "llama mha": ("llama", {"num_key_value_heads": HEADS}),
        "llama gqa": ("llama", {"num_key_value_heads": KV_HEADS}),
        "llama mqa": ("llama", {"num_key_value_heads": 1}),
        "llama wide heads": ("llama", {"head_dim": 24}),
        "llama tied": ("llama", {"tie_word_embeddings": True}),
        "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
        "falcon mqa": ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
        "falcon mha": ("falcon", {"multi_query": False, "new_decoder_architecture": False}),
        "falcon gqa": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS}),
        "falcon alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": False}),
        "falcon alibi mqa": ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": True}),
        "gpt_bigcode mha": ("gpt_bigcode", {"multi_query": False}),
        "cohere qk norm": ("cohere", {"use_qk_norm": True}),
        "stablelm parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
        "gemma2 no cap": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        "gemma3 bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
        "gpt_neo global": (
            "gpt_neo",
            {"num_layers": 2, "attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2},
        ),
        "deepseek_v2 no query rank": ("deepseek_v2", {"q_lora_rank": None}),
    }


def _mechanism_variants() -> Variants:
    """Layers that share keys, experts, encoders that are told to be decoders, padding tokens."""
    variants: Variants = {
        "gemma4 shared keys": (
            "gemma4_text",
            {
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 3,
                "per_layer_config": {"02": {"head_dim": 16}, "05": {"head_dim": 16}},
            },
        ),
        "gemma4 keys are values": ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
        "gemma4 moe": (
            "gemma4_text",
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
        ),
        "gemma3n no shared keys": ("gemma3n_text", {"num_kv_shared_layers": 0}),
        "granitemoehybrid attention only": (
            "granitemoehybrid",
            {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3, "position_embedding_type": "rope"},
        ),
        "zamba2 rope": ("zamba2", {"use_mem_rope": True}),
        "hrm_text causal": ("hrm_text", {"prefix_lm": False}),
        "mamba2 narrow": ("mamba2", {"chunk_size": 4}),
    }
    for name in (
        "bert",
        "roberta",
        "electra",
        "rembert",
        "bert-generation",
        "xlm-roberta",
        "megatron-bert",
        "roformer",
    ):
        variants[f"{name} as an encoder"] = (name, {"is_decoder": False})
    for name in ("llama", "gpt2", "opt", "phi3", "xglm", "biogpt", "roberta", "mistral", "falcon", "bart"):
        variants[f"{name} padding in the prompt"] = (name, {"pad_token_id": PAD})
    return variants


def variants() -> Variants:
    """All variants, by name."""
    return _rope_variants() | _length_variants() | _window_variants() | _head_variants() | _mechanism_variants()
