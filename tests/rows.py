"""Prompts, models and batches for rows of several documents."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers as tf
from fake_flash import VARLEN, FlashReference
from models import COMMON, prompt, random_model, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvr_mpi.decode import step_graph
from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.group import BatchEntry, Group
from kvr_mpi.kv import row
from kvr_mpi.kv.pool import PAGE_ROWS, Pool
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams, prepare_model
from kvr_mpi.model.tp_group import TensorParallelGroup, recording
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport


class Numbers:
    """A tokenizer whose texts are numbers."""

    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()
    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})
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
    return prefill_kvr(loaded, ids, partition, chain, reserve_tokens=reserve, is_sharded=True, last=home)


def other_prompt(tokens: int) -> list[int]:
    """Prompts of different lengths that do not begin alike."""
    return prompt(2 * tokens)[tokens:]


def batch_of(
    loaded: LoadedModel, new_tokens: int, group: Group | None = None, stop: Sequence[str] = (), **config: Any
) -> DecodeBatch:
    """A batch of greedy answers, unless the configuration says otherwise."""
    settings = tf.GenerationConfig(**{"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | config)
    return DecodeBatch(loaded, settings, stop=stop, max_new_tokens=new_tokens, group=group)


def finish(batch: DecodeBatch) -> dict[Any, BatchEntry]:
    """Begin what waits, and step until all is answered."""
    found, steps = {one.key: one for one in batch.begin()}, 0
    while batch.running:
        assert (steps := steps + 1) < 1000, "it never ends"
        found |= {one.key: one for one in batch.step()}
    return found


def tokens_of(found: dict[Any, BatchEntry]) -> dict[Any, tuple[int, ...]]:
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


# Documents in pages, decoded together as on a GPU: a stand-in reads the pages


NEW_TOKENS = 9
LENGTHS = [5, 250, 1, 300, 16]  # some answers cross a page
BLOCK_TABLE = [each.name for each in VARLEN._schema.arguments].index("block_table")


class Watched(FlashReference):
    """Counts the calls of attention for all documents, and those of them that read pages."""

    calls = paged_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.calls += func is VARLEN
        self.paged_calls += func is VARLEN and any(each is not None for each in args[BLOCK_TABLE : BLOCK_TABLE + 1])
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def pages_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Decode as on a GPU: by a block table, which a stand-in reads."""

    def takes(query: torch.Tensor, values: torch.Tensor, params: AttentionParams) -> bool:
        return params.is_plain and query.shape[-1] == values.shape[-1]

    monkeypatch.setattr(row, "takes_flash", takes)
    with Watched() as watched:
        yield watched


Operation = tuple[Any, Any, Any, list[Any]]


class Recording(TorchDispatchMode):
    """A graph of operations, each with the tensors that it gave: replayed, these are filled again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tree_leaves(found)))
        return found

    def spoil(self) -> None:
        """What was recorded has not run."""
        for func, _, _, found in self.operations:
            if all(each.alias_info is None for each in func._schema.returns):
                for each in found:
                    if isinstance(each, torch.Tensor):
                        each.fill_(-1)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, found in self.operations:
            for old, new in zip(found, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def steps_recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Record steps as on a GPU; returns all graphs, as they are made."""
    made: list[Recording] = []
    why_not = step_graph._why_not

    @contextmanager
    def record(device: torch.device, tp_group: TensorParallelGroup | None) -> Iterator[Recording]:
        made.append(graph := Recording())
        with recording(tp_group, graph), graph:
            yield graph
        graph.spoil()

    def as_on_a_gpu(loaded: LoadedModel) -> str | None:
        why = why_not(loaded)
        return None if why and "CPUs" in why else why

    monkeypatch.setattr(step_graph, "record", record)
    monkeypatch.setattr(step_graph, "_why_not", as_on_a_gpu)
    return made


def pages_of(loaded: LoadedModel, pages: int) -> Pool:
    """Make a paged pool with so many pages for each head of each layer."""
    return Pool(loaded.shape.layers, loaded.dtype, loaded.device, pages * PAGE_ROWS)


def check_integrity(pool: Pool, *held: SequenceKV | None) -> None:
    """Check that a pool holds what these sequences hold, and nothing else."""
    pool.check_integrity(block for sequence in held if sequence is not None for block in sequence.blocks)


def answer(loaded: LoadedModel, pool: Pool, end: int | None = None) -> dict[str, tuple[int, ...]]:
    """Decode documents that join at any step, and leave when they are answered."""
    batch = batch_of(loaded, NEW_TOKENS, eos_token_id=end)
    chance, found, waiting = random.Random(1), dict[str, tuple[int, ...]](), list(LENGTHS)
    while waiting or batch.running:
        for _ in range(min(len(waiting), chance.randint(0, 2))):
            ids = other_prompt(waiting.pop(0))
            (prefill,) = prefill_packed(loaded, [ids], reserve_tokens=NEW_TOKENS, pool=pool)
            batch.add(str(len(ids)), prefill, ids, 0)
        for each in batch.step():
            assert each.answer is not None
            found[each.key] = each.answer.token_ids
            each.prefill.release()
        check_integrity(pool, *(one.cache for one in batch.prefills))
    return found
