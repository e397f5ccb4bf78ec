"""Prompts and models for rows of several documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import transformers as tf
from models import COMMON, prompt, tiny

from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.transport.local import LocalTransport


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def alone(loaded: LoadedModel, ids: list[int], reserve: int = 0) -> Prefill:
    return prefill_kvr(loaded, ids, Partition((0, len(ids))), LocalTransport(), reserve_tokens=reserve)


def other_prompt(tokens: int) -> list[int]:
    """Prompts of different lengths that do not begin alike."""
    return prompt(2 * tokens)[tokens:]


def long_rope() -> LoadedModel:
    """Phi-3 whose rotary embedding changes for all positions once one of them is beyond the 32nd."""
    factors = [1.0 + at / 2 for at in range(4)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors[::-1]}
    config = tf.Phi3Config(
        **COMMON, num_key_value_heads=2, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=32
    )
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prepare_model(model, chain=True)
    return replace(tiny("phi3"), model=model, shape=probe_shape(config, torch.float32))
