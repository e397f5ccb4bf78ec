"""Documents to token ids: template, chat template, and what to do when a prompt is too long.

Stands between the documents and the plan. The text of a document is tokenised apart from the frame around
it: it cannot smuggle in the model's control tokens, the frame is the same ids for every document, and cutting
a text to a number of tokens is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvr_mpi.errors import ConfigError, DocumentError

TEXT = "{text}"
# Stands for the document while the chat template is rendered; private-use characters, so no template has it.
MARK = "\ue000text\ue001"
# How far back from a cut, as a share of the part, we look for a token that ends a paragraph, line or sentence.
SEAM_SEARCH = 0.15

Keep = Literal["head", "tail", "middle"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one prompt, and how much of its document is in it."""

    ids: tuple[int, ...]
    dropped_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return len(self.ids)

    @property
    def sha256(self) -> str:
        """Hash of the ids as little-endian 64-bit integers."""
        return hashlib.sha256(np.asarray(self.ids, dtype="<i8").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Frame:
    """The constant ids before and after the text of a document, and the longest prompt allowed."""

    head: tuple[int, ...]
    tail: tuple[int, ...]
    max_tokens: int

    @property
    def text_budget(self) -> int:
        """Most tokens of text that fit between head and tail."""
        return self.max_tokens - len(self.head) - len(self.tail)

    def around(self, text_ids: Sequence[int], dropped_tokens: int = 0) -> Prompt:
        """Put the frame around a text."""
        return Prompt((*self.head, *text_ids, *self.tail), dropped_tokens)


def make_frame(
    tokenizer: Any,
    template: str,
    *,
    system: str | None = None,
    chat_template: bool | None = None,
    max_prompt_tokens: int,
) -> Frame:
    """Render template and chat template once, with a mark in the document's place.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    template : str
        The user's words, with ``{text}`` once where the document goes.
    system : str or None
        System prompt; needs a chat template.
    chat_template : bool or None
        Wrap in the model's chat template; None does so if it has one.
    max_prompt_tokens : int
        Longest prompt that leaves room for the answer.

    Raises
    ------
    ConfigError
        If the template lacks ``{text}``, the chat template is missing or refuses, or nothing fits.
    """
    check_template(template)
    before, after = template.split(TEXT)
    has_chat = getattr(tokenizer, "chat_template", None) is not None
    if (chat_template or system) and not has_chat:
        key = "prompt.chat_template = true" if chat_template else f"prompt.system = {system!r}"
        raise ConfigError(
            f"{key}: this model's tokenizer has no chat template; leave it out and write the instructions into "
            f"prompt.template"
        )
    if has_chat and chat_template is not False:
        head_text, tail_text = _render_chat(tokenizer, before + MARK + after, system)
        head, tail = _encode(tokenizer, head_text), _encode(tokenizer, tail_text)
    else:
        if system:
            raise ConfigError("prompt.system is set, but prompt.chat_template is false; put it into prompt.template")
        # The tokenizer's own first token (if it has one) belongs in front, its last one would end the prompt.
        begins = tokenizer.build_inputs_with_special_tokens([])
        bos = [begins[0]] if begins and begins[0] == tokenizer.bos_token_id else []
        head, tail = bos + _encode(tokenizer, before), _encode(tokenizer, after)
    frame = Frame(tuple(head), tuple(tail), max_prompt_tokens)
    if frame.text_budget < 1:
        raise ConfigError(
            f"the template alone takes {len(head) + len(tail)} tokens, but a prompt may have {max_prompt_tokens} "
            f"(the context less generation.max_new_tokens); shorten the template or ask for fewer new tokens"
        )
    return frame


def check_template(template: str) -> None:
    """Raise `ConfigError` unless ``{text}`` stands in the template exactly once."""
    if template.count(TEXT) != 1:
        raise ConfigError(
            f"prompt.template {template[:60]!r} contains {{text}} {template.count(TEXT)} times; "
            f"expected once, where the document goes"
        )


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a document's text; control tokens written out in it are plain text."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])


def fit_prompt(frame: Frame, text_ids: Sequence[int], *, truncate: Keep | None) -> Prompt:
    """Make a document's prompt, cut to the context if `truncate` says which part to keep.

    Raises
    ------
    DocumentError
        If it is too long and must not be cut.
    """
    excess = len(text_ids) - frame.text_budget
    if excess <= 0:
        return frame.around(text_ids)
    if truncate is None:
        raise DocumentError(
            f"too long: {len(text_ids)} tokens of text, {frame.text_budget} fit (a prompt may have {frame.max_tokens} "
            f"tokens, the template takes {len(frame.head) + len(frame.tail)}); set prompt.too_long to 'truncate' or "
            f"'split'"
        )
    first = {"head": 0, "middle": excess // 2, "tail": excess}[truncate]
    return frame.around(text_ids[first : first + frame.text_budget], dropped_tokens=excess)


def split_text(tokenizer: Any, frame: Frame, text_ids: Sequence[int]) -> list[Prompt]:
    """Cut a long text into prompts of nearly equal length, preferably where a paragraph, line or sentence ends."""
    count = -(-len(text_ids) // max(1, int(frame.text_budget * (1 - SEAM_SEARCH / 2))))
    if len(text_ids) <= frame.text_budget:
        count = 1
    bounds = [0]
    for part in range(1, count):
        ideal = bounds[-1] + (len(text_ids) - bounds[-1]) // (count - part + 1)
        bounds.append(_seam(tokenizer, text_ids, bounds[-1], min(ideal, bounds[-1] + frame.text_budget)))
    bounds.append(len(text_ids))
    parts: list[Prompt] = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        for at in range(start, stop, frame.text_budget):  # the last part may have grown past the budget
            parts.append(frame.around(text_ids[at : min(stop, at + frame.text_budget)]))
    return parts


def _seam(tokenizer: Any, text_ids: Sequence[int], start: int, stop: int) -> int:
    """Position at or before `stop` behind the best end of a paragraph, line or sentence."""
    earliest = max(start + 1, stop - int((stop - start) * SEAM_SEARCH))
    pieces = [tokenizer.decode([token]) for token in text_ids[earliest - 1 : stop]]
    for ending in ("\n\n", "\n", ".", " "):
        for offset in range(len(pieces) - 1, -1, -1):
            if ending in pieces[offset]:
                return earliest + offset
    return stop


def _render_chat(tokenizer: Any, content: str, system: str | None) -> tuple[str, str]:
    from jinja2 import TemplateError

    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigError(
            f"this model's chat template refuses the prompt: {error}; leave out prompt.system or set "
            f"prompt.chat_template = false"
        ) from error
    if text.count(MARK) != 1:
        raise ConfigError(
            f"this model's chat template shows the user's message {text.count(MARK)} times; set "
            f"prompt.chat_template = false"
        )
    head, tail = text.split(MARK)
    return head, tail


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
