"""Converts conversations to token ids by the model's chat template; messages are tokenised separately.

Messages cannot inject the model's control tokens, as for a document's text (``prompts``): the template is rendered with
placeholders, and each message is tokenised as plain text. Some templates depend on the content, so the result is
compared with the template rendered with the messages themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvr_mpi.documents.document import Message
from kvr_mpi.documents.prompts import MARK, encode_text, encode_words, render_chat
from kvr_mpi.errors import ConfigError, DocumentError


def check_has_chat_template(tokenizer: Any) -> None:
    """Raise `ConfigError` if a model has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "documents.format = 'messages': this model's tokenizer has no chat template for conversations; use the "
            "chat or instruct version of the model, or write the prompts as text"
        )


def encode_conversation(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of a conversation, up to the start of the model's next message.

    Raises `DocumentError` if there is no chat template, or it rejects the conversation, omits or repeats a message, or
    changes its text.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise DocumentError("this model's tokenizer has no chat template for conversations")
    marks = [f"\ue000{number}\ue001" for number in range(len(messages))]
    pieces = MARK.split(_render(tokenizer, messages, marks))
    order = [int(number) for number in pieces[1::2]]
    for number, message in enumerate(messages):
        if order.count(number) != 1:
            raise DocumentError(
                f"this model's chat template includes message {number} ({message.role}) {order.count(number)} "
                "times; expected once"
            )
    words = pieces[::2]
    whole = _render(tokenizer, messages, [message.content for message in messages])
    contents = next(
        (
            said
            for said in ([message.content for message in messages], [message.content.strip() for message in messages])
            if whole == words[0] + "".join(said[number] + word for number, word in zip(order, words[1:], strict=True))
        ),
        None,
    )
    if contents is None:
        raise DocumentError("this model's chat template changes the text of a message, so the conversation is not run")
    ids = encode_words(tokenizer, words[0])
    for number, word in zip(order, words[1:], strict=True):
        ids += [*encode_text(tokenizer, contents[number]), *encode_words(tokenizer, word)]
    return ids


def _render(tokenizer: Any, messages: Sequence[Message], contents: Sequence[str]) -> str:
    said = [{"role": message.role, "content": content} for message, content in zip(messages, contents, strict=True)]
    try:
        return render_chat(tokenizer, said)
    except ValueError as error:
        raise DocumentError(f"this model's chat template rejects the conversation: {error}") from error
