"""Renders a model's chat template, with the job's arguments and date."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

# Placeholder while the chat template is rendered; private-use characters, which templates do not contain.
MARK = re.compile("\ue000([0-9]+)\ue001")
# What transformers passes to every template, or takes for itself.
RESERVED = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation documents max_length messages padding "
    "return_assistant_tokens_mask return_dict return_tensors sanitize_control_tokens strftime_now tokenize "
    "tokenizer_kwargs tools truncation".split()
)
# Replaces transformers' function, which has the clock's date. The line break at its end is not part of the text.
CLOCK = "kvr_mpi_date"
DATED = """{%- macro strftime_now(format) -%}
{%- set made = namespace(text=format) -%}
{%- for name, value in CLOCK.items() -%}{%- set made.text = made.text | replace(name, value) -%}{%- endfor -%}
{{- made.text -}}
{%- endmacro %}
""".replace("CLOCK", CLOCK)
DIRECTIVES = "aAbBcdefFgGhHIjklmMnpPrRsStTuUVwWxXyYzZD"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat template may depend on, except for messages.

    arguments : its variables, such as ``enable_thinking``; servers call these ``chat_template_kwargs``.
    date : date and time in ISO format that it takes for now; None: the clock's.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None

    def over(self, arguments: Mapping[str, Any]) -> ChatOptions:
        """Return these options with some other arguments."""
        return ChatOptions({**self.arguments, **arguments}, self.date) if arguments else self


DEFAULT_CHAT = ChatOptions()


def why_not_arguments(arguments: Mapping[str, Any]) -> str | None:
    """Return why variables cannot be passed to any chat template; None if they can."""
    if taken := sorted(arguments.keys() & RESERVED):
        return f"{taken[0]} cannot be set: every chat template gets it from kvr-mpi or transformers"
    if bad := [name for name in arguments if not name.isidentifier()]:
        return f"{bad[0]!r} is no name of a variable"
    return None


def why_not_used(tokenizer: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return which variable a model's chat template does not have; None if it has all of them."""
    known = set(re.findall(r"\w+", _source_of(tokenizer))) if arguments else set[str]()
    if unknown := sorted(arguments.keys() - known):
        return f"this model's chat template has no variable {unknown[0]!r}"
    return None


def is_dated(tokenizer: Any) -> bool:
    """Whether a model's chat template contains the current date."""
    return getattr(tokenizer, "chat_template", None) is not None and "strftime_now" in _source_of(tokenizer)


def render_chat(tokenizer: Any, messages: Sequence[dict[str, str]], options: ChatOptions = DEFAULT_CHAT) -> str:
    """Render the chat template up to the model's next message; raise `ValueError` if it rejects the messages.

    Messages of a ``developer``, as newer clients call it, are of the ``system`` if the template has no such role.
    """
    from jinja2 import TemplateError

    given = dict(options.arguments)
    if "developer" not in _source_of(tokenizer):
        messages = [each | {"role": "system"} if each["role"] == "developer" else each for each in messages]
    try:
        if options.date is not None and is_dated(tokenizer):
            now = datetime.fromisoformat(options.date)
            directives = [f"%{flag}{letter}" for letter in DIRECTIVES for flag in ("", "-")]
            given[CLOCK] = {directive: now.strftime(directive) for directive in directives}
            given["chat_template"] = DATED + _source_of(tokenizer)
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given))
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ValueError(str(error)) from error


def _source_of(tokenizer: Any) -> str:
    """Return the chat template for messages without tools."""
    return str(tokenizer.get_chat_template())
