"""What one process and a chain of threads give, for tests to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from models import COMMON, CONFIGS
from models import prompt as ids_of
from tokenizers import Tokenizer, models

from kvr_mpi.model import LoadedModel, load_model
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import continued
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr, prefill_single
from kvr_mpi.runtime.job_ranks import JobRanks, join_groups
from kvr_mpi.topology import Topology
from kvr_mpi.transport.local import LocalTransport, run_local

NEW_TOKENS = 32


def greedy(model: Any, prefill: Prefill, count: int) -> list[int]:
    """Decode the likeliest tokens after a prefill."""
    return continued(model, prefill, count).tokens


def single(loaded: LoadedModel, ids: Sequence[int]) -> Prefill:
    prepare_model(loaded.model, chain=False)
    return prefill_single(loaded.model, ids, loaded.device)


def all_ranks(loaded: LoadedModel, ids: Sequence[int], bounds: Sequence[int], **options: Any) -> list[Prefill]:
    """What each rank of a chain of threads has."""
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    partition = Partition(tuple(bounds))
    ranks = run_local(partition.size, lambda rank: prefill_kvr(loaded, ids, partition, rank, **options))
    assert all(rank.logits is None for rank in ranks[:-1])
    return ranks


def chain(loaded: LoadedModel, ids: Sequence[int], bounds: Sequence[int], reserve: int = 0, **options: Any) -> Prefill:
    return all_ranks(loaded, ids, bounds, reserve_tokens=reserve, **options)[-1]


# Tiny models in folders, and their parts on ranks that are threads


__all__ = ["ids_of"]
CPU = torch.device("cpu")
LATENTS: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, Callable[[], Any]] = {
    "llama": CONFIGS["llama-gqa"],
    "qwen3": lambda: tf.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    "mixtral": CONFIGS["mixtral-moe"],
    "qwen2": CONFIGS["qwen2"],
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
    ),
    "qwen2-moe": lambda: tf.Qwen2MoeConfig(
        **COMMON,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    # Fused projections.
    "phi3": lambda: tf.Phi3Config(**COMMON, num_key_value_heads=2, pad_token_id=0, eos_token_id=None),
    "glm4": lambda: tf.Glm4Config(**COMMON, num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1),
    "glm4-moe": lambda: tf.Glm4MoeConfig(  # shared experts
        **COMMON,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        use_qk_norm=True,
    ),
    # Latents, which all heads share, and sinks; of some, transformers' plan leaves out attention, or there is none.
    "deepseek-v3": lambda: tf.DeepseekV3Config(**LATENTS, q_lora_rank=24, n_shared_experts=2),
    "deepseek-v2": lambda: tf.DeepseekV2Config(**LATENTS, q_lora_rank=None, n_shared_experts=1),
    "glm4-moe-lite": lambda: tf.Glm4MoeLiteConfig(**LATENTS, q_lora_rank=24, n_shared_experts=1),
    "gpt-oss": CONFIGS["gpt-oss-sinks"],
    "gemma2": CONFIGS["gemma2-softcap"],
    "mistral": CONFIGS["mistral-window"],
    "llama-biases": lambda: tf.LlamaConfig(**COMMON, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
}


def make_folder(folder: Path, kind: str) -> tuple[Path, Any]:
    """Save a random model of a kind, biases included, with a tokenizer of one word; return it, too."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32).eval()
    for name, weights in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weights)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tf.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder, model


def truth_of(model: Any, ids: Sequence[int], new_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Logits of plain transformers after a prompt, and its greedy answer."""
    prepare_model(model, chain=False)
    found = continued(model, prefill_single(model, ids, CPU), new_tokens)
    return found.logits, found.tokens


def on_groups(
    folder: Path, groups: int, size: int, work: Callable[[JobRanks, LoadedModel], Any], device: torch.device = CPU
) -> list[Any]:
    """Do something on every rank of a chain of groups, each with its part of a model, ready for chains."""

    def rank(world: LocalTransport) -> Any:
        ranks = join_groups(world, world, Topology(world.size, world.size, size), device)
        assert ranks.tp_group is not None
        loaded = load_model(str(folder), tp_group=ranks.tp_group, device="cpu", cache_dir=folder)
        prepare_model(loaded.model, chain=True)
        return work(ranks, loaded)

    return run_local(groups * size, rank)
