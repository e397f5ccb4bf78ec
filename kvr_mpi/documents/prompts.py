"""Documents to token ids: template, chat template, and handling of prompts that are too long.

The text of a document is tokenized separately from the frame around it (``encoding``). So it cannot inject the model's
control tokens, the frame has the same ids for every document, and a text can be cut to an exact number of tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any, Literal

import numpy as np

from kvr_mpi.documents.chat import DEFAULT_CHAT, MARK, ChatOptions, render_chat, why_not_used
from kvr_mpi.documents.encoding import PiecePlace, encode_text, encode_words, encoder_of
from kvr_mpi.documents.templates import Template, parse_template
from kvr_mpi.errors import ConfigError, DocumentError

# Share of a part's tokens left free so that a cut can move to the end of a paragraph, line, sentence or word.
SEAM_SHARE = 0.15

Keep = Literal["head", "tail", "middle"]


@dataclass(frozen=True, slots=True)
class TextSlot:
    """Where the document's text or a field of its row is inserted.

    place : of the text in the prompt.
    trims : whether the chat template removes whitespace at the beginning and at the end of the text.
    """

    name: str
    place: PiecePlace = "start"
    trims: tuple[bool, bool] = (False, False)

    def encode(self, tokenizer: Any, text: str) -> list[int]:
        """Return the token ids of a text that is inserted here."""
        begins, ends = self.trims
        text = text.lstrip() if begins else text
        return encode_text(tokenizer, text.rstrip() if ends else text, self.place)


TEXT_ALONE = TextSlot("text")
# Token ids, and slots for fields of a row that must still be inserted.
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

    def around_text(self, tokenizer: Any) -> str:
        """Return the words before and after the document's text."""
        start, stop = self.text
        return f"{tokenizer.decode(self.ids[:start])}\n{tokenizer.decode(self.ids[stop:])}"

    @property
    def sha256(self) -> str:
        """Hash of the ids as little-endian 64-bit integers."""
        return hashlib.sha256(np.asarray(self.ids, dtype="<i8").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Frame:
    """The token ids before and after a document's text, and the maximum length of a prompt.

    overlap : tokens of text that each part of a split text repeats from the previous part.
    text : where the document's text is inserted.
    """

    head: FrameIds
    tail: FrameIds
    max_tokens: int
    overlap: int = 0
    text: TextSlot = TEXT_ALONE

    @property
    def text_budget(self) -> int:
        """Maximum number of tokens of text between head and tail."""
        return self.max_tokens - len(self.head) - len(self.tail)

    @property
    def shared_head(self) -> tuple[int, ...]:
        """Token ids that every prompt begins with."""
        return tuple(one for one in takewhile(lambda one: isinstance(one, int), self.head) if isinstance(one, int))

    @property
    def sha256(self) -> str:
        """Hash of the ids and of the names of fields between them."""
        plain = [[one.name if isinstance(one, TextSlot) else one for one in ids] for ids in (self.head, self.tail)]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()

    def filled(self, tokenizer: Any, columns: Mapping[str, str]) -> Frame:
        """Insert the fields of a document's row, tokenized one by one; raise `DocumentError` if no text would fit."""
        head, tail = (
            tuple(
                id
                for one in ids
                for id in (one.encode(tokenizer, columns[one.name]) if isinstance(one, TextSlot) else [one])
            )
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
    options: ChatOptions = DEFAULT_CHAT,
    max_prompt_tokens: int,
    ends: bool = False,
) -> Frame:
    """Render template and chat template once, with a placeholder for the document.

    template : the user's words, with ``{text}`` once in place of the document, and names of fields of its row.
    system : system prompt; needs a chat template.
    chat_template : apply the model's chat template; None: if it has one.
    after : words after the document, replacing those of the template.
    options : variables and date for the chat template.
    max_prompt_tokens : length of the longest prompt that leaves room for the answer.
    ends : without a chat template, keep all tokens that the tokenizer adds around a text, as embeddings need them.

    Raises `ConfigError` if the template lacks ``{text}``, the chat template is missing or rejects the prompt, or no
    text would fit.
    """
    parsed = parse_template(template)
    at = parsed.names.index("text")
    if after is not None:
        parsed = Template((*parsed.words[: at + 1], after), parsed.names[: at + 1])
    has_chat = getattr(tokenizer, "chat_template", None) is not None
    needs_chat = {
        "prompt.chat_template = true": chat_template,
        f"prompt.system = {system!r}": system,
        f"prompt.template_args = {dict(options.arguments)}": options.arguments,
    }
    needed = next((key for key, value in needs_chat.items() if value), None)
    if needed is not None and not has_chat:
        raise ConfigError(
            f"{needed}: this model's tokenizer has no chat template; leave it out and write the instructions into "
            f"prompt.template"
        )
    trims, begins, added = (False, False), list[int](), list[int]()
    if has_chat and chat_template is not False:
        if why := why_not_used(tokenizer, options.arguments):
            raise ConfigError(f"prompt.template_args: {why}; leave it out, or check its name")
        words, trims = _render_user(tokenizer, parsed, system, options)
    else:
        if needed is not None:
            key = needed.partition(" = ")[0]
            raise ConfigError(
                f"{key} is set, but prompt.chat_template is false; put it into prompt.template, or leave it out"
            )
        words = parsed.words
        # Keep the tokenizer's BOS token, if it has one; its EOS token would end the prompt.
        begins = list(tokenizer(words[0] or " ")["input_ids"])[:1]
        begins = begins if begins == [tokenizer.bos_token_id] else []
        if ends:
            begins, added = _added_around(tokenizer)
    edges = trims[0] and not parsed.words[0].strip(), trims[1] and not parsed.words[-1].strip()
    last = len(parsed.names) - 1
    slots = [(name, (edges[0] and not number, edges[1] and number == last)) for number, name in enumerate(parsed.names)]
    before, place = _assemble(tokenizer, words[: at + 1], slots[:at], "start")
    behind, _ = _assemble(tokenizer, words[at + 1 :], slots[at + 1 :], "middle")
    head, tail = (*begins, *before), (*behind, *added)
    frame = Frame(head, tail, max_prompt_tokens, text=TextSlot("text", place, slots[at][1]))
    if frame.text_budget < 1:
        raise ConfigError(
            f"the template alone has {len(head) + len(tail)} tokens, but a prompt can have at most {max_prompt_tokens} "
            f"(the context minus generation.max_new_tokens); shorten the template or lower generation.max_new_tokens"
        )
    return frame


def _added_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before and after a text."""
    whole, plain = (list(tokenizer("a", add_special_tokens=adds)["input_ids"]) for adds in (True, False))
    starts = range(len(whole) - len(plain) + 1)
    at = next((start for start in starts if whole[start : start + len(plain)] == plain), len(whole))
    return whole[:at], whole[at + len(plain) :]


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
    # Decode it with its neighbors, since some decoders drop a leading space.
    right = tokenizer.decode(ids[max(0, at - 2) : at + 1])[len(left) :]
    if left.endswith("\n\n") and not right.startswith("\n"):
        return 0
    if left.endswith("\n") and not right.startswith("\n"):
        return 1
    if not (left[-1:].isspace() or right[:1].isspace()):
        return 4
    return 2 if left.rstrip().endswith((".", "!", "?")) else 3


def _assemble(
    tokenizer: Any, words: Sequence[str], slots: Sequence[tuple[str, tuple[bool, bool]]], place: PiecePlace
) -> tuple[list[int | TextSlot], PiecePlace]:
    """Tokenise words with slots between them; also return the place of what follows."""
    found: list[int | TextSlot] = []
    for word, slot in zip(words, [*slots, None], strict=True):
        ids = encode_words(tokenizer, word, place)
        found += ids
        place = encoder_of(tokenizer).place_after(ids, place)
        if slot is not None:
            found.append(TextSlot(slot[0], place, slot[1]))
            place = "middle"  # although a field may be empty: the words are the same for all rows
    return found, place


def _render_user(
    tokenizer: Any, parsed: Template, system: str | None, options: ChatOptions
) -> tuple[tuple[str, ...], tuple[bool, bool]]:
    """Render the chat template with a user message.

    Returns the text between its fields, and whether the template removes whitespace around the message.
    """
    marks = [f"\ue000{number}\ue001" for number in range(len(parsed.names))]
    content = "".join(word + mark for word, mark in zip(parsed.words, [*marks, ""], strict=True))

    def render(content: str) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        return render_chat(tokenizer, [*messages, {"role": "user", "content": content}], options)

    try:
        text = render(content)
        trims = render(f" {content}") == text, render(f"{content} ") == text
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
    return tuple(pieces[::2]), trims
