"""Templates: a constant frame around a document that is only text, with braces that are only braces."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_prompts import ROOMY, body_of, text_of

from kvr_mpi.documents.prompts import encode_text, fit_prompt, make_frame
from kvr_mpi.documents.templates import Template, parse_template
from kvr_mpi.errors import ConfigError

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.mark.parametrize(
    ("template", "times"), [("Summarise.", 0), ("", 0), ("{Text}", 0), ("{ text }", 0), ("{text} and {text}", 2)]
)
def test_a_template_has_its_place_for_the_text_once(tokenizer: Any, template: str, times: int) -> None:
    expected = re.escape(f"prompt.template {template!r} contains {{text}} {times} times; expected once")
    with pytest.raises(ConfigError, match=expected):
        parse_template(template)
    with pytest.raises(ConfigError, match=expected):
        make_frame(tokenizer, template, max_prompt_tokens=ROOMY)


def test_a_long_template_is_not_repeated_in_full() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_template("word " * 1000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        ("Read {text} now", "Read ", " now"),
        ("As {{json}}: {text}", "As {json}: ", ""),
        ('Such as {{"a": {{"b": 1}}}}: {text}', 'Such as {"a": {"b": 1}}: ', ""),
        ('Such as {"a": {"b": 1}}: {text}', 'Such as {"a": {"b": 1}}: ', ""),  # no names: as written
        ('{"a": {{b}}} {text}', '{"a": {b}} ', ""),
        ("{{text}} is {text}", "{text} is ", ""),
        ("{{{text}}}", "{", "}"),
        ("x^{2} {} {text} }} {{", "x^{2} {} ", " } {"),
    ],
)
def test_braces_in_a_template(tokenizer: Any, template: str, before: str, after: str) -> None:
    assert parse_template(template, columns=()) == Template((before, after), ("text",))
    frame = make_frame(tokenizer, template, chat_template=False, max_prompt_tokens=ROOMY)
    assert tokenizer.decode(frame.head) == before and tokenizer.decode(frame.tail) == after


@pytest.mark.parametrize("name", ["question", "Text", " text ", "doc.title", "größe"])
def test_unknown_names_in_braces_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"has {{{name}}}") + r".*known are \{text\}") as caught:
        parse_template(f"About {{text}}: {{{name}}}?", "prompt.reduce_template", columns=())
    assert str(caught.value).startswith("prompt.reduce_template ") and f"{{{{{name}}}}}" in str(caught.value)
    with pytest.raises(ConfigError, match="contains {text} 0 times.*" + re.escape(name)):
        parse_template(f"{{{name}}}", columns=())


def test_the_frame_is_the_template_around_the_text(tokenizer: Any) -> None:
    frame = make_frame(tokenizer, "Read this:\n{text}\nNow sum it up.", max_prompt_tokens=ROOMY)
    prompt = fit_prompt(frame, encode_text(tokenizer, "It rained."), kept=None)
    assert "Read this:\nIt rained.\nNow sum it up." in text_of(tokenizer, prompt)
    assert prompt.dropped_tokens == 0


@settings(max_examples=40)
@given(text=unicode_text)
def test_the_frame_is_the_same_whatever_the_document(tokenizer: Any, text: str) -> None:
    # Encoding a text must leave nothing behind in the tokenizer, such as how it takes control tokens.
    template = "Read this:\n{text}\nNow sum it up."
    frame = make_frame(tokenizer, template, max_prompt_tokens=ROOMY)
    ids = encode_text(tokenizer, text)
    assert make_frame(tokenizer, template, max_prompt_tokens=ROOMY) == frame
    prompt = fit_prompt(frame, ids, kept=None)
    assert body_of(frame, prompt) == tuple(ids)
    assert prompt.tokens == len(frame.head) + len(ids) + len(frame.tail)


@pytest.mark.parametrize(
    "braces", ["{0}", "{}", "}", "{ 7 * 7 }", "{% raw %}", "%s", "{text", "\\1", "{{x}}", "{{ 7 }}"]
)
def test_braces_are_only_braces(tokenizer: Any, braces: str) -> None:
    """In a document always; in a template unless they are double, or around a name."""
    frame = make_frame(tokenizer, f"Before {braces} {{text}} {braces} after", max_prompt_tokens=ROOMY)
    prompt = fit_prompt(frame, encode_text(tokenizer, f"A {braces} and {{text}} and {{x}}."), kept=None)
    shown = braces.replace("{{", "{").replace("}}", "}")
    assert f"Before {shown} A {braces} and {{text}} and {{x}}. {shown} after" in text_of(tokenizer, prompt)


def test_a_template_that_leaves_no_room_is_refused(tokenizer: Any) -> None:
    template = "Summarise the following at some length: {text}"
    roomy = make_frame(tokenizer, template, max_prompt_tokens=ROOMY)
    taken = len(roomy.head) + len(roomy.tail)
    for limit in (0, 1, taken - 1, taken):
        with pytest.raises(
            ConfigError,
            match=f"template alone has {taken} tokens.*can have at most {limit} .*max_new_tokens.*shorten the template",
        ):
            make_frame(tokenizer, template, max_prompt_tokens=limit)
    assert make_frame(tokenizer, template, max_prompt_tokens=taken + 1).text_budget == 1
