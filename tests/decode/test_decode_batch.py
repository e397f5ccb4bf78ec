"""A document is answered the same in any company, and as transformers answers it alone."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, prompt, tiny
from rows import alone, long_rope, one_thread, other_prompt
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GenerationConfig

from kvr_mpi.decode.batch import DecodeBatch, Finished
from kvr_mpi.decode.group import Alone
from kvr_mpi.decode.sampling import Answer, make_generation_config
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.one_prompt import prefill_single
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.prefill.self_check import why_not_packed

__all__ = ["one_thread"]  # a fixture of every test here

NEW_TOKENS = 14
LENGTHS = [5, 30, 1, 18, 16, 9]


class Numbers:
    """A tokenizer whose texts are numbers."""

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(map(str, ids))


def ready(name: str, *, chain: bool = True) -> LoadedModel:
    loaded = replace(tiny(name), tokenizer=Numbers())
    prepare_model(loaded.model, chain=chain)
    return loaded


def make_pool(
    loaded: LoadedModel, *, new_tokens: int = NEW_TOKENS, stop: Sequence[str] = (), **config: Any
) -> DecodeBatch[str]:
    group = Alone[str](loaded, why_alone=config.pop("why_alone", None))
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | config
    return DecodeBatch(loaded, GenerationConfig(**settings), stop=stop, max_new_tokens=new_tokens, group=group)


def answers(pool: DecodeBatch[str], steps: int = 1000) -> dict[str, Finished[str]]:
    """Step until all is answered."""
    found: dict[str, Finished] = {}
    while pool.running:
        assert (steps := steps - 1) > 0, "the pool never ends"
        found |= {each.key: each for each in pool.step()}
    return found


def answer_of(loaded: LoadedModel, ids: list[int], seed: int = 0, **options: Any) -> Answer:
    """One document, alone."""
    pool = make_pool(loaded, **options)
    pool.add("only", alone(loaded, ids, NEW_TOKENS), ids, seed)
    answer = answers(pool)["only"].answer
    assert answer is not None
    return answer


def truth_of(loaded: LoadedModel, ids: list[int], **config: Any) -> tuple[int, ...]:
    """What transformers' own generate() writes, without the end."""
    prepare_model(loaded.model, chain=False)
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | config
    config_of_all = GenerationConfig(max_new_tokens=NEW_TOKENS, **settings)
    # Without a mask it would take tokens of the prompt for padding.
    out = loaded.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), generation_config=config_of_all
    )
    prepare_model(loaded.model, chain=True)
    written: list[int] = out[0, len(ids) :].tolist()
    return tuple(written[:-1] if written[-1] == config.get("eos_token_id") else written)


@pytest.mark.parametrize("name", CONFIGS)
def test_joining_and_leaving_at_any_step_changes_nothing(name: str) -> None:
    loaded, chance = ready(name), random.Random(name)
    prompts = {str(tokens): other_prompt(tokens) for tokens in LENGTHS}
    end = truth_of(loaded, prompts["5"])[7]  # so that at least this one leaves early
    truths = {key: truth_of(loaded, ids, eos_token_id=end) for key, ids in prompts.items()}
    pool, found, waiting = make_pool(loaded, eos_token_id=end, why_alone=why_not_packed(loaded)), {}, list(prompts)
    while waiting or pool.running:
        for _ in range(min(len(waiting), chance.randint(0, 2))):
            key = waiting.pop(chance.randrange(len(waiting)))
            pool.add(key, alone(loaded, prompts[key], NEW_TOKENS), prompts[key], 0)
        for each in pool.step():
            assert each.answer is not None and each.key not in found
            found[each.key] = each.answer
            tokens = len(prompts[each.key]) + len(each.answer.token_ids)
            ends = each.answer.finish_reason == "stop"
            assert each.prefill.cache.get_seq_length() == tokens - (0 if ends else 1)
    assert {key: answer.token_ids for key, answer in found.items()} == truths
    assert found["5"].finish_reason == "stop" and len(found["5"].token_ids) <= 7


def test_an_answer_is_made_to_end_where_the_model_says_so() -> None:
    # As BART's generation settings do: their last token is the end, whatever is likelier.
    loaded, ids = ready("llama-gqa"), other_prompt(9)
    forced = {"forced_eos_token_id": 3, "eos_token_id": 3}
    found = answer_of(loaded, ids, **forced)
    assert found.token_ids == truth_of(loaded, ids, **forced) == truth_of(loaded, ids)[:-1]
    assert len(found.token_ids) == NEW_TOKENS - 1 and found.finish_reason == "stop"


@pytest.mark.quick
@settings(max_examples=8)
@given(st.permutations(range(6)), st.integers(1, 6), st.integers(0, 2**50))
def test_samples_do_not_depend_on_company(order: list[int], count: int, seed: int) -> None:
    loaded = ready("llama-gqa")
    config = {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "top_k": 50}
    pool = make_pool(loaded, **config)
    some = [LENGTHS[at] for at in order[:count]]
    for at, tokens in enumerate(some):
        pool.add(str(tokens), alone(loaded, other_prompt(tokens), NEW_TOKENS), other_prompt(tokens), seed + tokens)
        if at % 2:
            pool.step()
    found = answers(pool)
    for tokens in some:
        answer = found[str(tokens)].answer
        truth = answer_of(loaded, other_prompt(tokens), seed + tokens, **config)
        assert answer is not None and answer.token_ids == truth.token_ids


def test_seeds_matter() -> None:
    loaded = ready("llama-gqa")
    written = {
        answer_of(loaded, prompt(9), seed, do_sample=True, temperature=1.5).token_ids for seed in (1, 2, 3, 1, 2, 3)
    }
    assert len(written) == 3


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 10, "eos_token_id": 11},
        {"suppress_tokens": [3, 90], "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_processors_are_those_of_generate(config: dict[str, Any]) -> None:
    loaded = ready("llama-gqa")
    if "min_new_tokens" in config:
        config = config | {"eos_token_id": truth_of(loaded, other_prompt(5))[0]}
    pool = make_pool(loaded, **config)
    prompts = {str(tokens): other_prompt(tokens) for tokens in LENGTHS}
    for (key, ids), prefill in zip(
        prompts.items(), prefill_packed(loaded, list(prompts.values()), reserve_tokens=NEW_TOKENS), strict=True
    ):
        pool.add(key, prefill, ids, 0)
    found = {key: each.answer.token_ids for key, each in answers(pool).items() if each.answer is not None}
    assert found == {key: truth_of(loaded, ids, **config) for key, ids in prompts.items()}
    assert found != {key: truth_of(loaded, ids) for key, ids in prompts.items()}


def test_nothing_to_write_and_ends_at_once() -> None:
    loaded = ready("llama-gqa")
    pool = make_pool(loaded, new_tokens=0)
    pool.add("nothing", alone(loaded, prompt(5)), prompt(5), 0)
    assert pool.running == 1
    (nothing,) = pool.step()
    assert nothing.answer is not None
    assert (nothing.answer.token_ids, nothing.answer.text, nothing.answer.finish_reason) == ((), "", "length")
    first = truth_of(loaded, prompt(5))[0]
    pool = make_pool(loaded, eos_token_id=first)
    pool.add("ends", alone(loaded, prompt(5), NEW_TOKENS), prompt(5), 0)
    pool.add("goes on", alone(loaded, other_prompt(9), NEW_TOKENS), other_prompt(9), 0)
    assert pool.running == 2
    (ends,) = pool.step()
    assert ends.key == "ends" and ends.answer is not None
    assert (ends.answer.token_ids, ends.answer.finish_reason) == ((), "stop")
    assert pool.running == 1 and pool.step() == []


def test_what_a_document_held_is_given_back_when_it_leaves() -> None:
    """At once, and not when Python next looks for circles: it is most of a rank's memory."""
    loaded = ready("llama-gqa")
    pool = make_pool(loaded)
    gc.collect()
    gc.disable()
    try:
        held = []
        for count in (5, 9):
            prefill = alone(loaded, prompt(count), NEW_TOKENS)
            held.append(StorageWeakRef(prefill.cache.layers[0].buffer.untyped_storage()))
            pool.add(str(count), prefill, prompt(count), 0)
            del prefill
        assert len(answers(pool)) == 2
        assert [storage.expired() for storage in held] == [True, True]
    finally:
        gc.enable()


def test_stop_strings(tokenizer: Any) -> None:
    loaded = replace(ready("llama-gqa"), tokenizer=tokenizer)
    prompts = {str(tokens): other_prompt(tokens) for tokens in LENGTHS}
    whole = {key: truth_of(loaded, ids) for key, ids in prompts.items()}
    texts = {key: tokenizer.decode(ids, skip_special_tokens=True) for key, ids in whole.items()}
    # Two characters that two tokens wrote, and one; bytes that are no character alone are no stop strings.
    pairs = [tokenizer.decode(whole["18"][at : at + 2]) for at in range(4, NEW_TOKENS)]
    singles = [tokenizer.decode([token]) for token in whole["5"][4:]]
    stop = [next(text for text in some if text.isascii() and text.isprintable()) for some in (pairs, singles)]
    pool = make_pool(loaded, stop=stop)
    for key, ids in prompts.items():
        pool.add(key, alone(loaded, ids, NEW_TOKENS), ids, 0)
    found = answers(pool)
    for key, ids in prompts.items():
        answer = found[key].answer
        assert answer is not None
        text = texts[key]
        cuts = [text.index(each) for each in stop if each in text]
        assert answer.text == (text[: min(cuts)] if cuts else text)
        assert answer.finish_reason == ("stop" if cuts else "length")
        assert answer.token_ids == whole[key][: len(answer.token_ids)]
        assert answer == replace(answer_of(loaded, ids, stop=stop), seconds=answer.seconds)
    assert sum(each.answer is not None and each.answer.finish_reason == "stop" for each in found.values()) >= 2


class Memory:
    """A layer that runs out of memory if more rows come than it can hold."""

    def __init__(self, rows: int) -> None:
        self.rows, self.most, self.failures = rows, 0, 0

    def __call__(self, module: Any, inputs: Any) -> None:
        if inputs[0].shape[1] > self.rows:
            self.failures += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory: {inputs[0].shape[1]} rows")
        self.most = max(self.most, inputs[0].shape[1])


def test_a_batch_that_does_not_fit_shrinks() -> None:
    loaded = ready("llama-gqa")
    truths = {str(tokens): truth_of(loaded, other_prompt(tokens)) for tokens in LENGTHS}
    pool = make_pool(loaded)
    for tokens in LENGTHS:
        pool.add(str(tokens), alone(loaded, other_prompt(tokens), NEW_TOKENS), other_prompt(tokens), 0)
    pool.step()
    memory = Memory(rows=2)
    hook = loaded.model.model.layers[1].mlp.register_forward_pre_hook(memory)
    found = answers(pool)
    hook.remove()
    assert {key: each.answer.token_ids for key, each in found.items() if each.answer is not None} == truths
    assert pool.most_rows == 2 == memory.most and memory.failures <= 3


@pytest.mark.parametrize("rows", [0, 1])
def test_a_document_that_cannot_step_alone_becomes_an_error(rows: int) -> None:
    """As long as others hold memory it waits for them; nothing hangs, and the last one alive gets what there is."""
    loaded = ready("llama-gqa")
    pool = make_pool(loaded)
    for tokens in LENGTHS[:3]:
        pool.add(str(tokens), alone(loaded, other_prompt(tokens), NEW_TOKENS), other_prompt(tokens), 0)

    def crowded(module: Any, inputs: Any) -> None:
        if pool.running > rows:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    hook = loaded.model.model.layers[2].register_forward_pre_hook(crowded)
    found = answers(pool)
    hook.remove()
    failed = [each for each in found.values() if each.error is not None]
    assert len(found) == 3 and len(failed) == 3 - rows
    for each in found.values():
        if each.error is None:
            assert each.answer is not None
            assert each.answer.token_ids == truth_of(loaded, other_prompt(int(each.key)))
        else:
            assert each.answer is None and each.prefill.cache is None
            assert "not enough memory for its next token" in each.error and "8 bytes" in each.error


def test_other_errors_are_ours() -> None:
    loaded = ready("llama-gqa")
    pool = make_pool(loaded)
    for tokens in LENGTHS[:2]:
        pool.add(str(tokens), alone(loaded, other_prompt(tokens), NEW_TOKENS), other_prompt(tokens), 0)

    def broken(module: Any, inputs: Any) -> None:
        raise RuntimeError("a bug")

    hook = loaded.model.model.layers[2].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="a bug"):
        pool.step()
    hook.remove()


@pytest.mark.parametrize("name", ["llama-gqa", "mamba-no-attention", "bloom-own-attention"])
def test_plain_caches_step_one_by_one(name: str) -> None:
    loaded = ready(name, chain=False)
    pool = make_pool(loaded)
    for tokens in LENGTHS[:3]:
        ids = other_prompt(tokens)
        pool.add(str(tokens), prefill_single(loaded.model, ids, loaded.device), ids, 0)
    found = answers(pool)
    for tokens in LENGTHS[:3]:
        ids, answer = torch.tensor([other_prompt(tokens)]), found[str(tokens)].answer
        out = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer is not None and list(answer.token_ids) == out[0, tokens:].tolist()


def test_a_rotary_embedding_by_length_steps_together() -> None:
    loaded = replace(long_rope(), tokenizer=Numbers())
    pool = make_pool(loaded)
    for tokens in (5, 40):  # the second is beyond the 32 tokens from which on the embedding is another
        pool.add(str(tokens), alone(loaded, other_prompt(tokens), NEW_TOKENS), other_prompt(tokens), 0)
    found = answers(pool)
    for tokens in (5, 40):
        answer = found[str(tokens)].answer
        assert answer is not None and answer == replace(answer_of(loaded, other_prompt(tokens)), seconds=answer.seconds)


@pytest.mark.parametrize("name", ["falcon-alibi", "deepseek-latents", "qwen3-next-delta-rule", "falcon-h1-both"])
def test_a_model_that_does_not_run_packed_steps_one_by_one(name: str) -> None:
    """Each answer is that of generate(); a step that fails is taken back, states included."""
    loaded = replace(tiny(name), tokenizer=Numbers())
    prompts = {str(tokens): other_prompt(tokens) for tokens in (5, 40)}
    truths = {key: truth_of(loaded, ids) for key, ids in prompts.items()}
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    pool, failures = make_pool(loaded, why_alone=why_not_packed(loaded)), [4]
    steps = 0

    def run_out(*args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps in failures:
            raise torch.OutOfMemoryError("on purpose")

    for key, ids in prompts.items():
        pool.add(key, alone(loaded, ids, NEW_TOKENS), ids, 0)
    last = list(next(module for module in loaded.model.modules() if isinstance(module, torch.nn.ModuleList)))[-1]
    hook = last.register_forward_pre_hook(run_out)
    found = answers(pool)
    hook.remove()
    assert steps > max(failures) and why_not_packed(loaded) is not None
    for key, truth in truths.items():
        answer = found[key].answer
        assert answer is not None and answer.token_ids == truth


@pytest.mark.quick
def test_smollm_answers_real_texts_together(smollm: LoadedModel) -> None:
    texts = [
        "The harbour master wrote down every ship that came in, and",
        "Water boils at a lower temperature on a mountain because",
        "List three colours:",
        "In 1889 the tower was opened to the public. Visitors " * 6,
    ]
    prompts = [smollm.tokenizer(text)["input_ids"] for text in texts]
    config = make_generation_config(smollm.model, {"do_sample": False})
    prepare_model(smollm.model, chain=False)
    truths = [
        smollm.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            generation_config=config,
            max_new_tokens=8,
            pad_token_id=0,
        )
        for ids in prompts
    ]
    prepare_model(smollm.model, chain=True)
    assert why_not_packed(smollm) is None
    pool: DecodeBatch[str] = DecodeBatch(smollm, config, stop=(), max_new_tokens=8)
    for at, prefill in enumerate(prefill_packed(smollm, prompts, reserve_tokens=8)):
        pool.add(str(at), prefill, prompts[at], 0)
    found = answers(pool)
    for at, (ids, truth) in enumerate(zip(prompts, truths, strict=True)):
        answer = found[str(at)].answer
        assert answer is not None
        end = config.eos_token_id
        assert list(answer.token_ids) == [token for token in truth[0, len(ids) :].tolist() if token != end]
