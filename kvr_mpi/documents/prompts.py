"""Documents to token ids: template, chat template, and handling of prompts that are too long.

The text of a document is tokenised separately from the frame around it. So it cannot inject the model's control tokens,
the frame has the same ids for every document, and a text can be cut to an exact number of tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any, Literal

import numpy as np

from kvr_mpi.documents.templates import Template, parse_template
from kvr_mpi.errors import ConfigError, DocumentError

# Placeholder while the chat template is rendered; private-use characters, which templates do not contain.
MARK = re.compile("\ue000([0-9]+)\ue001")
# Share of a part's tokens left free so that a cut can move to the end of a paragraph, line, sentence or word.
SEAM_SHARE = 0.15

Keep = Literal["head", "tail", "middle"]
# Token ids, and in their places the names of fields of a row that must still be inserted.
FrameIds = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PromptText:
    """Token ids of one prompt, the bounds of the document's text in it, and how many tokens were dropped."""

    ids: tuple[int, ...]
    dropped_tokens: int = 0
    text: tuple[int, int] = (0, 0)  # bounds of the document's text

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
    """The token ids before and after a document's text, and the maximum length of a prompt.

    overlap : tokens of text that each part of a split text repeats from the previous part.
    """

    head: FrameIds
    tail: FrameIds
    max_tokens: int
    overlap: int = 0

    @property
    def text_budget(self) -> int:
        """Maximum number of tokens of text between head and tail."""
        return self.max_tokens - len(self.head) - len(self.tail)

    @property
    def shared_head(self) -> tuple[int, ...]:
        """Token ids that every prompt begins with."""
        return tuple(takewhile(lambda one: isinstance(one, int), self.head))

    def filled(self, tokenizer: Any, columns: Mapping[str, str]) -> Frame:
        """Insert the fields of a document's row, tokenised one by one; raise `DocumentError` if no text would fit."""
        head, tail = (
            tuple(id for one in ids for id in (encode_text(tokenizer, columns[one]) if isinstance(one, str) else [one]))
            for ids in (self.head, self.tail)
        )
        if (head, tail) == (self.head, self.tail):
            return self
        frame = replace(self, head=head, tail=tail)
        if frame.text_budget < 1:
            raise DocumentError(
                f"too long: the template with the fields of its row has {len(head) + len(tail)} tokens; a prompt can "
                f"have at most {self.max_tokens}"
            )
        return frame

    def around(self, text_ids: Sequence[int], dropped_tokens: int = 0) -> PromptText:
        """Put the frame around a text."""
        text = len(self.head), len(self.head) + len(text_ids)
        return PromptText((*self.head, *text_ids, *self.tail), dropped_tokens, text)

    def after(self, ids: Sequence[int], text: tuple[int, int], dropped_tokens: int = 0) -> PromptText:
        """Replace the tail of an existing prompt; raises `DocumentError` if it has another head or gets too long."""
        start, stop = text
        constant = self.shared_head
        if tuple(ids[: len(constant)]) != constant or (start != len(self.head) and constant == self.head):
            raise DocumentError(
                f"the {start} tokens at the beginning of its stored prompt differ from those of this tokenizer and "
                f"chat template ({len(self.head)}); use the tokenizer and template of the earlier run"
            )
        if stop + len(self.tail) > self.max_tokens:
            raise DocumentError(
                f"too long: its {stop} stored tokens and {len(self.tail)} of the question exceed the {self.max_tokens} "
                f"that a prompt can have (the context minus generation.max_new_tokens)"
            )
        return PromptText((*ids[:stop], *self.tail), dropped_tokens, text)


def make_frame(
    tokenizer: Any,
    template: str,
    *,
    system: str | None = None,
    chat_template: bool | None = None,
    after: str | None = None,
    max_prompt_tokens: int,
) -> Frame:
    """Render template and chat template once, with a placeholder for the document.

    template : the user's words, with ``{text}`` once in place of the document, and names of fields of its row.
    system : system prompt; needs a chat template.
    chat_template : apply the model's chat template; None: if it has one.
    after : words after the document, replacing those of the template.
    max_prompt_tokens : length of the longest prompt that leaves room for the answer.

    Raises `ConfigError` if the template lacks ``{text}``, the chat template is missing or rejects the prompt, or no
    text would fit.
    """
    parsed = parse_template(template)
    at = parsed.names.index("text")
    if after is not None:
        parsed = Template((*parsed.words[: at + 1], after), parsed.names[: at + 1])
    has_chat = getattr(tokenizer, "chat_template", None) is not None
    if (chat_template or system) and not has_chat:
        key = "prompt.chat_template = true" if chat_template else f"prompt.system = {system!r}"
        raise ConfigError(
            f"{key}: this model's tokenizer has no chat template; leave it out and write the instructions into "
            f"prompt.template"
        )
    if has_chat and chat_template is not False:
        words = _render_user(tokenizer, parsed, system)
        begins: list[int] = []
    else:
        if system:
            raise ConfigError("prompt.system is set, but prompt.chat_template is false; put it into prompt.template")
        words = parsed.words
        # Keep the tokenizer's BOS token, if it has one; its EOS token would end the prompt.
        begins = encode_words(tokenizer, words[0] or " ", add_special_tokens=True)[:1]
        begins = begins if begins == [tokenizer.bos_token_id] else []
    head = (*begins, *_assemble(tokenizer, words[: at + 1], parsed.names[:at]))
    tail = _assemble(tokenizer, words[at + 1 :], parsed.names[at + 1 :])
    frame = Frame(head, tail, max_prompt_tokens)
    if frame.text_budget < 1:
        raise ConfigError(
            f"the template alone has {len(head) + len(tail)} tokens, but a prompt can have at most {max_prompt_tokens} "
            f"(the context minus generation.max_new_tokens); shorten the template or lower generation.max_new_tokens"
        )
    return frame


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a document's text; control tokens in it are plain text."""
    ids = _encode_plain(tokenizer, text)
    control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    if control.isdisjoint(ids):
        return ids
    # Unigram vocabularies contain their control tokens as ordinary pieces: split these before tokenising.
    names = sorted(map(str, tokenizer.all_special_tokens), key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    halves = (half for piece in pieces for half in ((piece[:1], piece[1:]) if piece in names else (piece,)))
    return [token for half in halves for token in _encode_plain(tokenizer, half)]


def fit_prompt(frame: Frame, text_ids: Sequence[int], *, kept: Keep | None) -> PromptText:
    """Make a document's prompt, cut to the part `kept`; raise `DocumentError` if it is too long and `kept` is None."""
    excess = len(text_ids) - frame.text_budget
    if excess <= 0:
        return frame.around(text_ids)
    if kept is None:
        raise DocumentError(
            f"too long: {len(text_ids)} tokens of text, but only {frame.text_budget} fit (a prompt may have "
            f"{frame.max_tokens} tokens, the context less generation.max_new_tokens; the template takes "
            f"{len(frame.head) + len(frame.tail)}); set "
            "prompt.too_long to 'keep-head' or 'split'"
        )
    first = {"head": 0, "middle": excess // 2, "tail": excess}[kept]
    return frame.around(text_ids[first : first + frame.text_budget], dropped_tokens=excess)


def count_parts(frame: Frame, text_tokens: int) -> int:
    """Return the number of prompts into which `split_text` divides a text of `text_tokens`."""
    budget = frame.text_budget - frame.overlap
    return 1 if text_tokens <= frame.text_budget else -(-text_tokens // max(1, int(budget * (1 - SEAM_SHARE))))


def split_text(tokenizer: Any, frame: Frame, text_ids: Sequence[int]) -> list[PromptText]:
    """Split a long text into prompts of similar length, preferably at the end of a paragraph, line or sentence.

    Each part except the first begins with the last `Frame.overlap` tokens of the previous part.
    """
    budget, tokens = frame.text_budget - frame.overlap, len(text_ids)
    count = count_parts(frame, tokens)
    # Both ends of a part may move by this many tokens without exceeding the budget.
    reach = (budget - -(-tokens // count)) // 2
    bounds = [0]
    for part in range(1, count):
        bounds.append(_best_cut(tokenizer, text_ids, part * tokens // count, reach))
    bounds.append(tokens)
    return [frame.around(text_ids[max(0, start - frame.overlap) : stop]) for start, stop in pairwise(bounds)]


def _best_cut(tokenizer: Any, ids: Sequence[int], ideal: int, reach: int) -> int:
    """Return the best position for a cut within `reach` of `ideal`; of equally good ones, the nearest."""
    candidates = range(max(1, ideal - reach), min(len(ids) - 1, ideal + reach) + 1)
    return min(candidates, key=lambda at: (_hurt(tokenizer, ids, at), abs(at - ideal)))


def _hurt(tokenizer: Any, ids: Sequence[int], at: int) -> int:
    """Rate a cut before token `at`: 0 between paragraphs, 1 lines, 2 sentences, 3 words; 4 within a word."""
    left = tokenizer.decode(ids[max(0, at - 2) : at])
    # Decode it with its neighbours, since some decoders drop a leading space.
    right = tokenizer.decode(ids[max(0, at - 2) : at + 1])[len(left) :]
    if left.endswith("\n\n") and not right.startswith("\n"):
        return 0
    if left.endswith("\n") and not right.startswith("\n"):
        return 1
    if not (left[-1:].isspace() or right[:1].isspace()):
        return 4
    return 2 if left.rstrip().endswith((".", "!", "?")) else 3


def _assemble(tokenizer: Any, words: Sequence[str], names: Sequence[str]) -> FrameIds:
    """Tokenise words, and put the names of fields between them."""
    found: list[Any] = encode_words(tokenizer, words[0])
    for name, following in zip(names, words[1:], strict=True):
        found += [name, *encode_words(tokenizer, following)]
    return tuple(found)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """Render the chat template up to the model's next message; raise `ValueError` if it rejects the messages."""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ValueError(str(error)) from error


def _render_user(tokenizer: Any, parsed: Template, system: str | None) -> tuple[str, ...]:
    """Render the chat template with a user message; return the text between its fields."""
    marks = [f"\ue000{number}\ue001" for number in range(len(parsed.names))]
    content = "".join(word + mark for word, mark in zip(parsed.words, [*marks, ""], strict=True))
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    try:
        text = render_chat(tokenizer, messages)
    except ValueError as error:
        raise ConfigError(
            f"this model's chat template rejects the prompt: {error}; leave out prompt.system or set "
            f"prompt.chat_template = false"
        ) from error
    pieces = MARK.split(text)
    if pieces[1::2] != [str(number) for number in range(len(marks))]:
        times = pieces[1::2].count(str(parsed.names.index("text")))
        raise ConfigError(
            f"this model's chat template includes the user's message {times} times; set prompt.chat_template = false"
        )
    return tuple(pieces[::2])


def _encode_plain(tokenizer: Any, text: str) -> list[int]:
    if not text:
        return []
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])


def encode_words(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of the frame's words, in which control tokens are recognised."""
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]) if text else []
