"""Prompts: a constant frame, a document that is only text, and cuts that lose nothing unasked."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvr_mpi.documents.prompts import (
    Frame,
    Keep,
    Prompt,
    check_template,
    cut_template,
    encode_text,
    fit_prompt,
    make_frame,
    split_text,
)
from kvr_mpi.errors import EXIT_BAD_DATA, ConfigError, DocumentError

ROOMY = 100_000
WORDS = ("river", "stone", "internationalization", "and", "12.5", "a", "Größe.", "counterrevolutionary", "fox.\n")

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def plain(tokenizer: Any) -> Any:
    """The same tokenizer without its chat template, as a base model has it."""
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    return plain


def word_tokenizer(*, adds_tokens: bool) -> Any:
    """A tokenizer of a few words, with or without tokens of its own around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "ask": 3, "words": 4, "answer": 5}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_tokens:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", words["<s>"]), ("</s>", words["</s>"])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def with_chat(tokenizer: Any, chat_template: str) -> Any:
    other = copy.deepcopy(tokenizer)
    other.chat_template = chat_template
    return other


def text_of(tokenizer: Any, prompt: Prompt | Frame) -> str:
    ids = prompt.ids if isinstance(prompt, Prompt) else (*prompt.head, *prompt.tail)
    return str(tokenizer.decode(ids))


def body_of(frame: Frame, prompt: Prompt) -> tuple[int, ...]:
    """Ids of the text in a prompt, having checked that the frame is around it."""
    stop = prompt.tokens - len(frame.tail)
    assert prompt.ids[: len(frame.head)] == frame.head
    assert prompt.ids[stop:] == frame.tail
    return prompt.ids[len(frame.head) : stop]


def long_text(words: int) -> str:
    return " ".join(WORDS[number * number % len(WORDS)] for number in range(words))


# Templates


@pytest.mark.parametrize(
    ("template", "times"), [("Summarise.", 0), ("", 0), ("{Text}", 0), ("{ text }", 0), ("{text} and {text}", 2)]
)
def test_a_template_has_its_place_for_the_text_once(tokenizer: Any, template: str, times: int) -> None:
    expected = re.escape(f"prompt.template {template!r} contains {{text}} {times} times; expected once")
    with pytest.raises(ConfigError, match=expected):
        check_template(template)
    with pytest.raises(ConfigError, match=expected):
        make_frame(tokenizer, template, max_prompt_tokens=ROOMY)


def test_a_long_template_is_not_repeated_in_full() -> None:
    with pytest.raises(ConfigError) as caught:
        check_template("word " * 1000)
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
    assert cut_template(template) == (before, after)
    frame = make_frame(tokenizer, template, chat_template=False, max_prompt_tokens=ROOMY)
    assert tokenizer.decode(frame.head) == before and tokenizer.decode(frame.tail) == after


@pytest.mark.parametrize("name", ["question", "Text", " text ", "doc.title", "größe"])
def test_unknown_names_in_braces_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"has {{{name}}}") + r".*what exists is \{text\}") as caught:
        check_template(f"About {{text}}: {{{name}}}?", "prompt.reduce_template")
    assert str(caught.value).startswith("prompt.reduce_template ") and f"{{{{{name}}}}}" in str(caught.value)
    with pytest.raises(ConfigError, match="contains {text} 0 times.*" + re.escape(name)):
        check_template(f"{{{name}}}")


def test_the_frame_is_the_template_around_the_text(tokenizer: Any) -> None:
    frame = make_frame(tokenizer, "Read this:\n{text}\nNow sum it up.", max_prompt_tokens=ROOMY)
    prompt = fit_prompt(frame, encode_text(tokenizer, "It rained."), truncate=None)
    assert "Read this:\nIt rained.\nNow sum it up." in text_of(tokenizer, prompt)
    assert prompt.dropped_tokens == 0


@settings(deadline=None, max_examples=40)
@given(text=unicode_text)
def test_the_frame_is_the_same_whatever_the_document(tokenizer: Any, text: str) -> None:
    # Encoding a text must leave nothing behind in the tokenizer, such as how it takes control tokens.
    template = "Read this:\n{text}\nNow sum it up."
    frame = make_frame(tokenizer, template, max_prompt_tokens=ROOMY)
    ids = encode_text(tokenizer, text)
    assert make_frame(tokenizer, template, max_prompt_tokens=ROOMY) == frame
    prompt = fit_prompt(frame, ids, truncate=None)
    assert body_of(frame, prompt) == tuple(ids)
    assert prompt.tokens == len(frame.head) + len(ids) + len(frame.tail)


@pytest.mark.parametrize(
    "braces", ["{0}", "{}", "}", "{ 7 * 7 }", "{% raw %}", "%s", "{text", "\\1", "{{x}}", "{{ 7 }}"]
)
def test_braces_are_only_braces(tokenizer: Any, braces: str) -> None:
    """In a document always; in a template unless they are double, or around a name."""
    frame = make_frame(tokenizer, f"Before {braces} {{text}} {braces} after", max_prompt_tokens=ROOMY)
    prompt = fit_prompt(frame, encode_text(tokenizer, f"A {braces} and {{text}} and {{x}}."), truncate=None)
    shown = braces.replace("{{", "{").replace("}}", "}")
    assert f"Before {shown} A {braces} and {{text}} and {{x}}. {shown} after" in text_of(tokenizer, prompt)


def test_a_template_that_leaves_no_room_is_refused(tokenizer: Any) -> None:
    template = "Summarise the following at some length: {text}"
    roomy = make_frame(tokenizer, template, max_prompt_tokens=ROOMY)
    taken = len(roomy.head) + len(roomy.tail)
    for limit in (0, 1, taken - 1, taken):
        with pytest.raises(
            ConfigError,
            match=f"template alone takes {taken} tokens.*may have {limit} .*max_new_tokens.*shorten the template",
        ):
            make_frame(tokenizer, template, max_prompt_tokens=limit)
    assert make_frame(tokenizer, template, max_prompt_tokens=taken + 1).text_budget == 1


# Chat templates


@pytest.mark.parametrize("chat_template", [None, True])
def test_a_chat_template_is_used_if_there_is_one(tokenizer: Any, chat_template: bool | None) -> None:
    frame = make_frame(tokenizer, "Sum up: {text}", chat_template=chat_template, max_prompt_tokens=ROOMY)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert start in frame.head and end in frame.tail
    assert text_of(tokenizer, frame).rstrip().endswith("assistant")
    # Around the text of a document, they are what the chat template makes of the whole.
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Sum up: words"}], tokenize=False, add_generation_prompt=True
    )
    prompt = fit_prompt(frame, encode_text(tokenizer, "words"), truncate=None)
    assert text_of(tokenizer, prompt) == whole


def test_a_chat_template_can_be_left_out(tokenizer: Any) -> None:
    frame = make_frame(tokenizer, "Sum up: {text} In short:", chat_template=False, max_prompt_tokens=ROOMY)
    prompt = fit_prompt(frame, encode_text(tokenizer, "words"), truncate=None)
    assert text_of(tokenizer, prompt) == "Sum up: words In short:"
    assert not set(tokenizer.all_special_ids) & set(prompt.ids)


def test_without_a_chat_template_the_words_are_the_prompt(plain: Any) -> None:
    for chat_template in (None, False):
        frame = make_frame(plain, "Sum up: {text}", chat_template=chat_template, max_prompt_tokens=ROOMY)
        prompt = fit_prompt(frame, encode_text(plain, "words"), truncate=None)
        assert text_of(plain, prompt) == "Sum up: words"


def test_a_bare_text_is_the_whole_prompt(plain: Any) -> None:
    assert make_frame(plain, "{text}", max_prompt_tokens=8) == Frame((), (), 8)


def test_the_first_token_is_the_tokenizers_own_and_the_last_is_not() -> None:
    begins_and_ends = word_tokenizer(adds_tokens=True)
    # Llama's texts begin with <s>; a prompt that ends in </s> would be over before the answer.
    assert begins_and_ends("ask words")["input_ids"] == [1, 3, 4, 2]
    frame = make_frame(begins_and_ends, "ask {text} answer", max_prompt_tokens=8)
    assert (frame.head, frame.tail) == ((1, 3), (5,))
    assert make_frame(begins_and_ends, "{text}", max_prompt_tokens=8) == Frame((1,), (), 8)
    assert encode_text(begins_and_ends, "words words") == [4, 4]


def test_a_tokenizer_without_tokens_of_its_own_is_fine() -> None:
    bare = word_tokenizer(adds_tokens=False)
    assert bare(" ")["input_ids"] == []
    assert make_frame(bare, "{text}", max_prompt_tokens=8) == Frame((), (), 8)
    assert make_frame(bare, "ask {text}", max_prompt_tokens=8) == Frame((3,), (), 8)


def test_a_system_prompt_is_in_the_frame(tokenizer: Any) -> None:
    frame = make_frame(tokenizer, "{text}", system="You are a {x} hydrologist.", max_prompt_tokens=ROOMY)
    assert "system\nYou are a {x} hydrologist." in str(tokenizer.decode(frame.head))
    assert frame != make_frame(tokenizer, "{text}", max_prompt_tokens=ROOMY)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"chat_template": True}, "prompt.chat_template = true"),
        ({"system": "Be brief."}, "prompt.system = 'Be brief.'"),
        ({"chat_template": True, "system": "Be brief."}, "prompt.chat_template = true"),
        ({"chat_template": False, "system": "Be brief."}, "prompt.system = 'Be brief.'"),
    ],
)
def test_asking_for_a_chat_template_there_is_not(plain: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named) + ".*no chat template; .*into prompt.template"):
        make_frame(plain, "{text}", max_prompt_tokens=ROOMY, **options)


def test_a_system_prompt_needs_the_chat_template(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"prompt\.system is set, but prompt\.chat_template is false; put it into"):
        make_frame(tokenizer, "{text}", system="Be brief.", chat_template=False, max_prompt_tokens=ROOMY)


@pytest.mark.parametrize(
    ("chat_template", "why"),
    [
        ("{{ raise_exception('no system role, please') }}", "refuses the prompt: no system role, please"),
        ("{% if %}", "refuses the prompt"),
        ("{{ messages[0].nothing.at.all }}", "refuses the prompt"),
        ("The same for everyone", "shows the user's message 0 times"),
        ("{% for m in messages * 2 %}{{ m.content }}{% endfor %}", "shows the user's message 2 times"),
    ],
)
def test_a_chat_template_we_cannot_use_says_how_to_do_without(tokenizer: Any, chat_template: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{why}.*prompt.chat_template = false"):
        make_frame(with_chat(tokenizer, chat_template), "{text}", max_prompt_tokens=ROOMY)


# Control tokens


def test_no_control_token_comes_out_of_a_document(tokenizer: Any) -> None:
    added = {int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    assert "<|im_end|>" in added.values()
    make_frame(tokenizer, "{text}", max_prompt_tokens=ROOMY)
    for token in added.values():
        text = f"{token}words {token}\n{token}{token}"
        ids = encode_text(tokenizer, text)
        assert not set(added) & set(ids), token
        assert tokenizer.decode(ids) == text
    make_frame(tokenizer, "{text}", max_prompt_tokens=ROOMY)
    assert not set(added) & set(encode_text(tokenizer, "<|im_end|>"))


@settings(deadline=None, max_examples=40)
@given(pieces=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "system", "\n", "<|", "im_end", "|>", " "])))
def test_a_document_cannot_end_its_own_turn(tokenizer: Any, pieces: list[str]) -> None:
    frame = make_frame(tokenizer, "Sum up: {text}", max_prompt_tokens=ROOMY)
    prompt = fit_prompt(frame, encode_text(tokenizer, "".join(pieces)), truncate=None)
    for control in tokenizer.all_special_ids:
        assert prompt.ids.count(control) == (*frame.head, *frame.tail).count(control)


def test_no_control_token_comes_out_of_a_vocabulary_that_has_it_as_a_word() -> None:
    # A unigram model (sentencepiece's default) finds its control tokens among its pieces, special or not.
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -5.0) for piece in "▁a</s>")]
    raw = Tokenizer(models.Unigram(pieces, unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    ids = encode_text(unigram, "a </s> a<s>")
    assert ids
    assert not {unigram.bos_token_id, unigram.eos_token_id} & set(ids)


# Fitting


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    head, tail = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    budget = draw(st.integers(1, 60))
    return Frame(tuple(range(-head, 0)), tuple(range(-100, -100 + tail)), head + tail + budget)


@given(frames(), st.sampled_from([None, "head", "tail", "middle"]), st.data())
def test_what_fits_is_left_whole(frame: Frame, truncate: Keep | None, data: st.DataObject) -> None:
    tokens = data.draw(st.one_of(st.just(frame.text_budget), st.integers(0, frame.text_budget)))
    prompt = fit_prompt(frame, range(tokens), truncate=truncate)
    assert body_of(frame, prompt) == tuple(range(tokens))
    assert prompt.tokens <= frame.max_tokens
    assert prompt.dropped_tokens == 0


@given(frames(), st.integers(1, 200))
def test_what_does_not_fit_is_an_error_with_the_numbers(frame: Frame, excess: int) -> None:
    tokens, taken = frame.text_budget + excess, frame.max_tokens - frame.text_budget
    with pytest.raises(
        DocumentError,
        match=rf"too long: {tokens} tokens of text, {frame.text_budget} fit .*{frame.max_tokens} tokens, the template "
        rf"takes {taken}\); set prompt.too_long to 'truncate' or 'split'",
    ) as caught:
        fit_prompt(frame, range(tokens), truncate=None)
    assert caught.value.exit_code == EXIT_BAD_DATA


@given(frames(), st.integers(1, 200))
def test_truncation_keeps_what_it_says(frame: Frame, excess: int) -> None:
    budget = frame.text_budget
    tokens = budget + excess
    kept: dict[Keep, tuple[int, ...]] = {}
    keeps: tuple[Keep, ...] = ("head", "tail", "middle")
    for keep in keeps:
        prompt = fit_prompt(frame, range(tokens), truncate=keep)
        assert prompt.tokens == frame.max_tokens
        assert prompt.dropped_tokens == excess
        kept[keep] = body_of(frame, prompt)
    assert kept["head"] == tuple(range(budget))
    assert kept["tail"] == tuple(range(excess, tokens))
    # As many tokens are missing before the middle as behind it, to the token.
    before, behind = kept["middle"][0], tokens - 1 - kept["middle"][-1]
    assert kept["middle"] == tuple(range(before, before + budget))
    assert before + behind == excess and abs(before - behind) <= 1


def test_the_limit_is_exact_with_a_real_tokenizer(tokenizer: Any) -> None:
    ids = encode_text(tokenizer, long_text(50))
    roomy = make_frame(tokenizer, "Sum up: {text}", max_prompt_tokens=ROOMY)
    exact = len(roomy.head) + len(ids) + len(roomy.tail)
    frame = make_frame(tokenizer, "Sum up: {text}", max_prompt_tokens=exact)
    assert fit_prompt(frame, ids, truncate=None).tokens == exact
    tight = make_frame(tokenizer, "Sum up: {text}", max_prompt_tokens=exact - 1)
    with pytest.raises(DocumentError, match=f"too long: {len(ids)} tokens of text, {len(ids) - 1} fit"):
        fit_prompt(tight, ids, truncate=None)
    assert fit_prompt(tight, ids, truncate="head").dropped_tokens == 1


@given(st.lists(st.integers(0, 2**31), max_size=20), st.lists(st.integers(0, 2**31), max_size=20))
def test_a_prompts_hash_is_of_its_ids(one: list[int], two: list[int]) -> None:
    hashes = {Prompt(tuple(ids), dropped_tokens=len(ids)).sha256 for ids in (one, two)}
    assert len(hashes) == (1 if one == two else 2)
    assert Prompt(tuple(one)).sha256 == Prompt(tuple(one), dropped_tokens=9).sha256


# Splitting


@pytest.fixture(scope="module")
def long_ids(tokenizer: Any) -> list[int]:
    return encode_text(tokenizer, long_text(1500))


@settings(deadline=None, max_examples=60)
@given(frame=frames(), data=st.data())
def test_split_parts_cover_every_token_once_in_order(
    tokenizer: Any, long_ids: list[int], frame: Frame, data: st.DataObject
) -> None:
    ids = long_ids[: data.draw(st.integers(1, 1500))]
    parts = split_text(tokenizer, frame, ids)
    bodies = [body_of(frame, part) for part in parts]
    assert [token for body in bodies for token in body] == ids
    assert all(1 <= len(body) <= frame.text_budget for body in bodies)
    assert all(part.tokens <= frame.max_tokens and part.dropped_tokens == 0 for part in parts)
    assert split_text(tokenizer, frame, ids) == parts


@given(frame=frames(), data=st.data())
@settings(deadline=None, max_examples=30)
def test_a_text_that_fits_is_not_split(tokenizer: Any, long_ids: list[int], frame: Frame, data: st.DataObject) -> None:
    ids = long_ids[: data.draw(st.integers(1, frame.text_budget))]
    assert split_text(tokenizer, frame, ids) == [frame.around(ids)]


@pytest.mark.parametrize("budget", [40, 60, 80, 100, 150, 200, 300, 500])
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(long_text(3000), id="words"),
        pytest.param(
            "\n\n".join(["It was a dark night, and the rain fell on the roof of the inn."] * 200), id="paragraphs"
        ),
        pytest.param("nothing" * 3000, id="no seams"),
    ],
)
def test_split_parts_are_nearly_equal(tokenizer: Any, text: str, budget: int) -> None:
    # A seam is looked for in the last 15 % of a part: no part needs to be half as long as another.
    frame = Frame((1,), (2,), budget + 2)
    ids = encode_text(tokenizer, text)
    lengths = [len(body_of(frame, part)) for part in split_text(tokenizer, frame, ids)]
    assert len(lengths) > 1
    assert min(lengths) >= max(lengths) / 2, lengths


@pytest.mark.parametrize("excess", [1, 2, 10])
def test_a_text_just_too_long_becomes_two_halves(tokenizer: Any, long_ids: list[int], excess: int) -> None:
    frame = Frame((1,), (2,), 202)
    lengths = [len(body_of(frame, part)) for part in split_text(tokenizer, frame, long_ids[: 200 + excess])]
    assert len(lengths) == 2
    assert min(lengths) >= max(lengths) / 2


def split_and_decode(tokenizer: Any, text: str, budget: int) -> list[str]:
    frame = Frame((), (), budget)
    parts = [str(tokenizer.decode(part.ids)) for part in split_text(tokenizer, frame, encode_text(tokenizer, text))]
    assert "".join(parts) == text
    assert len(parts) > 2
    return parts


# Each has an end of its kind in every 15 % of a part of 100 tokens.
LINE = "rain and wind\n"
SENTENCE = "The rain fell, and the wind blew. "


@pytest.mark.parametrize("budget", [100, 130, 170])
@pytest.mark.parametrize(
    ("text", "end"),
    [
        pytest.param("Rain fell on the old inn.\n\n" * 80, "\n\n", id="paragraphs"),
        pytest.param("Rain\nfell\non it.\n\n" * 80, "\n\n", id="paragraphs of lines"),
        pytest.param(LINE * 200, "\n", id="lines"),
        pytest.param("Rain. Wind. Snow\n" * 150, "\n", id="lines of sentences"),
        pytest.param(SENTENCE * 100, ".", id="sentences"),
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


def test_a_text_without_any_seam_is_cut_all_the_same(tokenizer: Any) -> None:
    assert max(map(len, split_and_decode(tokenizer, "nothing" * 500, 100))) < 7 * 500
