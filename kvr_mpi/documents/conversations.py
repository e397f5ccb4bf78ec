"""Converts conversations to token ids by the model's chat template, whose result is the prompt.

Templates depend on what messages say: they trim it, or leave the ``<think>`` part of earlier answers out. So they are
rendered with the messages themselves. Messages cannot inject the model's control tokens, as for a document's text: to
find out which names of control tokens come from messages, those are marked, and the template is rendered again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvr_mpi.documents.chat import DEFAULT_CHAT, MARK, ChatOptions, render_chat, why_not_used
from kvr_mpi.documents.document import Message
from kvr_mpi.documents.encoding import PiecePlace, encoder_of
from kvr_mpi.errors import ConfigError, DocumentError

# Around the name of a control token in a message. A template may separate the two.
OPENS, CLOSES = "\ue002", "\ue003"


def check_has_chat_template(tokenizer: Any) -> None:
    """Raise `ConfigError` if a model has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "documents.format = 'messages': this model's tokenizer has no chat template for conversations; use the "
            "chat or instruct version of the model, or write the prompts as text"
        )


def encode_conversation(tokenizer: Any, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT) -> list[int]:
    """Return the token ids of a conversation, up to the start of the model's next message.

    Raises `DocumentError` if there is no chat template, or it rejects the conversation, omits or repeats a message,
    lacks a variable, or does not copy the names of control tokens in messages as other text.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise DocumentError("this model's tokenizer has no chat template for conversations")
    if why := why_not_used(tokenizer, options.arguments):
        raise DocumentError(f"chat_template_kwargs: {why}")
    marks = [f"\ue000{number}\ue001" for number in range(len(messages))]
    order = [int(number) for number in MARK.findall(_render(tokenizer, messages, marks, options))]
    for number, message in enumerate(messages):
        if order.count(number) != 1:
            raise DocumentError(
                f"this model's chat template includes message {number} ({message.role}) {order.count(number)} "
                "times; expected once"
            )
    encoder = encoder_of(tokenizer)
    contents = [message.content for message in messages]
    text = _render(tokenizer, messages, contents, options)
    names = re.compile("|".join(map(re.escape, encoder.control)) or "(?!)")
    found = list(names.finditer(text))
    marked = [_mark(content, names, encoder.control) for content in contents]
    of_messages = [False] * len(found)
    if marked != contents:
        pattern = f"({OPENS}?)({names.pattern})({CLOSES}?)"
        again = re.findall(pattern, _render(tokenizer, messages, marked, options))
        if [name for _, name, _ in again] != [one[0] for one in found]:
            raise DocumentError(
                "this model's chat template does something else with control tokens in a message than copy them "
                f"({', '.join(dict.fromkeys(name for _, name, _ in again))}): take them out of the message"
            )
        of_messages = [bool(opens or closes) for opens, _, closes in again]
    ids: list[int] = []
    place: PiecePlace = "start"
    end = 0

    def add(more: list[int]) -> None:
        nonlocal place
        ids.extend(more)
        place = encoder.place_after(more, place)

    for one, is_text in zip(found, of_messages, strict=True):
        if is_text:
            add(encoder.words(text[end : one.start()], place))
            add(encoder.text(one[0], place))
            end = one.end()
    add(encoder.words(text[end:], place))
    return ids


def _mark(content: str, names: re.Pattern[str], control: Sequence[str]) -> str:
    """Mark control tokens in a message, and its ends if they could be part of a control token of the template."""
    content = re.sub(f"[{OPENS}{CLOSES}]", "\ufffd", content)
    start, stop = len(content) - len(content.lstrip()), len(content.rstrip())
    text = content[start:stop]
    begins = any(text.startswith(name[at:]) for name in control for at in range(1, len(name)))
    ends = any(text.endswith(name[:at]) for name in control for at in range(1, len(name)))
    text = names.sub(f"{OPENS}\\g<0>{CLOSES}", text)
    return content[:start] + OPENS * begins + text + CLOSES * ends + content[stop:]


def _render(tokenizer: Any, messages: Sequence[Message], contents: Sequence[str], options: ChatOptions) -> str:
    said = [{"role": message.role, "content": content} for message, content in zip(messages, contents, strict=True)]
    try:
        return render_chat(tokenizer, said, options)
    except ValueError as error:
        raise DocumentError(f"this model's chat template rejects the conversation: {error}") from error
