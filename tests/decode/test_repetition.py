"""Answers that repeat themselves: they end early, and penalties make repetition less likely."""

from __future__ import annotations

import random

import pytest
import torch
from rows import alone, batch_of, finish, other_prompt, ready
from transformers import GenerationConfig

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.repetition import Penalties, TokenCounts, ends_in_repetition, penalize
from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.prefill.finite import likeliest

NEW_TOKENS = 12


@pytest.mark.parametrize("period", [1, 2, 3, 7, 16, 64])
def test_eight_copies_of_up_to_64_tokens_are_a_repetition(period: int) -> None:
    draw = random.Random(period)
    before, unit = [draw.randrange(1000) for _ in range(100)], [1000 + at for at in range(period)]
    copies = max(8, -(-64 // period))
    assert ends_in_repetition(before + copies * unit)
    assert ends_in_repetition(before + copies * unit + unit[: period // 2]), "wherever a copy is cut"
    assert not ends_in_repetition(before + (copies - 2) * unit)
    assert not ends_in_repetition(before + copies * unit + [5])
    assert not ends_in_repetition(before)


def test_longer_periods_and_short_answers_are_not() -> None:
    assert not ends_in_repetition(20 * list(range(65)))
    assert not ends_in_repetition([7] * 63) and not ends_in_repetition([])


def test_an_endless_answer_ends_early_unless_that_is_off() -> None:
    """All tokens but one are suppressed."""
    loaded, ids, most = ready("llama-gqa"), other_prompt(9), 80
    others = [token for token in range(loaded.model.config.vocab_size) if token != 7]
    config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, suppress_tokens=others)
    found = {}
    for stops in (True, False):
        batch = DecodeBatch(loaded, config, stop=(), max_new_tokens=most, stop_repetition=stops)
        batch.add("a", alone(loaded, ids, most), ids, 0)
        answer = finish(batch)["a"].answer
        assert answer is not None
        found[stops] = len(answer.token_ids), answer.finish_reason
    assert found == {True: (64, "repetition"), False: (most, "length")}


def test_penalties_are_subtracted_as_often_as_a_token_was_written() -> None:
    """Those of other answers do not count."""
    answers, logits = [TokenCounts(4), TokenCounts(4), TokenCounts(4)], torch.ones(3, 6)
    penalties, found = Penalties(frequency=0.5, presence=0.25), []
    for token in (1, 1, 4, 0):
        found.append(penalize(logits, penalties, answers) - 1)
        answers[0].add(token)
    answers[1].add(5)
    found.append(penalize(logits, penalties, answers) - 1)
    assert not found[0].any()
    assert found[-1].tolist() == [[-0.75, -1.25, 0, 0, -0.75, 0], [0, 0, 0, 0, 0, -0.75], 6 * [0]]


def test_a_request_has_penalties_of_its_own() -> None:
    """The answer is the one that greedy decoding with penalties gives."""
    loaded, ids = ready("llama-gqa"), other_prompt(9)
    batch = batch_of(loaded, NEW_TOKENS)
    batch.add("own", alone(loaded, ids, NEW_TOKENS), ids, 0, OwnGeneration(frequency_penalty=2.0, presence_penalty=1.0))
    batch.add("plain", alone(loaded, ids, NEW_TOKENS), ids, 0)
    found = {key: one.answer for key, one in finish(batch).items()}
    wanted: list[int] = []
    for _ in range(NEW_TOKENS):
        whole = alone(loaded, ids + wanted).logits
        assert whole is not None
        logits = whole.clone()
        for token in set(wanted):
            logits[token] -= 2.0 * wanted.count(token) + 1.0
        wanted.append(int(likeliest(logits)))
    own, plain = found["own"], found["plain"]
    assert own is not None and plain is not None
    assert list(own.token_ids) == wanted != list(plain.token_ids)
