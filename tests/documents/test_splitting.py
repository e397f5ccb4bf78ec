"""A text that is split loses nothing: parts of nearly one length that end where the text pauses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_prompts import body_of, frames, long_text

from kvr_mpi.documents.prompts import Frame, encode_text, split_text


@pytest.fixture(scope="module")
def long_ids(tokenizer: Any) -> list[int]:
    return encode_text(tokenizer, long_text(1500))


@settings(max_examples=60)
@given(frame=frames(), data=st.data())
def test_split_parts_cover_every_token_once_in_order(
    tokenizer: Any, long_ids: list[int], frame: Frame, data: st.DataObject
) -> None:
    ids = long_ids[: data.draw(st.integers(1, 1500))]
    overlap = data.draw(st.integers(0, frame.text_budget // 2))
    frame = replace(frame, overlap=overlap)
    parts = split_text(tokenizer, frame, ids)
    bodies = [body_of(frame, part) for part in parts]
    whole: list[int] = []
    for body in bodies:
        repeated = min(overlap, len(whole))
        assert [*body[:repeated]] == whole[len(whole) - repeated :], "the end of what was before it"
        whole += body[repeated:]
    assert whole == ids
    assert all(1 <= len(body) <= frame.text_budget for body in bodies)
    assert all(part.tokens <= frame.max_tokens and part.dropped_tokens == 0 for part in parts)
    assert len(ids) > frame.text_budget or parts == [frame.around(ids)], "what fits is not split"


@pytest.mark.parametrize("budget", [40, 150, 500])
@pytest.mark.parametrize(
    "text", [long_text(3000), "It was a dark night, and the rain fell on the inn.\n\n" * 200, "nothing" * 3000]
)
def test_split_parts_are_nearly_equal(tokenizer: Any, text: str, budget: int) -> None:
    # A seam is looked for in the last 15 % of a part: no part needs to be half as long as another.
    frame, ids = Frame((1,), (2,), budget + 2), encode_text(tokenizer, text)
    for tokens in (budget + 1, budget + 10, len(ids)):
        lengths = [len(body_of(frame, part)) for part in split_text(tokenizer, frame, ids[:tokens])]
        assert len(lengths) > 1 if tokens == len(ids) else len(lengths) == 2, tokens
        assert min(lengths) >= max(lengths) / 2, lengths


def split_and_decode(tokenizer: Any, text: str, budget: int) -> list[str]:
    frame = Frame((), (), budget)
    parts = [str(tokenizer.decode(part.ids)) for part in split_text(tokenizer, frame, encode_text(tokenizer, text))]
    assert "".join(parts) == text
    assert len(parts) > 2
    return parts


# Each has an end of its kind in every 15 % of a part of 100 tokens.
@pytest.mark.parametrize("budget", [100, 130, 170])
@pytest.mark.parametrize(
    ("text", "end"),
    [
        pytest.param("Rain fell on the old inn.\n\n" * 80, "\n\n", id="paragraphs"),
        pytest.param("Rain\nfell\non it.\n\n" * 80, "\n\n", id="paragraphs of lines"),
        pytest.param("rain and wind\n" * 200, "\n", id="lines"),
        pytest.param("Rain. Wind. Snow\n" * 150, "\n", id="lines of sentences"),
        pytest.param("The rain fell, and the wind blew. " * 100, ".", id="sentences"),
    ],
)
def test_parts_end_where_the_text_pauses(tokenizer: Any, text: str, end: str, budget: int) -> None:
    for part in split_and_decode(tokenizer, text, budget)[:-1]:
        assert part.rstrip(" ").endswith(end), part[-30:]


@pytest.mark.parametrize("text", ["internationalization counterrevolutionary " * 200, "3.14159 2.71828 12.5 " * 120])
def test_a_cut_goes_between_words_if_it_can(tokenizer: Any, text: str) -> None:
    parts = split_and_decode(tokenizer, text, 100)
    for left, right in pairwise(parts):
        assert left[-1].isspace() or right[0].isspace(), (left[-20:], right[:20])
