"""A document is answered the same in any company, and as transformers answers it alone."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_logs import logger_to
from models import CONFIGS, prompt
from rows import alone, batch_of, finish, other_prompt, ready, tokens_of
from transformers import GenerationConfig

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.group import Group
from kvr_mpi.decode.sampling import Answer
from kvr_mpi.kv.row import Row
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.one_prompt import prefill_single
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.prefill.self_check import why_not_packed

NEW_TOKENS = 14
LENGTHS = [5, 30, 1, 18, 16, 9]


def begun(loaded: LoadedModel, lengths: Sequence[int] = LENGTHS, **options: Any) -> DecodeBatch:
    """A batch of documents of these lengths, each prefilled alone."""
    batch = batch_of(loaded, NEW_TOKENS, Group(loaded, why_alone=options.pop("why_alone", None)), **options)
    for tokens in lengths:
        batch.add(tokens, alone(loaded, other_prompt(tokens), NEW_TOKENS), other_prompt(tokens), 0)
    return batch


def answer_of(loaded: LoadedModel, ids: list[int], seed: int = 0, **options: Any) -> Answer:
    """One document, alone."""
    batch = batch_of(loaded, NEW_TOKENS, **options)
    batch.add("only", alone(loaded, ids, NEW_TOKENS), ids, seed)
    answer = finish(batch)["only"].answer
    assert answer is not None
    return answer


@contextmanager
def before(loaded: LoadedModel, layer: int, hook: Callable[..., None]) -> Iterator[None]:
    """Call something before a layer."""
    layers = next(module for module in loaded.model.modules() if isinstance(module, torch.nn.ModuleList))
    handle = layers[layer].register_forward_pre_hook(hook)
    yield
    handle.remove()


def truths_of(loaded: LoadedModel, lengths: Sequence[int] = LENGTHS, **config: Any) -> dict[int, tuple[int, ...]]:
    return {tokens: truth_of(loaded, other_prompt(tokens), **config) for tokens in lengths}


def truth_of(loaded: LoadedModel, ids: list[int], chain: bool = True, **config: Any) -> tuple[int, ...]:
    """What transformers' own generate() writes, without the end."""
    prepare_model(loaded.model, chain=False)
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | config
    # Without a mask it would take tokens of the prompt for padding.
    out = loaded.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, **settings),
    )
    prepare_model(loaded.model, chain=chain, in_parts=loaded.attends_in_parts)
    written: list[int] = out[0, len(ids) :].tolist()
    return tuple(written[:-1] if written[-1] == config.get("eos_token_id") else written)


@pytest.mark.parametrize("name", CONFIGS)
def test_joining_and_leaving_at_any_step_changes_nothing(name: str) -> None:
    loaded, chance = ready(name), random.Random(name)
    end = truth_of(loaded, other_prompt(5))[7]  # so that at least this one leaves early
    truths = truths_of(loaded, eos_token_id=end)
    batch, found, waiting = begun(loaded, (), eos_token_id=end, why_alone=why_not_packed(loaded)), {}, list(LENGTHS)
    while waiting or batch.running:
        for _ in range(min(len(waiting), chance.randint(0, 2))):
            ids = other_prompt(waiting.pop(chance.randrange(len(waiting))))
            batch.add(len(ids), alone(loaded, ids, NEW_TOKENS), ids, 0)
        for each in batch.step():
            assert each.answer is not None and each.key not in found
            found[each.key] = each.answer
            ends = each.answer.finish_reason == "stop"
            held = each.key + len(each.answer.token_ids) - (0 if ends else 1)
            assert each.prefill.cache.length == held
    assert {key: answer.token_ids for key, answer in found.items()} == truths
    assert found[5].finish_reason == "stop" and len(found[5].token_ids) <= 7


@pytest.mark.quick
@settings(max_examples=8)
@given(st.permutations(range(6)), st.integers(1, 6), st.integers(0, 2**50))
def test_samples_do_not_depend_on_company(order: list[int], count: int, seed: int) -> None:
    loaded = ready("llama-gqa")
    config = {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "top_k": 50}
    batch = batch_of(loaded, NEW_TOKENS, **config)
    some = [LENGTHS[at] for at in order[:count]]
    for at, tokens in enumerate(some):
        batch.add(tokens, alone(loaded, other_prompt(tokens), NEW_TOKENS), other_prompt(tokens), seed + tokens)
        if at % 2:
            batch.step()
    found = tokens_of(finish(batch))
    for tokens in some:
        assert found[tokens] == answer_of(loaded, other_prompt(tokens), seed + tokens, **config).token_ids
    assert found[tokens] != answer_of(loaded, other_prompt(tokens), seed + tokens + 1, **config).token_ids


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 10, "eos_token_id": 11},
        {"suppress_tokens": [3, 90], "repetition_penalty": 0.8},
        {"forced_eos_token_id": 3, "eos_token_id": 3},  # as BART's: the last token is the end, whatever is likelier
    ],
    ids=str,
)
def test_processors_are_those_of_generate(config: dict[str, Any]) -> None:
    loaded = ready("llama-gqa")
    if "min_new_tokens" in config:
        config = config | {"eos_token_id": truth_of(loaded, other_prompt(5))[0]}
    batch = batch_of(loaded, NEW_TOKENS, **config)
    prompts = [other_prompt(tokens) for tokens in LENGTHS]
    for ids, prefill in zip(prompts, prefill_packed(loaded, prompts, reserve_tokens=NEW_TOKENS), strict=True):
        batch.add(len(ids), prefill, ids, 0)
    assert tokens_of(finish(batch)) == truths_of(loaded, **config) != truths_of(loaded)


def test_nothing_to_write_and_ends_at_once() -> None:
    loaded = ready("llama-gqa")
    batch = batch_of(loaded, 0)
    batch.add("nothing", alone(loaded, prompt(5)), prompt(5), 0)
    nothing = finish(batch)["nothing"].answer
    assert nothing is not None and (nothing.token_ids, nothing.text, nothing.finish_reason) == ((), "", "")
    batch = begun(loaded, (5, 9), eos_token_id=truth_of(loaded, other_prompt(5))[0])
    assert batch.running == 2
    (ends,) = batch.step()
    assert ends.key == 5 and ends.answer is not None
    assert (ends.answer.token_ids, ends.answer.finish_reason) == ((), "stop")
    assert batch.running == 1 and batch.step() == []


def test_stop_strings(tokenizer: Any) -> None:
    """Those of the prompt end nothing."""
    loaded = replace(ready("llama-gqa"), tokenizer=tokenizer)
    whole = truths_of(loaded)
    # Two characters that two tokens wrote, and one; bytes that are no character alone are no stop strings.
    pairs = [tokenizer.decode(whole[18][at : at + 2]) for at in range(4, NEW_TOKENS)]
    singles = [tokenizer.decode([token]) for token in whole[5][4:]]
    stop = [next(text for text in some if text.isascii() and text.isprintable()) for some in (pairs, singles)]
    found = {key: one.answer for key, one in finish(begun(loaded, stop=stop)).items()}
    for tokens, answer in found.items():
        assert answer is not None
        text = tokenizer.decode(whole[tokens], skip_special_tokens=True)
        cuts = [text.index(each) for each in stop if each in text]
        assert answer.text == (text[: min(cuts)] if cuts else text)
        assert answer.finish_reason == ("stop" if cuts else "length")
        assert answer.token_ids == whole[tokens][: len(answer.token_ids)]
        assert answer == replace(answer_of(loaded, other_prompt(tokens), stop=stop), seconds=answer.seconds)
    assert sum(answer is not None and answer.finish_reason == "stop" for answer in found.values()) >= 2
    # One that the prompt begins and the answer ends.
    asked = ([*other_prompt(9), last] for last in range(190))
    told = ((ids, tokenizer.decode([ids[-1], truth_of(loaded, ids)[0]])) for ids in asked)
    ids, end = next((ids, text) for ids, text in told if text.isascii() and text.isprintable() and len(text) == 2)
    assert answer_of(loaded, ids, stop=[end]).token_ids == truth_of(loaded, ids)


def test_a_batch_that_does_not_fit_shrinks() -> None:
    def combined() -> int:
        """Number of rows' combined caches in memory."""
        gc.collect()
        return sum(type(each) is Row for each in gc.get_objects())

    loaded, rows, failures = ready("llama-gqa"), list[int](), list[int]()
    truths, before_it = truths_of(loaded), combined()
    batch = begun(loaded)
    batch.step()

    def two_fit(module: Any, inputs: Any) -> None:
        (failures if inputs[0].shape[1] > 2 else rows).append(inputs[0].shape[1])
        if inputs[0].shape[1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with before(loaded, 1, two_fit):
        batch.step()
        assert combined() - before_it <= 3, "those of longer rows are gone"
        assert tokens_of(finish(batch)) == truths and combined() == before_it
    assert batch.most_rows == 2 == max(rows) and len(failures) <= 4, "it seldom tries again with more"


def test_rows_grow_again_when_memory_was_short_for_a_moment() -> None:
    """With a line for each change."""
    loaded, said, rows, failures = ready("llama-gqa"), list[str](), list[int](), [3]
    batch = DecodeBatch(
        loaded,
        GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0),
        stop=(),
        max_new_tokens=NEW_TOKENS,
        logger=logger_to(said),
    )
    for number in range(16):
        batch.add(number, alone(loaded, other_prompt(9), NEW_TOKENS), other_prompt(9), 0)

    def fail_thrice(module: Any, inputs: Any) -> None:
        if failures[0]:
            failures[0] -= 1
            raise MemoryError("another process took it")
        rows.append(inputs[0].shape[1])

    with before(loaded, 1, fail_thrice):
        found = finish(batch)
    assert set(tokens_of(found).values()) == {truth_of(loaded, other_prompt(9))} and len(found) == 16
    assert rows[0] == 2 and rows[-1] == 16
    assert "16 answers" in said[0] and "another process took it" in said[0] and "at most 2" in said[0]
    assert len(said) == 4, "of 2 rows, then 4, 8 and all"


@pytest.mark.parametrize("rows", [0, 1])
def test_a_document_that_cannot_step_alone_becomes_an_error(rows: int) -> None:
    """As long as others hold memory it waits for them; nothing hangs, and the last one alive gets what there is."""
    loaded = ready("llama-gqa")
    batch = begun(loaded, LENGTHS[:3])

    def crowded(module: Any, inputs: Any) -> None:
        if batch.running > rows:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    with before(loaded, 2, crowded):
        found = finish(batch)
    answered = tokens_of(found)
    assert len(found) == 3 and len(answered) == rows
    assert answered == truths_of(loaded, list(answered))
    for each in found.values():
        if each.error is not None:
            assert each.answer is None and each.prefill.cache is None
            assert "not enough memory for its next token" in each.error and "8 bytes" in each.error


def test_other_errors_are_ours() -> None:
    loaded = ready("llama-gqa")
    batch = begun(loaded, LENGTHS[:2])
    with before(loaded, 2, lambda *args: 1 / 0), pytest.raises(ZeroDivisionError):
        batch.step()


@pytest.mark.parametrize("name", ["llama-gqa", "mamba-no-attention", "bloom-own-attention"])
def test_plain_caches_step_one_by_one(name: str) -> None:
    loaded = ready(name, chain=False)
    truths = truths_of(loaded, LENGTHS[:3], chain=False)
    batch = batch_of(loaded, NEW_TOKENS)
    for tokens in LENGTHS[:3]:
        batch.add(tokens, prefill_single(loaded.model, other_prompt(tokens), loaded.device), other_prompt(tokens), 0)
    assert tokens_of(finish(batch)) == truths


@pytest.mark.parametrize("name", ["falcon-alibi", "qwen3-next-delta-rule", "falcon-h1-both"])
def test_a_model_that_does_not_run_packed_steps_one_by_one(name: str) -> None:
    """Each answer is that of generate(); a step that fails is taken back, states included."""
    loaded, steps = ready(name), 0
    truths = truths_of(loaded, (5, 40))
    assert why_not_packed(loaded) is not None

    def run_out(*args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise torch.OutOfMemoryError("on purpose")

    batch = begun(loaded, (5, 40), why_alone=why_not_packed(loaded))
    with before(loaded, -1, run_out):
        assert tokens_of(finish(batch)) == truths
    assert steps > 4
