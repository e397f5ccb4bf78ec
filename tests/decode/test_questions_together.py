"""Questions about a stored document that stays spread over ranks: its rows are read once, and held once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from chains import greedy, single
from made_documents import StoredRows, questions_after, store_rows
from models import prompt
from rows import batch_of, ready

from kvr_mpi.decode.token_parallel import TokenGroup
from kvr_mpi.errors import DataError
from kvr_mpi.kv.shares import Share
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.stored_shares import prefill_stored
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local

KNOWN, NEW_TOKENS = 70, 6
LENGTHS = (20, 1, 9, 14)
LONGEST = max(LENGTHS) + NEW_TOKENS
MODELS = ("llama-gqa", "mistral-window", "gpt2", "gpt-oss-sinks", "gemma2-softcap", "llama4-chunks")
# With six ranks a window reaches over several of their shares.
CI = {("llama-gqa", 1), ("llama-gqa", 2), ("mistral-window", 6), ("gemma2-softcap", 3), ("llama4-chunks", 2)}
CASES = [
    pytest.param(name, ranks, marks=() if (name, ranks) in CI else pytest.mark.long)
    for name in MODELS
    for ranks in (1, 2, 3, 6)
]


@dataclass
class Asked:
    """What a rank has of some questions: its prefills, answers, and bytes held before the first token was decoded."""

    document: Share
    prefills: list[Prefill]
    answers: dict[int, list[int]]
    held_bytes: int


def ask(stored: StoredRows, prompts: Sequence[Sequence[int]], rows: Sequence[slice], chain: Transport) -> Asked:
    """Ask some questions at a time, and decode all of them together."""
    loaded = stored.loaded
    document = stored.open_on(chain, LONGEST)
    group = TokenGroup[int](loaded, chain)
    batch = batch_of(loaded, NEW_TOKENS, group)
    prefills: list[Prefill] = []
    for row in rows:
        some = prompts[row]
        options: dict[str, Any] = {"reserve_tokens": [NEW_TOKENS] * len(some), "last": chain.size - 1}
        for ids, prefill in zip(some, prefill_stored(loaded, some, document, chain, **options), strict=True):
            if prefill.error is None:
                batch.add(len(prefills), prefill, ids, 0)
            prefills.append(prefill)
    asked = Asked(document, prefills, {}, group.held_bytes(batch.prefills, document))
    while batch.running:
        asked.answers |= {one.key: list(one.answer.token_ids) for one in batch.step() if one.answer is not None}
    return asked


def opened(name: str) -> tuple[StoredRows, list[list[int]], dict[int, list[int]]]:
    """Store a document of a model, and answer questions about it on one rank by plain transformers."""
    loaded = ready(name)
    prompts = questions_after(prompt(KNOWN), LENGTHS)
    truths = {number: greedy(loaded.model, single(loaded, ids), NEW_TOKENS) for number, ids in enumerate(prompts)}
    return store_rows(loaded, KNOWN), prompts, truths


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_each_layer_is_read_once_whatever_is_asked(name: str, ranks: int) -> None:
    """In two rows, and in one for each question: the answers of one rank, by rows that were read once."""
    stored, prompts, truths = opened(name)
    for rows in ([slice(0, 3), slice(3, None)], [slice(at, at + 1) for at in range(len(prompts))]):
        stored.reads.clear()
        ranks_asked = run_local(ranks, lambda chain, rows=rows: ask(stored, prompts, rows, chain))
        assert ranks_asked[-1].answers == truths, "the last rank is their home"
        for asked in ranks_asked:
            assert all(prefill.known_tokens == KNOWN for prefill in asked.prefills)
        assert sorted((rank, layer) for rank, layer, *_ in stored.reads) == [
            (rank, layer) for rank in range(ranks) for layer in range(len(stored.layers))
        ]
        for number, layer in enumerate(stored.loaded.shape.layers):
            ranges = sorted((first, last) for _, read, first, last in stored.reads if read == number)
            edges = [0, *(last for _, last in ranges)]
            assert edges[-1] == KNOWN  # and of those before the last each token once
            assert [first for first, _ in ranges[:-1]] == edges[:-2]
            assert ranges[-1][0] == edges[-2] or (layer.visibility.size and ranges[-1][0] < edges[-2])


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_holds_its_share_once_for_all_questions(ranks: int) -> None:
    """1 / p of the document's keys and values, and on the rank that answers what follows it: no more, ten questions."""
    loaded = ready("llama-gqa")
    stored = store_rows(loaded, 240)
    prompts, each = questions_after(stored.ids, [20] * 10), loaded.shape.kv_bytes_per_token
    share = 240 // ranks * each
    for rank, asked in enumerate(run_local(ranks, lambda chain: ask(stored, prompts, [slice(None)], chain))):
        follows = 10 * (20 + NEW_TOKENS) * each if rank == ranks - 1 else 0
        assert asked.document._loading is None, "its file is closed"
        assert asked.document.bytes == share <= 1.1 * 240 * each / ranks
        assert asked.held_bytes == share + follows
        assert {prefill.share.document for prefill in asked.prefills if prefill.share} == {asked.document}


def test_a_share_that_cannot_be_read_fails_all_questions_on_all_ranks() -> None:
    """The rank that finds it goes on with the others to the end of the row; nothing is answered from what was read."""
    stored, prompts, _ = opened("llama-gqa")

    def work(chain: Transport) -> Asked:
        document = stored.open_on(chain, LONGEST)
        read = document.prefix.read
        assert read is not None

        def fail(number: int, first: int, last: int) -> torch.Tensor | None:
            if (chain.rank, number) == (1, 1):
                raise DataError("layer_001/keys is damaged")
            return read(number, first, last)

        document.prefix = replace(document.prefix, read=fail)
        options: dict[str, Any] = {"reserve_tokens": [NEW_TOKENS] * 2, "last": 2}
        prefills = [
            prefill
            for row in (slice(0, 2), slice(2, None))
            for prefill in prefill_stored(stored.loaded, prompts[row], document, chain, **options)
        ]
        return Asked(document, prefills, {}, 0)

    for asked in run_local(3, work):
        assert len(asked.prefills) == len(prompts)
        for prefill in asked.prefills:
            assert prefill.share is None and prefill.logits is None
            assert "cannot be used: layer_001/keys is damaged" in str(prefill.error)


def test_a_question_that_is_longer_than_the_document_is_held_for_is_refused() -> None:
    """Layers with windows were read for prompts of a length: beyond it the ranks would have too little of them."""
    stored, prompts, _ = opened("mistral-window")

    def work(chain: Transport) -> None:
        document = stored.open_on(chain, LONGEST)
        with pytest.raises(ValueError, match=r"of a document held for 96"):
            prefill_stored(stored.loaded, prompts[:1], document, chain, reserve_tokens=[NEW_TOKENS + 1], last=1)

    run_local(2, work)


def test_a_question_does_not_depend_on_its_company() -> None:
    stored, prompts, _ = opened("gemma2-softcap")

    def work(chain: Transport) -> tuple[Asked, Asked]:
        alone = [slice(at, at + 1) for at in range(len(prompts))]
        return ask(stored, prompts, [slice(None)], chain), ask(stored, prompts, alone, chain)

    for together, apart in run_local(3, work):
        assert together.answers == apart.answers
        for first, second in zip(together.prefills, apart.prefills, strict=True):
            if first.logits is not None:
                torch.testing.assert_close(first.logits, second.logits, rtol=1e-4, atol=1e-4)
