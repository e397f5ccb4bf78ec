"""Conversations in rows: lists of messages with role and content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvr_mpi.documents.document import Message, kind_of
from kvr_mpi.errors import DocumentError

# Roles that all chat templates with roles support, and what newer clients send for the first (`chat.render_chat`); some
# templates copy any other word into the prompt unchecked.
ROLES = ("system", "user", "assistant", "developer")


def parse_messages(value: Any, name: str = "messages") -> tuple[Message, ...]:
    """Parse a conversation: a list of ``{"role": ..., "content": ...}``; content is text, or a list of text parts.

    Raises `DocumentError` if it is not a conversation; `name` is the field's name in the message.
    """
    if not isinstance(value, list) or not value:
        what = "empty" if value == [] else kind_of(value)
        raise DocumentError(f"{name} is {what}; expected a list of messages with role and content")
    return tuple(_parse(each, f"{name}[{number}]") for number, each in enumerate(value))


def joined(messages: Sequence[Message]) -> str:
    """Return the contents of all messages, joined."""
    return "\n\n".join(message.content for message in messages)


def _parse(value: Any, place: str) -> Message:
    if not isinstance(value, Mapping):
        raise DocumentError(f"{place} is {kind_of(value)}; expected an object with role and content")
    said = {name: each for name, each in value.items() if each is not None}
    if unknown := sorted(map(str, said.keys() - {"role", "content"})):
        raise DocumentError(f"{place} has {', '.join(unknown)}; expected only role and content")
    role = said.get("role")
    if role not in ROLES:
        raise DocumentError(f"{place}.role is {role!r}; expected one of {', '.join(ROLES)}")
    return Message(role, _content(said.get("content"), f"{place}.content"))


def _content(value: Any, place: str) -> str:
    """Return the text of a message; parts become lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise DocumentError(f"{place} is {kind_of(value)}; expected text, or a list of parts that are text")
    texts = []
    for number, part in enumerate(value):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DocumentError(f'{place}[{number}] is of type {kind!r}; expected {{"type": "text", "text": ...}}')
        texts.append(text)
    return "\n".join(texts)
