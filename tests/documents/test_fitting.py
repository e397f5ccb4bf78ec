"""What fits is left whole; what does not is an error with the numbers, or cut as was asked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_prompts import ROOMY, body_of, frames, long_text

from kvr_mpi.documents.prompts import Frame, Keep, PromptText, encode_text, fit_prompt, make_frame
from kvr_mpi.errors import EXIT_BAD_DATA, DocumentError


@given(frames(), st.sampled_from([None, "head", "tail", "middle"]), st.data())
def test_what_fits_is_left_whole(frame: Frame, kept: Keep | None, data: st.DataObject) -> None:
    tokens = data.draw(st.one_of(st.just(frame.text_budget), st.integers(0, frame.text_budget)))
    prompt = fit_prompt(frame, range(tokens), kept=kept)
    assert body_of(frame, prompt) == tuple(range(tokens))
    assert prompt.tokens <= frame.max_tokens
    assert prompt.dropped_tokens == 0


@given(frames(), st.integers(1, 200))
def test_what_does_not_fit_is_an_error_with_the_numbers(frame: Frame, excess: int) -> None:
    tokens, taken = frame.text_budget + excess, frame.max_tokens - frame.text_budget
    with pytest.raises(
        DocumentError,
        match=rf"too long: {tokens} tokens of text, {frame.text_budget} fit .*{frame.max_tokens} tokens, the template "
        rf"takes {taken}\); set prompt.too_long to 'keep-head' or 'split'",
    ) as caught:
        fit_prompt(frame, range(tokens), kept=None)
    assert caught.value.exit_code == EXIT_BAD_DATA


@given(frames(), st.integers(1, 200))
def test_truncation_keeps_what_it_says(frame: Frame, excess: int) -> None:
    budget = frame.text_budget
    tokens = budget + excess
    kept: dict[Keep, tuple[int, ...]] = {}
    keeps: tuple[Keep, ...] = ("head", "tail", "middle")
    for keep in keeps:
        prompt = fit_prompt(frame, range(tokens), kept=keep)
        assert prompt.tokens == frame.max_tokens
        assert prompt.dropped_tokens == excess
        kept[keep] = body_of(frame, prompt)
    assert kept["head"] == tuple(range(budget))
    assert kept["tail"] == tuple(range(excess, tokens))
    # As many tokens are missing before the middle as after it, to the token.
    before, after = kept["middle"][0], tokens - 1 - kept["middle"][-1]
    assert kept["middle"] == tuple(range(before, before + budget))
    assert before + after == excess and abs(before - after) <= 1


def test_the_limit_is_exact_with_a_real_tokenizer(tokenizer: Any) -> None:
    ids = encode_text(tokenizer, long_text(50))
    roomy = make_frame(tokenizer, "Sum up: {text}", max_prompt_tokens=ROOMY)
    exact = len(roomy.head) + len(ids) + len(roomy.tail)
    frame = make_frame(tokenizer, "Sum up: {text}", max_prompt_tokens=exact)
    assert fit_prompt(frame, ids, kept=None).tokens == exact
    tight = make_frame(tokenizer, "Sum up: {text}", max_prompt_tokens=exact - 1)
    with pytest.raises(DocumentError, match=f"too long: {len(ids)} tokens of text, {len(ids) - 1} fit"):
        fit_prompt(tight, ids, kept=None)
    assert fit_prompt(tight, ids, kept="head").dropped_tokens == 1


@given(st.lists(st.integers(0, 2**31), max_size=20), st.lists(st.integers(0, 2**31), max_size=20))
def test_a_prompts_hash_is_of_its_ids(one: list[int], two: list[int]) -> None:
    hashes = {PromptText(tuple(ids), dropped_tokens=len(ids)).sha256 for ids in (one, two)}
    assert len(hashes) == (1 if one == two else 2)
    assert PromptText(tuple(one)).sha256 == PromptText(tuple(one), dropped_tokens=9).sha256
