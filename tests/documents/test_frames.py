"""Frames: template and chat template around a document that is only text; prompts that fit exactly, or are split."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_corpora import with_chat
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.documents.prompts import Frame, Keep, PromptText, fit_prompt, make_frame, split_text
from kvr_mpi.documents.templates import Template, parse_template
from kvr_mpi.errors import EXIT_BAD_DATA, ConfigError, DocumentError

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


def prompt_of(tokenizer: Any, frame: Frame, text: str) -> PromptText:
    return fit_prompt(frame, encode_text(tokenizer, text), kept=None)


# Templates and the fields of a row


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        ("Read {text} now", "Read ", " now"),
        ('Such as {{"a": {{"b": 1}}}}: {text}', 'Such as {"a": {"b": 1}}: ', ""),
        ('Such as {"a": {"b": 1}}: {text}', 'Such as {"a": {"b": 1}}: ', ""),  # no names: as written
        ("{{text}} is {text}", "{text} is ", ""),
        ("{{{text}}}", "{", "}"),
        ("x^{2} {0} {} { 7 * 7 } {% raw %} {text} }} {{", "x^{2} {0} {} { 7 * 7 } {% raw %} ", " } {"),
    ],
)
def test_braces_in_a_template(tokenizer: Any, template: str, before: str, after: str) -> None:
    assert parse_template(template, columns=()) == Template((before, after), ("text",))
    frame = make_frame(tokenizer, template, chat_template=False, max_prompt_tokens=ROOMY)
    assert tokenizer.decode(frame.head) == before and tokenizer.decode(frame.tail) == after


@pytest.mark.parametrize(
    ("template", "columns", "words"),
    [
        ("Summarise.", (), r"prompt.reduce_template 'Summarise.' contains \{text\} 0 times"),
        ("{Text}" + " word" * 1000, (), r"contains \{text\} 0 times.*Text"),
        ("{text} and {text}", (), r"contains \{text\} 2 times"),
        ("About {text}: {doc.title}?", (), r"has \{doc.title\}.*valid: \{text\}.*\{\{doc.title\}\}"),
        ("{ text }: {text}", (), r"has \{ text \}"),
        ("{titel} {text}", ("title", "text"), r"has \{titel\}.*and the fields of its row: text, title"),
        ("{first name} {text}", ("first name", "text"), r"has \{first name\}: .*rename it"),
    ],
)
def test_names_that_a_template_cannot_have_are_refused(template: str, columns: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_template(template, "prompt.reduce_template", columns=columns)


@pytest.mark.parametrize("chat_template", [False, True])
def test_fields_go_where_the_template_names_them(tokenizer: Any, chat_template: bool) -> None:
    template = "About {title} ({year}):\n{text}\nIn {title}, {question}"
    assert parse_template("{title} {text}", columns=("title", "text", "year")).columns == ("title",)
    frame = make_frame(tokenizer, template, chat_template=chat_template, max_prompt_tokens=ROOMY)
    filled = frame.filled(tokenizer, {"title": "Rain", "year": "1931", "question": "what fell?"})
    prompt = prompt_of(tokenizer, filled, "It rained.")
    assert "About Rain (1931):\nIt rained.\nIn Rain, what fell?" in text_of(tokenizer, prompt)
    assert tokenizer.decode(prompt.ids[slice(*prompt.text)]) == "It rained."
    assert filled.head[: len(frame.shared_head)] == frame.shared_head
    other = frame.filled(tokenizer, {"title": "Snow", "year": "2", "question": "why?"})
    assert other.head[: len(frame.shared_head)] == frame.shared_head and other.head != filled.head
    tight = make_frame(tokenizer, "{title}{text}", chat_template=False, max_prompt_tokens=8)
    assert tight.filled(tokenizer, {"title": " word" * 7}).text_budget == 1
    for words in (8, 30):
        with pytest.raises(DocumentError, match=f"has {words} tokens; a prompt can have at most 8"):
            tight.filled(tokenizer, {"title": " word" * words})


# Chat templates


@pytest.mark.parametrize(
    ("has_chat", "chat_template"), [(True, None), (True, True), (True, False), (False, None), (False, False)]
)
def test_a_chat_template_is_used_if_there_is_one(tokenizer: Any, has_chat: bool, chat_template: bool | None) -> None:
    mine = tokenizer if has_chat else with_chat(tokenizer, None)
    frame = make_frame(mine, "Sum up: {text} In short:", chat_template=chat_template, max_prompt_tokens=ROOMY)
    prompt = prompt_of(mine, frame, "words")
    if not has_chat or chat_template is False:
        assert text_of(mine, prompt) == "Sum up: words In short:" and not set(mine.all_special_ids) & set(prompt.ids)
        return
    said = [{"role": "user", "content": "Sum up: words In short:"}]
    assert text_of(mine, prompt) == mine.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert {*mine.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])} <= {*prompt.ids}
    system = make_frame(mine, "{text}", system="You are a {x} hydrologist.", max_prompt_tokens=ROOMY)
    assert "system\nYou are a {x} hydrologist." in str(mine.decode(system.head))


@pytest.mark.parametrize("adds_tokens", [False, True])
def test_the_first_token_is_the_tokenizers_own_and_the_last_is_not(adds_tokens: bool) -> None:
    """Llama's texts begin with <s>; a prompt that ends in </s> would be over before the answer."""
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "ask": 3, "words": 4}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_tokens:
        ends = [("<s>", 1), ("</s>", 2)]
        raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    words = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    begins = (1,) if adds_tokens else ()
    for template, ids in (("ask {text} ask", ((*begins, 3), (3,))), ("{text}", (begins, ()))):
        frame = make_frame(words, template, max_prompt_tokens=8)
        assert (frame.head, frame.tail) == ids
    assert encode_text(words, "words words") == [4, 4]


@pytest.mark.parametrize(
    ("chat_template", "options", "words"),
    [
        (None, {"chat_template": True}, r"prompt.chat_template = true.*no chat template; .*into prompt.template"),
        (None, {"system": "Be brief."}, r"prompt.system = 'Be brief.'.*no chat template; .*into prompt.template"),
        ("", {"chat_template": False, "system": "Be brief."}, r"prompt\.system is set, but .*is false; put it into"),
        ("{{ raise_exception('no system role, please') }}", {}, "rejects the prompt: no system role, please.*= false"),
        ("{{ messages[0].nothing.at.all }}", {}, "rejects the prompt.*prompt.chat_template = false"),
        ("The same for everyone", {}, "includes the user's message 0 times.*prompt.chat_template = false"),
        ("{% for m in messages * 2 %}{{ m.content }}{% endfor %}", {}, "includes the user's message 2 times.*= false"),
    ],
)
def test_what_a_chat_template_cannot_do_is_refused_with_the_way_around(
    tokenizer: Any, chat_template: str | None, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_frame(with_chat(tokenizer, chat_template), "{text}", max_prompt_tokens=ROOMY, **options)


# Control tokens


WORDS = ["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<|", "im_end", "|>", "{text}", "{title}", "{{x}}"]
WORDS += ["{% raw %}", "%s", "\\1", "\ue0000\ue001", "\n", " ", "words"]


@settings(max_examples=60)
@given(words=st.lists(st.sampled_from(WORDS)))
def test_texts_and_fields_are_data(tokenizer: Any, words: list[str]) -> None:
    """No control token, no template: a document cannot end its own turn, and leaves nothing in the tokenizer."""
    text = "".join(words)
    frame = make_frame(tokenizer, "About {title}: {text} Be brief.", max_prompt_tokens=ROOMY)
    filled = frame.filled(tokenizer, {"title": text})
    prompt = prompt_of(tokenizer, filled, text)
    assert f"About {text}: {text} Be brief." in text_of(tokenizer, prompt)
    added = set(tokenizer.added_tokens_decoder)
    assert not added & set(body_of(filled, prompt)) and tokenizer.decode(body_of(filled, prompt)) == text
    assert sum(token in added for token in prompt.ids) == sum(token in added for token in (*frame.head, *frame.tail))
    assert make_frame(tokenizer, "About {title}: {text} Be brief.", max_prompt_tokens=ROOMY) == frame


def test_no_control_token_comes_out_of_a_vocabulary_that_has_it_as_a_word() -> None:
    # A unigram model (sentencepiece's default) finds its control tokens among its pieces, special or not.
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -5.0) for piece in "▁a</s>")]
    raw = Tokenizer(models.Unigram(pieces, unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    ids = encode_text(unigram, "a </s> a<s>")
    assert ids
    assert not {unigram.bos_token_id, unigram.eos_token_id} & set(ids)


# What fits


@given(frames(), st.integers(-200, 200), st.sampled_from([None, "head", "tail", "middle"]))
def test_what_fits_is_left_whole_and_what_does_not_is_cut_or_refused(
    frame: Frame, excess: int, kept: Keep | None
) -> None:
    budget = frame.text_budget
    tokens = max(0, budget + excess)
    if excess > 0 and kept is None:
        numbers = rf"{tokens} tokens of text, but only {budget} fit .*{frame.max_tokens} tokens"
        with pytest.raises(DocumentError, match=f"too long: {numbers}.*'keep-head' or 'split'") as caught:
            fit_prompt(frame, range(tokens), kept=None)
        assert caught.value.exit_code == EXIT_BAD_DATA
        return
    prompt = fit_prompt(frame, range(tokens), kept=kept)
    dropped = max(0, excess)
    body = body_of(frame, prompt)
    first = {None: 0, "head": 0, "tail": dropped, "middle": dropped // 2}[kept]
    assert body == tuple(range(first, first + tokens - dropped))
    assert prompt.dropped_tokens == dropped and prompt.tokens <= frame.max_tokens
    assert (prompt.tokens == frame.max_tokens) == (excess >= 0)


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
