"""Drafted tokens change no answer, and are run only where that saves time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import COMMON, CONFIGS, WHOLE, prompt, random_model
from rows import alone, finish, other_prompt, pages_of, pages_read, ready, steps_recorded
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.kept import keep_only
from kvr_mpi.decode import lookup
from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.group import BatchEntry, Group
from kvr_mpi.decode.lookup import MOST_ROWS, Lookup, StepTimes, find_draft
from kvr_mpi.decode.repetition import Penalties
from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.cpu_attention import OWN, CpuAttention, KernelLibrary
from kvr_mpi.model.kernels import always, forget_kernels, give_kernel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.prefill.self_check import why_not_packed

NEW_TOKENS = 14
# Its heads are wide enough for our kernel.
WIDE = LlamaConfig(**{**COMMON, "num_attention_heads": 4}, head_dim=32, num_key_value_heads=2)
LENGTHS = [5, 30, 1, 18, 16, 9]
# Answers that an `oracle` knows, by prompt.
MakePrefill = Callable[[list[int]], Prefill]
Known = dict[tuple[int, ...], list[tuple[int, ...]]]


@contextmanager
def oracle(known: Known, seed: int) -> Iterator[None]:
    """Draft tokens of known answers, followed by others, and run any number of them."""
    chance = random.Random(seed)

    def find(ids: Any, most: int) -> tuple[int, list[int]]:
        whole = tuple(ids.tolist())
        for begins, answers in known.items():
            written = whole[len(begins) :]
            for answer in answers if whole[: len(begins)] == begins else ():
                if answer[: len(written)] == written:
                    right = answer[len(written) :][: chance.randint(0, 5)]
                    return 8, [*right, *(chance.randrange(190) for _ in range(3))][:most]
        return 0, []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "find_draft", find)
        patch.setattr(StepTimes, "choose", lambda times, documents, gains: chance.randint(0, len(gains)))
        yield


def answered(
    loaded: LoadedModel,
    config: dict[str, Any],
    *,
    uses_lookup: bool,
    own: Sequence[OwnGeneration] = (),
    lengths: Sequence[int] = LENGTHS,
    make: MakePrefill | None = None,
    **options: Any,
) -> tuple[DecodeBatch, dict[int, BatchEntry]]:
    """Answer documents, which join at different steps."""
    make = make or (lambda ids: alone(loaded, ids, NEW_TOKENS))
    made = GenerationConfig(**{"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | config)
    options = {"stop": (), "max_new_tokens": NEW_TOKENS} | options
    group = Group(loaded, why_alone=why_not_packed(loaded))
    batch, found = DecodeBatch(loaded, made, group=group, uses_lookup=uses_lookup, **options), {}
    for at, tokens in enumerate(lengths):
        ids = other_prompt(tokens)
        batch.add(tokens, make(ids), ids, tokens, own[at % len(own)] if own else OwnGeneration())
        if at % 2:
            found |= {one.key: one for one in batch.step()}
    return batch, found | finish(batch)


def compared(loaded: LoadedModel, config: dict[str, Any], seed: int = 0, **options: Any) -> int:
    """Compare answers with those without drafts; return how many tokens were saved."""
    _, plain = answered(loaded, config, uses_lookup=False, **options)
    known: Known = {}
    for tokens, one in plain.items():
        if one.answer is not None:
            samples = one.answer.samples or (one.answer,)
            known[tuple(other_prompt(tokens))] = [each.token_ids for each in samples]
    with oracle(known, seed):
        batch, drafted = answered(loaded, config, uses_lookup=True, **options)
    assert drafted.keys() == plain.keys()
    for key, one in plain.items():
        truth, found = one.answer, drafted[key].answer
        assert drafted[key].error == one.error
        if truth is None or found is None:
            assert truth is found
            continue
        assert essence(found) == essence(truth)
        assert drafted[key].prefill.cache.length == one.prefill.cache.length
    return batch.decoded.tokens - batch.decoded.steps


def essence(answer: Any) -> list[Any]:
    """All of an answer but times and what the last bits of logits decide."""
    found = []
    for one in answer.samples or (answer,):
        numbers = () if one.logprobs is None else (*one.logprobs.logprobs, *one.logprobs.top_logprobs)
        tokens = () if one.logprobs is None else one.logprobs.top_tokens
        rounded = [round(number, 3) for number in numbers]
        found.append((one.token_ids, one.text, one.finish_reason, len(rounded), sum(rounded) // 0.5, len(tokens)))
    return found


@pytest.mark.quick
@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_any_settings_give_the_same_answers(seed: int) -> None:
    chance = random.Random(seed)

    def some(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if chance.random() < 0.4}

    loaded = ready(chance.choice(["llama-gqa", "mistral-window", "gpt2"]))
    config = some(repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=5, eos_token_id=chance.randrange(190))
    if chance.random() < 0.7:
        config |= {"do_sample": True, "temperature": chance.choice([0.05, 0.7, 1.5])}
        config |= some(top_p=0.9, top_k=20, min_p=0.02)
    if "eos_token_id" not in config:
        config.pop("min_new_tokens", None)
    options = some(
        stop=[str(chance.randrange(190)), f"{chance.randrange(190)} 1"],
        penalties=Penalties(0.4, -0.3),
        stop_repetition=True,
        max_new_tokens=chance.randint(1, NEW_TOKENS),
    )
    own = [OwnGeneration(), OwnGeneration(top_logprobs=chance.choice([0, 3])), OwnGeneration(temperature=0.0)]
    if config.get("do_sample"):
        own += [OwnGeneration(n=3), OwnGeneration(temperature=0.9, frequency_penalty=0.5)]
    compared(loaded, config, seed, own=chance.sample(own, 2), **options)


@pytest.mark.parametrize("name", [*CONFIGS, *WHOLE, "lfm2-convolutions"])
def test_every_kind_of_model(name: str) -> None:
    """Those with recurrent states run without drafts."""
    loaded = ready(name)
    saved = compared(loaded, {}, lengths=LENGTHS[:4])
    assert (saved > 0) == (name != "lfm2-convolutions")


def test_the_end_of_an_answer_may_be_in_a_draft() -> None:
    loaded = ready("llama-gqa")
    _, plain = answered(loaded, {}, uses_lookup=False)
    tokens = {key: one.answer.token_ids for key, one in plain.items() if one.answer is not None}
    end = tokens[30][6]
    assert compared(loaded, {"eos_token_id": end}) > 0
    assert compared(loaded, {}, stop=[f"{tokens[30][5]} {tokens[30][6]}"]) > 0
    for most in range(1, 6):
        compared(loaded, {}, max_new_tokens=most)
    assert compared(loaded, {"forced_eos_token_id": 3, "eos_token_id": 3}) > 0


def test_what_occurred_before_is_drafted() -> None:
    def draft(*ids: int, most: int = 3) -> tuple[int, list[int]]:
        return find_draft(np.array(ids), most)

    assert draft(1, 2, 3, 4, 9, 2, 3) == (2, [4, 9, 2])
    assert draft(2, 3, 4, 7, 3, 5, 2, 3) == (2, [4, 7, 3]), "the longest match comes before a later one"
    assert draft(2, 3, 4, 2, 3, 5, 2, 3) == (2, [5, 2, 3]), "of several, the latest"
    assert draft(5, 7, 7, most=4) == (1, [7, 7, 7, 7]), "repetitions go on"
    assert draft(1, 2) == draft(4) == draft(7, 7, most=0) == (0, [])
    assert draft(*range(20), *range(20), most=5) == (8, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "llama-kernel"])
def test_rows_that_heads_keep_or_sequences_share(name: str, library: KernelLibrary) -> None:
    """After compression heads hold different rows; prompts about a document share its rows, and are read together."""
    loaded = ready(random_model(WIDE, name=name) if name == "llama-kernel" else name)
    if name == "llama-kernel":
        give_kernel(loaded.model, CpuAttention(library, always(OWN)))
        prepare_model(loaded.model, chain=True)

    def kept(ids: list[int]) -> Prefill:
        found, draw = alone(loaded, ids, NEW_TOKENS), random.Random(len(ids))
        layers = [
            None
            if shape.visibility.size is not None
            else [torch.tensor(sorted(draw.sample(range(len(ids)), draw.randint(1, len(ids))))) for _ in range(2)]
            for shape in loaded.shape.layers
        ]
        keep_only(found.cache, layers, NEW_TOKENS)
        return found

    document = alone(loaded, prompt(300)).cache

    def fork(ids: list[int]) -> Prefill:
        return Prefill(Partition((0, 300)), document.fork(300 + NEW_TOKENS), torch.randn(199, generator=seeded(ids)), 0)

    assert compared(loaded, {}, make=kept) > 0
    assert compared(loaded, {}, make=fork) > 0


def seeded(ids: list[int]) -> torch.Generator:
    return torch.Generator().manual_seed(len(ids))


@pytest.mark.parametrize("is_recorded", [False, True])
def test_drafts_are_slots_of_pages(is_recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded steps are padded to their sizes."""
    loaded, lengths = ready("llama-gqa"), [5, 250, 1, 250]
    graphs = steps_recorded(monkeypatch) if is_recorded else []
    with pages_read(monkeypatch):
        pool = pages_of(loaded, 64)

        def make(ids: list[int]) -> Prefill:
            return prefill_packed(loaded, [ids], reserve_tokens=NEW_TOKENS, pool=pool)[0]

        assert compared(loaded, {}, lengths=lengths, make=make) > 0
    assert bool(graphs) == is_recorded and all(graph.replays for graph in graphs[:1])


def test_a_step_that_does_not_fit_runs_without_drafts() -> None:
    loaded, sizes = ready("llama-gqa"), list[int]()

    def crowded(module: Any, inputs: Any) -> None:
        sizes.append(inputs[0].shape[1])
        if sizes[-1] > 8:
            raise MemoryError("too many rows")

    layer = loaded.model.model.layers[1]
    handle = layer.register_forward_pre_hook(crowded)
    try:
        compared(loaded, {}, lengths=[5, 7])
    finally:
        handle.remove()
    fitting = [size for size in sizes if size <= 8]
    assert len(sizes) > len(fitting) > 20
    assert len(sizes) - len(fitting) <= 5, "later steps have fewer rows"


def times(documents: int, gains: Sequence[float], seconds: Any, steps: int = 200) -> list[int]:
    """The drafts of steps that take so many seconds by their rows."""
    found, chosen = StepTimes(), list[int]()
    for _ in range(steps):
        chosen.append(found.choose(documents, gains))
        found.see(documents, documents + chosen[-1], seconds(documents + chosen[-1]))
    return chosen


def test_as_many_drafts_as_save_time() -> None:
    gains = [0.8**at for at in range(1, 15)]
    free = times(1, gains, lambda rows: 1.0)
    assert free.count(14) > 170, "rows that cost nothing"
    costly = times(1, gains, float)
    assert costly.count(0) > 190, "each row costs as much as a step"
    lost = sum(1 + many - sum(gains[:many], 1) for many in costly)
    assert 0 < lost < 0.03 * len(costly), "by trying"
    some = times(8, gains, lambda rows: 1.0 if rows <= 16 else 2.0)
    assert some.count(8) > 180
    assert times(MOST_ROWS, gains, lambda rows: 1.0, 5) == [0] * 5
    assert not any(times(4, [], lambda rows: 1.0))


def test_with_nothing_to_copy_hardly_any_token_is_drafted() -> None:
    chance = np.random.default_rng(1)
    drafts, entries = Lookup(), [chance.integers(1000, size=2000) for _ in range(32)]
    accepted, rows, steps = [drafts.new_acceptance() for _ in entries], 0, 60
    for _ in range(steps):
        candidates = [lookup.Candidate(ids, 50, one) for ids, one in zip(entries, accepted, strict=True)]
        drafted = drafts.choose(candidates)
        new = chance.integers(1000, size=len(entries))
        drafts.learn(candidates, drafted, [[int(token)] for token in new], 0.1 + 0.001 * sum(map(len, drafted)))
        entries = [np.append(ids, token) for ids, token in zip(entries, new, strict=True)]
        rows += sum(map(len, drafted))
    assert rows < 0.05 * steps * len(entries)


@pytest.mark.slow
def test_a_real_model_copies(smollm: LoadedModel, library: KernelLibrary) -> None:
    """Its answers are those without drafts, which its text contains; they take fewer steps."""
    give_kernel(smollm.model, CpuAttention(library, always(OWN)))
    prepare_model(smollm.model, chain=True)
    text = "The harbour master, Ms Odalys Brandt, said that the ferry MV Kestrel had left pier nine at 6:42. "
    said = [{"role": "user", "content": f"{3 * text}\n\nRepeat this text word for word."}]
    ids = smollm.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    kept, found = alone(smollm, ids).cache, dict[bool, Any]()
    logits = alone(smollm, ids).logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimes, "choose", lambda times, documents, gains: len(gains))
        for uses_lookup in (False, True):
            made = GenerationConfig(do_sample=False, repetition_penalty=1.05, eos_token_id=2, pad_token_id=0)
            batch = DecodeBatch(smollm, made, stop=(), max_new_tokens=40, uses_lookup=uses_lookup)
            for key in range(2):
                sequence = kept.fork(len(ids) + 40)
                batch.add(key, Prefill(Partition((0, len(ids))), sequence, logits, 0.0), ids, 0)
            found[uses_lookup] = {key: one.answer.token_ids for key, one in finish(batch).items() if one.answer}, batch
    forget_kernels(smollm.model)
    assert found[True][0] == found[False][0] and len(found[True][0]) == 2
    assert found[True][1].decoded.steps < 0.8 * found[False][1].decoded.steps


def test_stop_strings_need_no_words_of_the_vocabulary() -> None:
    """transformers' own matcher asks for the tokens of a text that a vocabulary of words may not have."""
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(199)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    loaded = replace(ready("llama-gqa"), tokenizer=tokenizer)
    _, whole = answered(loaded, {}, uses_lookup=False, lengths=[5])
    assert whole[5].answer is not None
    tokens = whole[5].answer.token_ids
    pairs = list(itertools.pairwise(tokens))
    at = 1 + next(at for at in reversed(range(len(pairs))) if pairs[at] not in pairs[:at])
    stop = [f"w{tokens[at - 1]} w{tokens[at]}"]
    for uses_lookup in (False, True):
        _, found = answered(loaded, {}, uses_lookup=uses_lookup, lengths=[5], stop=stop)
        assert found[5].answer is not None and found[5].answer.finish_reason == "stop"
        assert found[5].answer.token_ids == tokens[: at + 1]
