"""Logits that are NaN or infinite, and whatever sampling raises, are the error of one document; the others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import prompt
from rows import alone, batch_of, count_down, finish, ready, run_out_at, spread, tokens_of

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.group import BatchEntry, Group
from kvr_mpi.decode.token_parallel import TokenGroup
from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.fairkv.group import HeadGroup
from kvr_mpi.fairkv.placement import place_in_proportion, place_statically
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr, prefill_single
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local

IDS, NEW_TOKENS = prompt(40), 5
KINDS = {
    "greedy": OwnGeneration(),
    "log-probabilities": OwnGeneration(top_logprobs=2),
    "samples": OwnGeneration(n=2, temperature=1.1),
    "scores": OwnGeneration(score=("7 8 9", "5")),
    "penalty": OwnGeneration(repetition_penalty=1.2),
}
GROUPS: dict[str, Callable[[LoadedModel, Transport], Group]] = {
    "plain": lambda loaded, ranks: Group(loaded),
    "chain": lambda loaded, ranks: Group(loaded),
    "packed": lambda loaded, ranks: Group(loaded),
    "tokens": TokenGroup,
    "heads": lambda loaded, ranks: HeadGroup(loaded, ranks, place_in_proportion),
}


@contextmanager
def spoiling(loaded: LoadedModel) -> Iterator[threading.local]:
    """Make NaN of hidden states, as an overflow does, on a rank that sets `is_due`."""
    rank = threading.local()

    def spoil(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * float("nan") if getattr(rank, "is_due", False) else out

    hook = loaded.model.model.layers[1].mlp.register_forward_hook(spoil)
    yield rank
    hook.remove()


def prefilled(route: str, loaded: LoadedModel, ids: list[int], ranks: Transport) -> Prefill | None:
    """A prompt on the last rank, by any route; None where nothing of it is left."""
    last = ranks.size - 1
    if route == "tokens":
        return spread(loaded, ids, ranks, last, NEW_TOKENS)
    if route == "chain":
        cut = Partition.even(len(ids), ranks.size)
        found = prefill_kvr(loaded, ids, cut, ranks, reserve_tokens=NEW_TOKENS, spares_chain=True)
        return found if ranks.rank == last else None
    if ranks.rank != last:
        return None
    if route == "plain":
        return prefill_single(loaded.model, ids, loaded.device)
    if route == "packed":
        return prefill_packed(loaded, [ids, ids[:9]], reserve_tokens=NEW_TOKENS)[0]
    return alone(loaded, ids, NEW_TOKENS)


def answers(route: str, own: OwnGeneration, due: Callable[[str, int], bool]) -> dict[str, BatchEntry]:
    """Answer three prompts; hidden states are NaN in the prefills, and in the steps, that are due on a rank."""
    loaded = ready("llama-gqa", chain=route != "plain")
    with spoiling(loaded) as spoiled:

        def work(ranks: Transport) -> dict[str, BatchEntry]:
            torch.set_num_threads(1)
            batch, found = batch_of(loaded, NEW_TOKENS, GROUPS[route](loaded, ranks)), dict[str, BatchEntry]()
            for name in ("first", "bad", "last"):
                spoiled.is_due = due(name, ranks.rank)
                prefill = prefilled(route, loaded, IDS, ranks)
                spoiled.is_due = False
                if prefill is not None:
                    batch.add(name, prefill, IDS, 7, own)
                    found |= {one.key: one for one in batch.take_finished()}
            found |= {one.key: one for one in batch.begin()}
            while batch.running:
                spoiled.is_due = due("steps", ranks.rank)
                found |= {one.key: one for one in batch.step()}
            return found

        size = 2 if route in ("chain", "tokens", "heads") else 1
        return {key: one for rank in run_local(size, work) for key, one in rank.items()}


def is_right(entry: BatchEntry) -> bool:
    """Whether the error names the dtype, and nothing of the prompt is kept."""
    error, prefill = str(entry.error), entry.prefill
    return "not finite" in error and "float32" in error and prefill.cache is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", GROUPS)
def test_a_prompt_that_is_not_finite_is_an_error_and_the_others_are_answered(route: str, kind: str) -> None:
    """On whichever rank of its chain it began."""
    found = answers(route, KINDS[kind], lambda name, rank: name == "bad" and (rank == 0 or route == "heads"))
    assert {*found} == {"first", "bad", "last"} and is_right(found["bad"])
    first, last = found["first"].answer, found["last"].answer
    assert first is not None and last is not None and first.token_ids == last.token_ids
    assert len(first.token_ids) == NEW_TOKENS and len(first.samples) == (2 if kind == "samples" else 0)
    assert len(first.scores) == (2 if kind == "scores" else 0)


@pytest.mark.parametrize("kind", ["greedy", "log-probabilities", "samples", "penalty"])
@pytest.mark.parametrize("route", GROUPS)
def test_an_answer_that_is_no_longer_finite_is_an_error(route: str, kind: str) -> None:
    found = answers(route, KINDS[kind], lambda name, rank: name == "steps")
    assert {*found} == {"first", "bad", "last"} and all(map(is_right, found.values()))


def test_a_continuation_that_is_not_finite_is_no_score() -> None:
    loaded = ready("llama-gqa")
    batch = batch_of(loaded, NEW_TOKENS)
    with spoiling(loaded) as spoiled:
        prefill = alone(loaded, IDS, NEW_TOKENS)
        spoiled.is_due = True
        batch.add("bad", prefill, IDS, 0, KINDS["scores"])
    assert is_right(finish(batch)["bad"])


@pytest.mark.parametrize("group", ["alone", "tokens", "heads"])
@pytest.mark.parametrize(
    ("own", "said"),
    [
        (OwnGeneration(temperature=1e-300), "temperature = 1e-300"),
        (OwnGeneration(temperature=1e-300, n=2), "temperature = 1e-300"),
        (OwnGeneration(repetition_penalty=1e-300), "repetition_penalty = 1e-300"),
        (OwnGeneration(temperature=1.0, min_p=2.0), "min_p"),  # transformers refuses it
        (OwnGeneration(temperature=1.0, repetition_penalty=-1.0), "penalty"),
    ],
)
def test_what_sampling_raises_is_the_error_of_its_document(group: str, own: OwnGeneration, said: str) -> None:
    loaded = ready("llama-gqa")

    def work(ranks: Transport) -> dict[Any, BatchEntry]:
        torch.set_num_threads(1)
        batch = batch_of(loaded, NEW_TOKENS, GROUPS["packed" if group == "alone" else group](loaded, ranks))
        found = dict[Any, BatchEntry]()
        for key, settings in (("bad", own), ("good", OwnGeneration())):
            prefill = prefilled("tokens" if group == "tokens" else "", loaded, IDS, ranks)
            if prefill is not None:
                batch.add(key, prefill, IDS, 0, settings)
                found |= {one.key: one for one in batch.take_finished()}
        return found | finish(batch)

    found = {key: one for rank in run_local(1 if group == "alone" else 2, work) for key, one in rank.items()}
    assert {*found} == {"good", "bad"} and found["good"].answer is not None
    assert said in str(found["bad"].error)


def test_a_text_that_cannot_be_decoded_is_the_error_of_its_document() -> None:
    """Such as a token beyond the tokenizer's vocabulary."""
    loaded, decode = ready("llama-gqa"), type(ready("llama-gqa").tokenizer).decode

    class Narrow(type(loaded.tokenizer)):  # type: ignore[misc]
        def decode(self, ids: Sequence[int], **options: Any) -> str:
            if len(ids) == 3:
                raise OverflowError("out of range integral type conversion attempted")
            return str(decode(self, ids, **options))

    object.__setattr__(loaded, "tokenizer", Narrow())
    batch = batch_of(loaded, NEW_TOKENS)
    for key, many in (("bad", 3), ("good", 4)):
        batch.add(key, alone(loaded, IDS, NEW_TOKENS), IDS, 0, OwnGeneration(max_new_tokens=many))
    found = finish(batch)
    assert "out of range" in str(found["bad"].error) and {*tokens_of(found)} == {"good"}


# Ranks that share a prompt agree on what becomes of it


@pytest.mark.parametrize("short", [0, 1, 2])
def test_ranks_agree_on_a_failed_prompt_before_they_score(short: int) -> None:
    """The rank that has its last tokens is told of the failure; the others are not."""
    loaded = ready("llama-gqa")
    hook, run = run_out_at(loaded, "layers.1.mlp", count_down({short: 1}))

    def work(ranks: Transport) -> dict[Any, BatchEntry]:
        torch.set_num_threads(1)
        batch, found = batch_of(loaded, NEW_TOKENS, TokenGroup(loaded, ranks)), dict[Any, BatchEntry]()
        for name in ("bad", "good"):
            run.rank = ranks.rank if name == "bad" else -1
            prefill = prefill_kvr(
                loaded,
                IDS,
                Partition.even(len(IDS), 3),
                ranks,
                reserve_tokens=NEW_TOKENS,
                is_sharded=True,
                last=2,
                spares_chain=True,
            )
            run.rank = -1
            assert batch.add(name, prefill, IDS, 0, KINDS["scores"]) == (name == "good")
            found |= {one.key: one for one in batch.take_finished()}
        return found | finish(batch)

    found = {key: one for rank in run_local(3, work) for key, one in rank.items()}
    hook.remove()
    assert f"rank {short} of the 3 in its chain ran out of memory" in str(found["bad"].error)
    good = found["good"].answer
    assert good is not None and len(good.scores) == 2


@pytest.mark.parametrize("short", [0, 1])
def test_no_memory_to_distribute_heads_is_the_error_of_one_document(
    short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the rank that has it, or on one that gets a part of it."""
    loaded, reserve = ready("llama-gqa"), SequenceKV.reserve
    rank, left = threading.local(), {short: 4}

    def failing(*given: Any, **how: Any) -> Any:
        if getattr(rank, "is_due", False):
            left[short] -= 1
            if not left[short]:
                raise MemoryError("on purpose")
        return reserve(*given, **how)

    def work(ranks: Transport) -> tuple[dict[Any, BatchEntry], list[int]]:
        torch.set_num_threads(1)
        batch: DecodeBatch = batch_of(loaded, NEW_TOKENS, HeadGroup(loaded, ranks, place_statically))
        for number in range(2):
            batch.add((ranks.rank, number), alone(loaded, IDS, NEW_TOKENS), IDS, 0)
        rank.is_due = ranks.rank == short
        return finish(batch), [len(batch.prefills)]

    monkeypatch.setattr(SequenceKV, "reserve", failing)
    found = {key: one for answered, _ in run_local(2, work) for key, one in answered.items()}
    failed = [one for one in found.values() if one.error is not None]
    assert len(found) == 4 and len(failed) == 1 and len(set(tokens_of(found).values())) == 1
    assert f"rank {short} of its chain ran out of memory" in str(failed[0].error)
