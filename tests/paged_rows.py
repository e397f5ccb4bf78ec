"""Documents in pages, decoded together as on a GPU: a stand-in reads the pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_flash import VARLEN, FlashReference
from rows import Numbers, batch_of, other_prompt, ready
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvr_mpi.decode import step_graph
from kvr_mpi.decode.step_graph import Recorder
from kvr_mpi.kv import decode_cache, packed_row
from kvr_mpi.kv.arena import Arena
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.prefill.packed import prefill_packed

__all__ = ["Numbers", "ready"]  # for those that decode such documents

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

    for module in (packed_row, decode_cache):
        monkeypatch.setattr(module, "takes_flash", takes)
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
    def record(recorder: Recorder) -> Iterator[Recording]:
        made.append(Recording())
        with made[-1]:
            yield made[-1]
        made[-1].spoil()

    def as_on_a_gpu(loaded: LoadedModel) -> str | None:
        why = why_not(loaded)
        return None if why and "CPUs" in why else why

    monkeypatch.setattr(Recorder, "record", record)
    monkeypatch.setattr(step_graph, "_why_not", as_on_a_gpu)
    return made


def arena_of(loaded: LoadedModel, pages: int) -> Arena:
    """With extents of so many pages for each head of each layer."""
    arena = Arena(loaded.shape.layers, loaded.dtype, loaded.device, extent_bytes=0)
    arena.spare_bytes = pages * arena.page_bytes
    return arena


def answer(loaded: LoadedModel, arena: Arena | None, end: int | None = None) -> dict[str, tuple[int, ...]]:
    """Decode documents that join at any step, and leave when they are answered."""
    batch = batch_of(loaded, NEW_TOKENS, eos_token_id=end)
    chance, found, waiting = random.Random(1), dict[str, tuple[int, ...]](), list(LENGTHS)
    while waiting or batch.running:
        for _ in range(min(len(waiting), chance.randint(0, 2))):
            ids = other_prompt(waiting.pop(0))
            (prefill,) = prefill_packed(loaded, [ids], reserve_tokens=NEW_TOKENS, arena=arena)
            assert all((layer.store.extent is not None) == (arena is not None) for layer in prefill.cache.layers)
            batch.add(str(len(ids)), prefill, ids, 0)
        for each in batch.step():
            assert each.answer is not None
            found[each.key] = each.answer.token_ids
    return found
