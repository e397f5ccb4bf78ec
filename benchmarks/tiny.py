"""Small configurations of every causal language model that transformers knows, made from each one's own defaults.

One table says how large a size of a given name becomes; layers are chosen from the model's own, so that every kind of
layer it has is there. What neither can know is written down by model type.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import CONFIG_MAPPING

VOCAB = 199
PAD = 5  # in the prompts, too
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32
CONTEXT = 256  # positions a model has, where nothing else is said
WINDOW = 16
CHUNK = 24
LAYERS = 3  # at least, and one of every kind

# What an attribute of a name becomes, if the model has it.
_SIZES: tuple[tuple[Any, str], ...] = (
    (
        HIDDEN,
        "hidden_size d_model n_embd emb_dim embedding_size embedding_dim input_embedding_size output_embedding_size "
        "word_embed_proj_dim attention_hidden_size lru_width cross_attention_hidden_size",
    ),
    (
        HEADS,
        "num_attention_heads num_attention_heads_per_layer n_head n_heads num_heads attention_heads "
        "decoder_attention_heads encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads linear_num_heads linear_num_value_heads",
    ),
    (KV_HEADS, "swa_num_key_value_heads linear_num_key_heads index_n_heads"),
    (
        HEAD_DIM,
        "head_dim d_head attention_head_dim attention_head_size swa_head_dim kv_channels dim_head linear_head_dim "
        "linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim swa_v_head_dim index_head_dim ssm_state_size state_size mamba_d_state rotary_dim time_step_rank "
        "mamba_dt_rank index_topk hidden_size_per_layer_input laurel_rank",
    ),
    (16, "kv_lora_rank q_lora_rank o_lora_rank chunk_size mamba_chunk_size block_size"),
    (
        48,
        "intermediate_size ffn_dim dff dim_ff d_inner ffn_hidden_size feed_forward_size decoder_ffn_dim "
        "encoder_ffn_dim moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
        "shared_experts_intermediate_size shared_intermediate_size intermediate_size_mlp dense_intermediate_size "
        "moe_shared_expert_intermediate_size n_inner",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers",
    ),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_total"),
    (2, "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts experts_per_token"),
    (1, "n_group topk_group num_expert_group"),
    (VOCAB, "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (
        CONTEXT,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions "
        "model_max_length context_length",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_window_size window_size keep_window_size local_attention "
        "local_attention_window_len",
    ),
    (CHUNK, "attention_chunk_size"),
    (32, "floor_scale log_scaling_n_floor rel_extent"),
    (8, "local_attn_chunk_length lsh_attn_chunk_length"),
    (0.2, "initializer_range init_std embedding_initializer_range"),  # large: differences show
    (2.0, "attn_logit_softcapping"),
    (10.0, "final_logit_softcapping"),
    (1.0, "logit_scale"),
)
SIZES = {name: size for size, names in _SIZES for name in names.split()}
# Types whose own defaults their own constructor refuses, and what they have inside.
WITHOUT_DEFAULTS = {"gemma4_assistant": "gemma4_text"}
# Of layers that differ from the others of their model.
OTHER_SIZES = {
    "head_dim": 2 * HEAD_DIM,
    "num_attention_heads": KV_HEADS,
    "num_key_value_heads": KV_HEADS,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
}
# Token ids that a small vocabulary does not have.
TOKEN_IDS = ("_token_id", "_token_index")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers")

# What the table does not know, or knows wrongly, by model type.
ALTERNATE = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
ZAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layers_block_type": ALTERNATE,
    "attention_hidden_size": 2 * HIDDEN,
    "attention_head_dim": 16,
    "num_key_value_heads": HEADS,
}
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
ALL_SHARED = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "per_layer_config": {"01": {"head_dim": 16}},
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": MAMBA_HEADS | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": LAYERS},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "cpmant": {"position_bias_num_buckets": 32, "position_bias_max_distance": 64},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": KV_HEADS, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": HEADS, "first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "o_groups": 2,
        "num_nextn_predict_layers": 0,
    },
    "dots3_note_audio_encoder": {"adapter_out_dim": HIDDEN, "adapter_input_size": HIDDEN},
    "dots3_note_vision_encoder": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    "dots3_note_text": {"head_dim": 12 + HEAD_DIM},
    "doge": {"keep_window_size": CONTEXT, "num_experts": 4},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon_h1": MAMBA_HEADS | {"mamba_d_ssm": 64},
    "gemma4_assistant": {"text_config": ALL_SHARED, "backbone_hidden_size": HIDDEN},
    "gemma4_unified_assistant": {"text_config": ALL_SHARED, "backbone_hidden_size": HIDDEN},
    "gemma2": {"query_pre_attn_scalar": HEAD_DIM},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 6,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": MAMBA_HEADS
    | {
        "shared_intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "minicpm3": {"dim_model_base": HIDDEN, "scale_emb": 1},
    "minimax_m3_vl_text": {
        "index_block_size": 8,
        "index_topk_blocks": 3,
        "rotary_dim": 4,
    },
    "ministral": {"head_dim": HEAD_DIM},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 4, "block_types": ["recurrent", "attention"]},
    "reformer": {
        "attn_layers": ["local", "lsh", "local"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [8, 24],
        "num_hidden_layers": 3,
    },
    "roc_bert": {"pronunciation_vocab_size": VOCAB, "shape_vocab_size": VOCAB, "shape_embed_dim": 16},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": ZAMBA,
    "zamba2": ZAMBA
    | {
        "hybrid_layer_ids": [1, 3],
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "num_query_groups": HEADS,
        "adapter_rank": 8,
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        "sliding_window": WINDOW,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    },
}


def shrink(model_type: str, **changes: Any) -> Any:
    """Make a small configuration of a model type.

    Parameters
    ----------
    **changes
        Put in the place of what would be chosen; of a model that has a text model inside, of that.

    Raises
    ------
    Exception
        Whatever transformers raises about a configuration it cannot make.
    """
    made = CONFIG_MAPPING[model_type]
    if model_type in WITHOUT_DEFAULTS:
        defaults = {"text_config": CONFIG_MAPPING[WITHOUT_DEFAULTS[model_type]]().to_dict()}
    else:
        defaults = made().to_dict()
    return made(**shrink_values(model_type, defaults, changes))


def shrink_values(model_type: str, defaults: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Choose what a configuration's constructor is given, from its defaults; those inside it included."""
    chosen = EXCEPTIONS.get(model_type, {}) | changes
    inner = [name for name, value in defaults.items() if isinstance(value, dict) and "model_type" in value]
    values: dict[str, Any] = {}
    for name in inner:
        within = chosen.get(name, {}) | (changes if name == "text_config" else {})
        values[name] = shrink_values(str(defaults[name]["model_type"]), defaults[name], within)
    layers, heads = _layers(defaults), _heads(defaults)
    for name, value in defaults.items():
        if name not in inner and name not in chosen:
            small = _small_value(name, value, layers, heads, _count(defaults))
            if small is not None:
                values[name] = small
    own = chosen if "text_config" not in inner else {}
    return values | {name: value for name, value in own.items() if name not in inner}


def _small_value(name: str, value: Any, layers: list[int], heads: int | None, count: int | None) -> Any:
    """Choose a value for an attribute; None leaves it to the model."""
    if isinstance(value, list) and len(value) == count and name != "moe_layers":
        return [SIZES.get(name, value[at]) for at in layers]
    if name == "rope_parameters" and isinstance(value, dict):
        return _small_rope(value)
    if name == "per_layer_config" and value:
        differing = {f"{at:02d}": value.get(f"{old:02d}") for at, old in enumerate(layers)}
        return {
            at: {each: OTHER_SIZES.get(each, of) for each, of in its.items()} for at, its in differing.items() if its
        }
    if name == "is_decoder":
        return True  # in the mapping because it can be one
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if name in LAYER_COUNTS:
        return len(layers)
    if name in ("num_key_value_heads", "num_kv_heads", "num_query_groups"):
        return HEADS if value == heads else min(int(value), KV_HEADS)
    if name.endswith(TOKEN_IDS):
        return min(int(value), VOCAB - 1)
    return SIZES.get(name)


def _count(defaults: dict[str, Any]) -> int | None:
    return next((defaults[name] for name in LAYER_COUNTS if isinstance(defaults.get(name), int)), None)


def _heads(defaults: dict[str, Any]) -> int | None:
    return next((defaults[name] for name in ("num_attention_heads", "n_heads", "n_head") if name in defaults), None)


def _layers(defaults: dict[str, Any]) -> list[int]:
    """Choose layers so that of every kind there are two, up to five, in the model's order."""
    count = _count(defaults)
    if count is None:
        return []
    lists = [value for name, value in defaults.items() if isinstance(value, list) and len(value) == count]
    kinds = [
        repr([value[at] for value in lists if not isinstance(value[at], (int, float)) or value[at] in (0, 1)])
        for at in range(count)
    ]
    chosen: list[int] = []
    for rounds in (1, 2):
        for kind in dict.fromkeys(kinds):
            places = [at for at, each in enumerate(kinds) if each == kind]
            if len(chosen) < 5 and len(places) >= rounds:
                chosen.append(places[rounds - 1])
    if len(set(kinds)) == 1:
        chosen = list(range(min(LAYERS, count)))
    return sorted(chosen)


def _small_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Let thresholds come within the small context."""
    small: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            small[name] = _small_rope(value)
        elif name == "original_max_position_embeddings":
            small[name] = CONTEXT // 4
        else:
            small[name] = copy.deepcopy(value)
    if small.get("rope_type") == "yarn":
        small["factor"] = 4.0
    return small
