"""Chat templates: used if there is one, left out if asked, and refused with the way around."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from made_prompts import ROOMY, text_of

from kvr_mpi.documents.prompts import Frame, encode_text, fit_prompt, make_frame
from kvr_mpi.errors import ConfigError


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
    prompt = fit_prompt(frame, encode_text(tokenizer, "words"), kept=None)
    assert text_of(tokenizer, prompt) == whole


def test_a_chat_template_can_be_left_out(tokenizer: Any) -> None:
    frame = make_frame(tokenizer, "Sum up: {text} In short:", chat_template=False, max_prompt_tokens=ROOMY)
    prompt = fit_prompt(frame, encode_text(tokenizer, "words"), kept=None)
    assert text_of(tokenizer, prompt) == "Sum up: words In short:"
    assert not set(tokenizer.all_special_ids) & set(prompt.ids)


def test_without_a_chat_template_the_words_are_the_prompt(plain: Any) -> None:
    for chat_template in (None, False):
        frame = make_frame(plain, "Sum up: {text}", chat_template=chat_template, max_prompt_tokens=ROOMY)
        prompt = fit_prompt(frame, encode_text(plain, "words"), kept=None)
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
        ("{{ raise_exception('no system role, please') }}", "rejects the prompt: no system role, please"),
        ("{% if %}", "rejects the prompt"),
        ("{{ messages[0].nothing.at.all }}", "rejects the prompt"),
        ("The same for everyone", "shows the user's message 0 times"),
        ("{% for m in messages * 2 %}{{ m.content }}{% endfor %}", "shows the user's message 2 times"),
    ],
)
def test_a_chat_template_we_cannot_use_says_how_to_do_without(tokenizer: Any, chat_template: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{why}.*prompt.chat_template = false"):
        make_frame(with_chat(tokenizer, chat_template), "{text}", max_prompt_tokens=ROOMY)
