"""Documents in pages, decoded together as on a GPU: a stand-in reads the pages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_gpu import VARLEN, FlashReference
from models import tiny
from rows import other_prompt
from transformers import GenerationConfig

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.kv import packed_row, units
from kvr_mpi.kv.arena import Arena
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams, prepare_model
from kvr_mpi.prefill.packed import prefill_packed

NEW_TOKENS = 9
LENGTHS = [5, 250, 1, 300, 16]  # some answers cross a page
BLOCK_TABLE = [each.name for each in VARLEN._schema.arguments].index("block_table")


class Numbers:
    """A tokenizer whose texts are numbers."""

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, ids))


class Watched(FlashReference):
    """Counts the calls of attention that read pages."""

    paged_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.paged_calls += func is VARLEN and any(each is not None for each in args[BLOCK_TABLE : BLOCK_TABLE + 1])
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def pages_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Decode as on a GPU: by a block table, which a stand-in reads."""

    def takes(query: torch.Tensor, values: torch.Tensor, params: AttentionParams) -> bool:
        return params.is_plain and query.shape[-1] == values.shape[-1]

    monkeypatch.setattr(packed_row, "takes_flash", takes)
    monkeypatch.setattr(units, "takes_flash", takes)
    with Watched() as watched:
        yield watched


def ready(name: str) -> LoadedModel:
    """A tiny model, prepared for chains."""
    loaded = replace(tiny(name), tokenizer=Numbers())
    prepare_model(loaded.model, chain=True)
    return loaded


def arena_of(loaded: LoadedModel, pages: int) -> Arena:
    """With extents of so many pages for each head of each layer."""
    arena = Arena(loaded.shape.layers, loaded.dtype, loaded.device, extent_bytes=0)
    arena.spare_bytes = pages * arena.page_bytes
    return arena


def answer(loaded: LoadedModel, arena: Arena | None, end: int | None = None) -> dict[str, tuple[int, ...]]:
    """Decode documents that join at any step, and leave when they are answered."""
    config = GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=0)
    batch: DecodeBatch[str] = DecodeBatch(loaded, config, stop=(), max_new_tokens=NEW_TOKENS)
    chance, found, waiting = random.Random(1), dict[str, tuple[int, ...]](), list(LENGTHS)
    while waiting or batch.running:
        for _ in range(min(len(waiting), chance.randint(0, 2))):
            ids = other_prompt(waiting.pop(0))
            (prefill,) = prefill_packed(loaded, [ids], reserve_tokens=NEW_TOKENS, arena=arena)
            assert all((layer.buffer is None) == (arena is not None) for layer in prefill.cache.layers)
            batch.add(str(len(ids)), prefill, ids, 0)
        for each in batch.step():
            assert each.answer is not None
            found[each.key] = each.answer.token_ids
    return found
