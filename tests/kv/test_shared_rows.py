"""Prompts that begin alike hold one copy of what they begin with, and answer as each would alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from chains import greedy
from models import prompt
from rows import alone, batch_of, check_integrity, finish, pages_of, pages_read, ready, steps_recorded, tokens_of

from benchmarks.kept import keep_only
from kvr_mpi.decode import step_graph
from kvr_mpi.kv.pool import PAGE_ROWS, Pool
from kvr_mpi.kv.sequence import SequenceKV, bytes_of
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.one_prompt import Prefill, compute_prefix, own_pool
from kvr_mpi.prefill.packed import prefill_packed

NEW_TOKENS = 6
NAMES = ["llama-gqa", "mistral-window", "qwen2-some-windows", "gemma2-softcap", "gpt-oss-sinks", "llama4-chunks"]
NAMES += ["opt", "falcon-mha"]
# The last one goes on for longer than a window or chunk.
ENDS = [[5, 7, 9], [11], [3] * 4, [8, 1, 4, 4, 2] * 9]


def shared(loaded: LoadedModel, tokens: int, pool: Pool, before: int = 0) -> SequenceKV:
    """A document, which itself goes on from instructions if so many tokens of it are."""
    ids = prompt(tokens)
    instructions = compute_prefix(loaded, ids[:before], pool) if before else None
    (prefill,) = prefill_packed(loaded, [ids], prefix=instructions, pool=pool)
    if instructions is not None:
        instructions.release()
    document: SequenceKV = prefill.cache
    document.ids = tuple(ids)
    return document


def ask(
    loaded: LoadedModel, document: SequenceKV, ends: Sequence[Sequence[int]], pool: Pool | None = None
) -> list[Prefill]:
    ids = [[*document.ids, *end] for end in ends]
    return prefill_packed(loaded, ids, prefix=document, reserve_tokens=NEW_TOKENS, pool=pool)


def answered(loaded: LoadedModel, ids: Sequence[Sequence[int]], prefills: Sequence[Prefill]) -> list[tuple[int, ...]]:
    """Decode together."""
    batch = batch_of(loaded, NEW_TOKENS)
    for at, (prefill, each) in enumerate(zip(prefills, ids, strict=True)):
        batch.add(at, prefill, each, 0)
    found = finish(batch)
    for one in found.values():
        one.prefill.release()
    return [tokens for _, tokens in sorted(tokens_of(found).items())]


@pytest.mark.parametrize(
    "way",
    [
        "own memory",
        "own memory, after instructions",
        "pages, after instructions",
        "pages, read at once",
        "pages, read at once, recorded",
        "pages, from another pool",
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_each_prompt_alone(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts go on from a document, and it may go on from instructions, which are shared, too."""
    loaded = ready(name)
    pool = own_pool(loaded) if "own memory" in way else pages_of(loaded, 40)
    ids = [[*prompt(300), *end] for end in ENDS]
    truth = [answered(loaded, [each], [alone(loaded, each, NEW_TOKENS)])[0] for each in ids]
    if "recorded" in way:
        monkeypatch.setattr(step_graph, "STEPS_BEFORE", 0)
        steps_recorded(monkeypatch)
    with pages_read(monkeypatch) if "at once" in way else nullcontext():
        first = own_pool(loaded) if "another" in way else pool
        document = shared(loaded, 300, first, before=40 if "after" in way else 0)
        prefills = ask(loaded, document, ENDS, pool)
        assert [each.known_tokens for each in prefills] == [300] * len(ENDS)
        assert answered(loaded, ids, prefills) == truth
        (one,) = ask(loaded, document, ENDS[-1:], pool)
        assert answered(loaded, ids[-1:], [one]) == truth[-1:], "and by itself, without being packed"
        check_integrity(first, document)
    with pytest.raises(ValueError, match="does not begin with the shared prefix"):
        prefill_packed(loaded, [ids[0], prompt(310)[1:]], prefix=document)


@pytest.mark.parametrize("pages", [False, True])
def test_prompts_hold_one_copy_of_their_document_until_the_last_one_leaves(pages: bool) -> None:
    loaded, tokens = ready("llama-gqa"), 3 * PAGE_ROWS + 10
    pool, ids = pages_of(loaded, 40) if pages else own_pool(loaded), [[*prompt(tokens), *end] for end in ENDS]
    truth = [answered(loaded, [each], [alone(loaded, each, NEW_TOKENS)])[0] for each in ids]
    document, each = shared(loaded, tokens, pool), loaded.shape.kv_bytes_per_token
    held = {}
    for count in (1, 8):  # by default, prompts lie in the pool of the document
        prefills = ask(loaded, document, (2 * ENDS)[:count])
        held[count] = bytes_of([document, *(prefill.cache for prefill in prefills)])
        for prefill in prefills:
            prefill.release()
    follows = (PAGE_ROWS if pages else max(map(len, ENDS)) + NEW_TOKENS) * each
    assert held[1] <= (tokens + PAGE_ROWS * pages) * each + follows
    assert held[8] <= held[1] + 7 * follows
    prefills = ask(loaded, document, ENDS, pool)
    document.release()
    assert answered(loaded, ids[:2], prefills[:2]) == truth[:2]
    check_integrity(pool, *(prefill.cache for prefill in prefills[2:]))
    assert bytes_of([prefills[2].cache]) > tokens * each - PAGE_ROWS * each
    assert answered(loaded, ids[2:], prefills[2:]) == truth[2:]
    assert not pool.taken_bytes


@pytest.mark.parametrize("name", ["llama-gqa", "falcon-alibi", "deepseek-latents", "falcon-h1-both"])
def test_any_model_continues_one_copy_of_a_document(name: str) -> None:
    """Also models that attend by themselves, or have states; what is compressed is in the next test."""
    loaded, tokens = ready(name), 60
    pool, ids = own_pool(loaded), [[*prompt(tokens), *end] for end in ENDS[:3]]
    truth = [greedy(loaded.model, alone(loaded, each, NEW_TOKENS), NEW_TOKENS) for each in ids]
    document = shared(loaded, tokens, pool)
    prefills = ask(loaded, document, ENDS[:3], pool)
    assert [greedy(loaded.model, prefill, NEW_TOKENS) for prefill in prefills] == truth
    own = sum(len(end) + NEW_TOKENS for end in ENDS[:3])
    assert bytes_of([document, *(each.cache for each in prefills)]) <= (tokens + own) * loaded.shape.kv_bytes_per_token
    for prefill in prefills:
        prefill.release()
    check_integrity(pool, document)


@pytest.mark.parametrize("pages", [False, True])
def test_questions_share_what_heads_keep_of_a_document(pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of several, in pages, and together with one that asks alone: the answers of each copy."""
    loaded, tokens = ready("llama-gqa"), 700
    pool, ids = pages_of(loaded, 40) if pages else own_pool(loaded), [[*prompt(tokens), *end] for end in ENDS]

    def compressed(pool: Pool) -> SequenceKV:
        document = shared(loaded, tokens, pool)
        kept = [[torch.arange(head, tokens, 2 + head) for head in range(2)] for _ in document.layers]
        keep_only(document, kept, 0)
        document.compression = "some"
        return document

    truth = []
    for at, each in enumerate(ids):
        copy = compressed(own_pool(loaded))
        (one,) = ask(loaded, copy, ENDS[at : at + 1], copy.pool)
        truth += answered(loaded, [each], [one])
    document = compressed(pool)
    with pages_read(monkeypatch) if pages else nullcontext():
        prefills = ask(loaded, document, ENDS, pool)
        each = loaded.shape.kv_bytes_per_token
        own = (PAGE_ROWS * 2 if pages else max(map(len, ENDS)) + NEW_TOKENS) * each
        assert bytes_of([document, *(one.cache for one in prefills)]) <= document.nbytes + len(ENDS) * own
        document.release()
        assert answered(loaded, ids, prefills) == truth
    assert not pool.taken_bytes
