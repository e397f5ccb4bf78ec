"""Prompts, models and batches for rows of several documents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import transformers as tf
from models import COMMON, prompt, random_model, tiny

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.group import Entry, Group
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport


class Numbers:
    """A tokenizer whose texts are numbers."""

    all_special_ids: tuple[int, ...] = ()
    unk_token_id = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split() if word.isdecimal()]}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, ids))

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(token)


def ready(model: str | LoadedModel, *, chain: bool = True) -> LoadedModel:
    """A tiny model, prepared for chains, whose texts are numbers."""
    loaded = tiny(model) if isinstance(model, str) else model
    prepare_model(loaded.model, chain=chain, in_parts=loaded.attends_in_parts)
    return replace(loaded, tokenizer=Numbers())


def alone(loaded: LoadedModel, ids: Sequence[int], reserve: int = 0) -> Prefill:
    return prefill_kvr(loaded, ids, Partition((0, len(ids))), LocalTransport(), reserve_tokens=reserve)


def spread(loaded: LoadedModel, ids: Sequence[int], chain: Transport, home: int, reserve: int = 7) -> Prefill:
    """A prompt whose keys and values stay where they were computed."""
    partition = Partition.by_ratio(len(ids), [len(ids) % 3 + 1, 1, 5][: chain.size])
    return prefill_kvr(loaded, ids, partition, chain, reserve_tokens=reserve, is_spread=True, last=home)


def other_prompt(tokens: int) -> list[int]:
    """Prompts of different lengths that do not begin alike."""
    return prompt(2 * tokens)[tokens:]


def batch_of(
    loaded: LoadedModel, new_tokens: int, group: Group | None = None, stop: Sequence[str] = (), **config: Any
) -> DecodeBatch:
    """A batch of greedy answers, unless the configuration says otherwise."""
    settings = tf.GenerationConfig(**{"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | config)
    return DecodeBatch(loaded, settings, stop=stop, max_new_tokens=new_tokens, group=group)


def finish(batch: DecodeBatch) -> dict[Any, Entry]:
    """Begin what waits, and step until all is answered."""
    found, steps = {one.key: one for one in batch.begin()}, 0
    while batch.running:
        assert (steps := steps + 1) < 1000, "it never ends"
        found |= {one.key: one for one in batch.step()}
    return found


def tokens_of(found: dict[Any, Entry]) -> dict[Any, tuple[int, ...]]:
    """The answers, of those that have one."""
    return {key: one.answer.token_ids for key, one in found.items() if one.answer is not None}


def run_out_at(loaded: LoadedModel, place: str, is_due: Callable[[int], bool]) -> tuple[Any, threading.local]:
    """Let a module run out of memory on the ranks, and in the runs of them, that are asked for.

    Returns its hook, and where a rank says which it is; before that it does not fail.
    """
    run = threading.local()

    def fail(module: Any, *args: Any) -> None:
        if getattr(run, "rank", -1) >= 0 and is_due(run.rank):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    module = next(module for name, module in loaded.model.named_modules() if name.endswith(place))
    return module.register_forward_pre_hook(fail), run


def count_down(times: dict[int, int]) -> Callable[[int], bool]:
    """Whether a rank is due, the first so many times; all have been where every count is below 0."""

    def is_due(rank: int) -> bool:
        times[rank] = times.get(rank, 0) - 1
        return times[rank] >= 0

    return is_due


def long_rope() -> LoadedModel:
    """Phi-3 whose rotary embedding changes for all positions once one of them is beyond the 32nd."""
    factors = [1.0 + at / 2 for at in range(4)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors[::-1]}
    loaded = random_model(
        tf.Phi3Config(
            **COMMON, num_key_value_heads=2, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=32
        )
    )
    prepare_model(loaded.model, chain=True)
    return loaded
