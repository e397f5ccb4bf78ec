"""Frames and texts for tests of prompts, and what is in a prompt that was made of them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvr_mpi.documents.prompts import Frame, PromptText

ROOMY = 100_000
WORDS = ("river", "stone", "internationalization", "and", "12.5", "a", "Größe.", "counterrevolutionary", "fox.\n")


def text_of(tokenizer: Any, prompt: PromptText | Frame) -> str:
    ids = prompt.ids if isinstance(prompt, PromptText) else (*prompt.head, *prompt.tail)
    return str(tokenizer.decode(ids))


def body_of(frame: Frame, prompt: PromptText) -> tuple[int, ...]:
    """Ids of the text in a prompt, having checked that the frame is around it."""
    stop = prompt.tokens - len(frame.tail)
    assert prompt.ids[: len(frame.head)] == frame.head
    assert prompt.ids[stop:] == frame.tail
    return prompt.ids[len(frame.head) : stop]


def long_text(words: int) -> str:
    return " ".join(WORDS[number * number % len(WORDS)] for number in range(words))


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    head, tail = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    budget = draw(st.integers(1, 60))
    return Frame(tuple(range(-head, 0)), tuple(range(-100, -100 + tail)), head + tail + budget)
