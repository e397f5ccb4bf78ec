"""Prompts that begin alike hold one copy of what they begin with, and answer as each would alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import prompt
from rows import alone, arena_of, batch_of, finish, pages_read, ready, steps_recorded, tokens_of
from torch.multiprocessing.reductions import StorageWeakRef

from kvr_mpi.decode import step_graph
from kvr_mpi.kv.arena import PAGE_ROWS, Arena
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.one_prompt import Prefill, compute_prefix, prefix_of_cache
from kvr_mpi.prefill.packed import prefill_packed

NEW_TOKENS = 6
NAMES = ["llama-gqa", "mistral-window", "qwen2-some-windows", "gemma2-softcap", "gpt-oss-sinks", "llama4-chunks"]
NAMES += ["opt", "falcon-mha"]
# The last one goes on for longer than a window or chunk.
ENDS = [[5, 7, 9], [11], [3] * 4, [8, 1, 4, 4, 2] * 9]


def shared(loaded: LoadedModel, tokens: int, arena: Arena | None, before: int = 0) -> SharedPrefix:
    """A document, which itself goes on from instructions if so many tokens of it are."""
    ids = prompt(tokens)
    instructions = compute_prefix(loaded, ids[:before]) if before else None
    (prefill,) = prefill_packed(loaded, [ids], prefix=instructions, arena=arena)
    return prefix_of_cache(ids, prefill.cache)


def ask(
    loaded: LoadedModel, document: SharedPrefix, ends: Sequence[Sequence[int]], arena: Arena | None
) -> list[Prefill]:
    ids = [[*document.ids, *end] for end in ends]
    return prefill_packed(loaded, ids, prefix=document, reserve_tokens=NEW_TOKENS, arena=arena)


def answered(loaded: LoadedModel, ids: Sequence[Sequence[int]], prefills: Sequence[Prefill]) -> list[tuple[int, ...]]:
    """Decode together."""
    batch = batch_of(loaded, NEW_TOKENS)
    for at, (prefill, each) in enumerate(zip(prefills, ids, strict=True)):
        batch.add(at, prefill, each, 0)
    return [tokens for _, tokens in sorted(tokens_of(finish(batch)).items())]


def storages(caches: Sequence[Any]) -> dict[int, torch.UntypedStorage]:
    """All memory that caches hold, each piece once."""
    held = {}
    for layer in (layer for cache in caches for layer in cache.layers):
        store = layer.store
        for each in (rows for run in (*store.runs, *store.shared) for rows in (run.keys, run.values)):
            held[each.untyped_storage().data_ptr()] = each.untyped_storage()
    return held


@pytest.mark.parametrize(
    "way",
    [
        "own memory",
        "own memory, after instructions",
        "pages, after instructions",
        "pages, read at once",
        "pages, read at once, recorded",
        "pages, no room beside",
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_each_prompt_alone(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts go on from a document, and it may go on from instructions, which are shared, too."""
    loaded = ready(name)
    arena = None if "own memory" in way else arena_of(loaded, 1 if "no room" in way else 40)
    ids = [[*prompt(300), *end] for end in ENDS]
    truth = [answered(loaded, [each], [alone(loaded, each, NEW_TOKENS)])[0] for each in ids]
    if "recorded" in way:
        monkeypatch.setattr(step_graph, "STEPS_BEFORE", 0)
        steps_recorded(monkeypatch)
    with pages_read(monkeypatch) if "at once" in way else nullcontext():
        document = shared(loaded, 300, arena, before=40 if "after" in way else 0)
        prefills = ask(loaded, document, ENDS, arena)
        assert [each.known_tokens for each in prefills] == [300] * len(ENDS)
        assert answered(loaded, ids, prefills) == truth
        (one,) = ask(loaded, document, ENDS[-1:], arena)
        assert answered(loaded, ids[-1:], [one]) == truth[-1:], "and by itself, without being packed"
    with pytest.raises(ValueError, match="does not begin with the shared prefix"):
        prefill_packed(loaded, [ids[0], prompt(310)[1:]], prefix=document)


@pytest.mark.parametrize("pages", [False, True])
def test_prompts_hold_one_copy_of_their_document_until_the_last_one_leaves(pages: bool) -> None:
    loaded, tokens = ready("llama-gqa"), 3 * PAGE_ROWS + 10
    arena, ids = arena_of(loaded, 40) if pages else None, [[*prompt(tokens), *end] for end in ENDS]
    truth = [answered(loaded, [each], [alone(loaded, each, NEW_TOKENS)])[0] for each in ids]
    document, each = shared(loaded, tokens, arena), 4 * sum(shape.elements for shape in loaded.shape.layers)
    held = {}
    for count in (1, 8):
        caches = [prefill.cache for prefill in ask(loaded, document, (2 * ENDS)[:count], arena)]
        held[count] = sum(storage.nbytes() for storage in storages(caches).values())
    follows = (PAGE_ROWS if pages else max(map(len, ENDS)) + NEW_TOKENS) * each
    assert held[1] <= (tokens + PAGE_ROWS * pages) * each + follows
    assert held[8] <= held[1] + 7 * follows
    prefills = ask(loaded, document, ENDS, arena)
    copy = StorageWeakRef(document.layers[1].runs[0].keys.untyped_storage())  # type: ignore[union-attr,no-untyped-call]
    del document, caches
    gc.collect()
    assert answered(loaded, ids[:2], prefills[:2]) == truth[:2]
    del prefills[:2]
    gc.collect()
    assert not copy.expired()  # type: ignore[no-untyped-call]
    assert answered(loaded, ids[2:], prefills) == truth[2:]
    del prefills
    gc.collect()
    assert copy.expired()  # type: ignore[no-untyped-call]
