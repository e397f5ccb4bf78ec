"""Tokens are chosen for all documents of a step at once, and are those that each gets alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from rows import ready
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from kvr_mpi.decode import sampling
from kvr_mpi.decode.grammar import Grammars
from kvr_mpi.decode.repetition import Penalties
from kvr_mpi.decode.sampling import NOTHING_TO_CHOOSE, DecodeSequence, SamplingParams, choose_tokens
from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.prefill.finite import NOT_FINITE

STEPS = 4
# Each some settings of documents; the job's are greedy.
SETTINGS = [
    OwnGeneration(),
    OwnGeneration(repetition_penalty=1.3),
    OwnGeneration(frequency_penalty=0.7, presence_penalty=-0.4),
    OwnGeneration(repetition_penalty=0.8, frequency_penalty=0.5, top_logprobs=2),
    OwnGeneration(temperature=0.8),
    OwnGeneration(temperature=1.4, top_k=20, top_p=0.9, min_p=0.02),
    OwnGeneration(top_p=0.7, repetition_penalty=1.1, presence_penalty=0.3),
    OwnGeneration(min_p=0.2),
]


def params(**config: Any) -> SamplingParams:
    loaded = ready("llama-gqa")
    job = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, **config)
    return SamplingParams(loaded.model, loaded.tokenizer, job, (), STEPS, Grammars(loaded.tokenizer, ()))


@contextmanager
def processed() -> Iterator[list[int]]:
    """Collect how many rows are processed at once."""
    rows, own = list[int](), LogitsProcessorList.__call__

    def counting(self: Any, ids: torch.Tensor, scores: torch.Tensor, **options: Any) -> Any:
        rows.append(len(scores))
        return own(self, ids, scores, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogitsProcessorList, "__call__", counting)
        yield rows


def truth_of(rules: SamplingParams, ids: list[int], written: list[int], logits: torch.Tensor, generator: Any) -> int:
    """Choose as OpenAI's definition of penalties, and then transformers' generate() do."""
    if not logits.max().isfinite():
        return NOT_FINITE
    counts = torch.bincount(torch.tensor(written, dtype=torch.int64), minlength=len(logits)).float()
    penalties: Penalties = rules.penalties
    logits = logits - (penalties.frequency * counts + penalties.presence * (counts > 0))
    logits = rules.processors(len(ids), logits.device)(torch.tensor([ids + written]), logits[None])[0]
    if not rules.config.do_sample:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))


@pytest.mark.quick
@runs(max_examples=25)
@given(st.lists(st.integers(0, len(SETTINGS) - 1), min_size=1, max_size=9), st.integers(0, 2**50))
def test_tokens_chosen_together_are_those_chosen_alone(chosen: list[int], seed: int) -> None:
    job, chance, draw = params(), random.Random(seed), torch.Generator().manual_seed(seed)
    vocab, prompts = (
        chance.choice([50, 199, 1001, 4099]),
        [chance.choices(range(50), k=chance.randint(1, 60)) for _ in chosen],
    )
    rules = [job.adapted(SETTINGS[at]) for at in chosen]  # equal settings need not be the same object
    together, alone = (
        [
            DecodeSequence(own, ids, seed + at, torch.device("cpu"))
            for at, (own, ids) in enumerate(zip(rules, prompts, strict=True))
        ]
        for _ in range(2)
    )
    generators = [torch.Generator().manual_seed(seed + at) for at in range(len(chosen))]
    for _ in range(STEPS):
        logits = 3 * torch.randn(len(chosen), vocab, generator=draw)
        if chance.random() < 0.5:
            logits = logits.round(decimals=1)  # some are equal
        if chance.random() < 0.3:
            logits[chance.randrange(len(chosen)), chance.randrange(vocab)] = chance.choice([float("nan"), -torch.inf])
        few = chance.choice([vocab, 3 * vocab, 1 << 21])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "MOST_LOGITS", few)
            found = choose_tokens(together, logits)
        each = zip(rules, prompts, alone, logits, generators, strict=True)
        assert found == [truth_of(own, ids, one.token_ids, row, draws) for own, ids, one, row, draws in each]
        assert found == [choose_tokens([one], row[None])[0] for one, row in zip(alone, logits, strict=True)]
        for token, *pair in zip(found, together, alone, strict=True):
            for one in pair:
                one.write(token)
        if any(one.error is not None for one in together):  # which draw no more
            break
    assert [one.error for one in together] == [one.error for one in alone]


def test_equal_settings_are_processed_at_once() -> None:
    job, logits = params(), torch.randn(12, 199, generator=torch.Generator().manual_seed(1))
    sampled, penalized = OwnGeneration(temperature=0.7, top_p=0.9), OwnGeneration(repetition_penalty=1.2)
    own = [sampled, penalized, OwnGeneration(temperature=0.7, top_p=0.9, max_new_tokens=2), OwnGeneration()] * 3
    answers = [DecodeSequence(job.adapted(one), [1, 2], 0, torch.device("cpu")) for one in own]
    with processed() as rows:
        choose_tokens(answers, logits)
    assert sorted(rows) == [3, 6]
    stateful = params(no_repeat_ngram_size=2)
    answers = [DecodeSequence(stateful, [1, 2, 1], 0, torch.device("cpu")) for _ in range(3)]
    with processed() as rows:
        assert 2 not in choose_tokens(answers, torch.eye(199)[[2, 2, 2]])
    assert rows == [1, 1, 1]


def test_a_document_whose_settings_fail_fails_alone() -> None:
    """Also if too many rows at once are what fails."""
    job, logits, own = params(), torch.randn(3, 199), LogitsProcessorList.__call__

    def answers(temperature: float) -> list[DecodeSequence]:
        rules = job.adapted(OwnGeneration(temperature=temperature))
        return [DecodeSequence(rules, [1], at, torch.device("cpu")) for at in range(3)]

    def short(self: Any, ids: torch.Tensor, scores: torch.Tensor, **options: Any) -> Any:
        if len(scores) > 1:
            raise MemoryError("too many rows")
        return own(self, ids, scores, **options)

    truth = choose_tokens(answers(0.7), logits)
    assert choose_tokens([*answers(0.7)[:2], answers(1e-40)[2]], logits) == [*truth[:2], NOTHING_TO_CHOOSE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogitsProcessorList, "__call__", short)
        assert choose_tokens(answers(0.7), logits) == truth


def test_answers_whose_batch_fails_late_draw_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    job, logits, div = params(), torch.randn(3, 199), torch.div

    def answers() -> list[DecodeSequence]:
        rules = job.adapted(OwnGeneration(temperature=1.5))
        return [DecodeSequence(rules, [1], at, torch.device("cpu")) for at in range(3)]

    def short(probabilities: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        if len(probabilities) > 1:
            raise MemoryError("too many rows")
        return div(probabilities, *given, **options)

    truth = choose_tokens(answers(), logits)
    monkeypatch.setattr(torch, "div", short)
    assert choose_tokens(answers(), logits) == truth


class Sorted(TorchDispatchMode):
    """Collects how long the rows are that are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.sort:
            self.lengths.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 0.5), (7, 0.3), (20, 0.9), (60, 0.95), (400, 0.8)])
def test_top_p_after_top_k_keeps_what_transformers_keeps_and_sorts_few(top_k: int, top_p: float) -> None:
    draw = torch.Generator().manual_seed(top_k)
    for scale in (1.0, 4.0):
        logits = scale * torch.randn(4, 301, generator=draw)
        logits[1] = logits[1].to(torch.bfloat16).float()  # some are equal
        logits[2] = logits[2].round(decimals=1)
        logits[3, 5:] = -torch.inf
        rules = params().adapted(OwnGeneration(temperature=1.0, top_k=top_k, top_p=top_p))
        wanted = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits))
        with Sorted() as found:
            kept = rules.processors(1, logits.device)(torch.zeros(4, 1, dtype=torch.int64), logits)
        assert torch.equal(kept[[0, 3]], wanted[[0, 3]])
        assert torch.equal(kept.sort().values, wanted.sort().values), "of equal ones, any"
        assert found.lengths and max(found.lengths) < 301 or top_k > 301
