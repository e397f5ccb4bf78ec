"""Questions about a stored document that stays spread over ranks: its rows are read once, and held once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chains import greedy, single
from models import prompt, tiny
from rows import batch_of, count_down, finish, ready, run_out_at, tokens_of

from kvr_mpi.decode.group import held_bytes
from kvr_mpi.decode.token_parallel import TokenGroup
from kvr_mpi.errors import DataError
from kvr_mpi.kv.chain import layer_kv
from kvr_mpi.kv.sequence import SequenceKV, bytes_of
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, own_pool, prefill_kvr
from kvr_mpi.prefill.packed import Gathering, prefill_packed, share_out_stored
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport, run_local

KNOWN, NEW_TOKENS = 70, 6
LENGTHS = (20, 1, 9, 14)
LONGEST = max(LENGTHS) + NEW_TOKENS


def questions_after(document: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Prompts that begin with a document and go on in so many other tokens."""
    return [
        [*document, *((29 * number + 7 * at) % 190 + 1 for at in range(length))]
        for number, length in enumerate(lengths)
    ]


@dataclass
class StoredRows:
    """What is stored of a document, by layer (tokens, elements), and who read what of it.

    reads : (rank, layer, first, last) of every call.
    """

    loaded: LoadedModel
    ids: list[int]
    layers: list[torch.Tensor]
    reads: list[tuple[int, int, int, int]] = field(default_factory=list)

    def open_on(
        self, chain: Transport, longest_question: int, check: Callable[[int], None] = lambda number: None
    ) -> SequenceKV:
        """This rank's shard, the last rank having the last one."""

        def read(number: int) -> torch.Tensor:
            check(number)
            first = document.first_kept(number)
            self.reads.append((chain.rank, number, first, stop))
            return self.layers[number][first:stop].clone()

        known, place = len(self.ids), chain.rank
        start, stop = share_out_stored(known, known, chain.size).slices()[place]
        bounds: dict[str, Any] = {"length": known, "start": start, "stop": stop, "is_last": stop == known}
        longest = known + longest_question
        document = SequenceKV(
            self.loaded, own_pool(self.loaded), longest, longest=longest, read=read, ids=self.ids, **bounds
        )
        return document


def store_rows(loaded: LoadedModel, tokens: int) -> StoredRows:
    """Prefill a document on one rank, all of it kept."""
    prepare_model(loaded.model, chain=True)
    ids = prompt(tokens)
    cache = prefill_kvr(loaded, ids, Partition((0, tokens)), LocalTransport(), keeps_all=True).cache
    pairs = [layer_kv(cache, layer) for layer in range(len(cache.layers))]
    return StoredRows(loaded, ids, [torch.cat([each.flatten(1) for each in pair], 1).clone() for pair in pairs if pair])


def ask(stored: StoredRows, prompts: Sequence[Sequence[int]], rows: Sequence[slice], chain: Transport) -> Any:
    """Ask some questions at a time, and decode all of them together.

    Returns what a rank has of them: its prefills, answers, and bytes held before the first token was decoded.
    """
    loaded, document, prefills = stored.loaded, stored.open_on(chain, LONGEST), list[Prefill]()
    for row in rows:
        options: dict[str, Any] = {"reserve_tokens": [NEW_TOKENS] * len(prompts[row]), "last": chain.size - 1}
        prefills += prefill_packed(loaded, prompts[row], prefix=document, gathering=Gathering(loaded, chain), **options)
    batch = batch_of(loaded, NEW_TOKENS, TokenGroup(loaded, chain))
    for number, (ids, prefill) in enumerate(zip(prompts, prefills, strict=True)):
        batch.add(number, prefill, ids, 0)
    held = held_bytes(batch.prefills, document)
    answers = {key: list(ids) for key, ids in tokens_of(finish(batch)).items()}
    return SimpleNamespace(document=document, prefills=prefills, answers=answers, held_bytes=held)


def opened(name: str) -> tuple[StoredRows, list[list[int]], dict[int, list[int]]]:
    """Store a document of a model, and answer questions about it on one rank by plain transformers."""
    loaded = ready(name)
    prompts = questions_after(prompt(KNOWN), LENGTHS)
    truths = {number: greedy(loaded.model, single(loaded, ids), NEW_TOKENS) for number, ids in enumerate(prompts)}
    return store_rows(loaded, KNOWN), prompts, truths


SLOWER = [("llama-gqa", 1), ("mistral-window", 6), ("gemma2-softcap", 3), ("llama4-chunks", 2)]


@pytest.mark.parametrize(
    ("name", "ranks"),  # with six ranks a window reaches over several of their shares
    [("gpt-oss-sinks", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWER)],
)
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
        assert bytes_of([asked.document]) == share <= 1.1 * 240 * each / ranks
        assert asked.held_bytes == share + follows


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_share_that_cannot_be_read_fails_its_questions_on_all_ranks(is_damaged: bool) -> None:
    """Nobody waits. What is damaged is given up; what there was no memory to read is read again."""
    stored, prompts, _ = opened("llama-gqa")
    due = {1}

    def work(chain: Transport) -> list[list[Prefill]]:
        def fail(number: int) -> None:
            if number == 1 and chain.rank in due:
                due.discard(chain.rank)
                raise DataError("layer_001/keys is damaged") if is_damaged else MemoryError("no room for a layer")

        document = stored.open_on(chain, LONGEST, fail)
        options: dict[str, Any] = {
            "reserve_tokens": NEW_TOKENS,
            "last": 2,
            "gathering": Gathering(stored.loaded, chain),
        }
        return [prefill_packed(stored.loaded, [ids], prefix=document, **options) for ids in prompts[:2]]

    said = "layer_001/keys is damaged" if is_damaged else "rank 1 of its chain ran out of memory"
    for first, second in run_local(3, work):
        failed = [*first, *second] if is_damaged else first
        assert all(one.cache is None and one.logits is None and said in str(one.error) for one in failed)
        assert is_damaged or all(one.error is None and one.cache is not None for one in second)


@pytest.mark.parametrize("place", ["layers.0", "layers.1.self_attn.o_proj", "layers.1.mlp", "lm_head"])
def test_questions_without_memory_are_run_in_halves_or_are_errors_on_all_ranks(place: str) -> None:
    """And the next ones are answered, by what was read of the document before."""
    loaded = tiny("llama-gqa")
    ids = questions_after(prompt(70), [20, 9, 4])
    wholes = [single(loaded, each).logits for each in ids]
    stored = store_rows(loaded, 70)
    left = {1: 3}  # times that a rank fails: with three prompts, with the first of them alone, and with two
    hook, run = run_out_at(loaded, place, count_down(left))

    def work(chain: Transport) -> list[Prefill]:
        run.rank = chain.rank
        document = stored.open_on(chain, 30)
        gathering = Gathering(loaded, chain)
        return prefill_packed(loaded, ids, prefix=document, reserve_tokens=1, gathering=gathering, last=chain.size - 1)

    ranks = run_local(3, work)
    hook.remove()
    assert sorted((rank, layer) for rank, layer, *_ in stored.reads) == [(at // 3, at % 3) for at in range(9)]
    for failed, *answered in ranks:
        assert failed.cache is None and "rank 1 of its chain ran out of memory" in str(failed.error)
        assert all(one.error is None and one.cache is not None for one in answered)
    for prefill, whole in zip(ranks[-1][1:], wholes[1:], strict=True):
        torch.testing.assert_close(prefill.logits, whole, rtol=1e-4, atol=1e-4)
