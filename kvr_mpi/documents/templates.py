"""Templates: the user's words, with placeholders for the document's text and fields of its row."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from kvr_mpi.errors import ConfigError

TEXT = "{text}"
# The special parts of a template: two braces, or a name in braces. Everything else is literal.
PLACE = re.compile(r"\{\{|\}\}|\{\s*[^\W\d][\w.-]*\s*\}")
NAMED = 20  # maximum number of fields in a message


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: words[0], the field names[0], words[1], and so on.

    names : "text", the document, exactly once; the others are fields of its row.
    """

    words: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields of a row that the template inserts."""
        return tuple(dict.fromkeys(name for name in self.names if name != "text"))


def parse_template(template: str, key: str = "prompt.template", *, columns: Collection[str] | None = None) -> Template:
    """Split a template at its fields.

    ``{text}`` is the document, ``{name}`` a field of its row; ``{{`` and ``}}`` are literal braces. A single brace that
    does not enclose a name is literal, and so is a ``}}`` that closes two such braces, so JSON needs no escaping.

    key : key of the job, for messages.
    columns : fields of the rows; None: not known, so any name is accepted.

    Raises `ConfigError` if ``{text}`` does not occur exactly once, or a name in braces is not a field.
    """
    words, names = _parse(template)
    times = names.count("text")
    missing = [name for name in dict.fromkeys(names) if columns is not None and name not in ("text", *columns)]
    unknown = ", ".join(f"{{{name}}}" for name in missing[:5])
    if times != 1:
        also = f" (and {unknown}, which is unknown)" if unknown else ""
        raise ConfigError(
            f"{key} {template[:60]!r} contains {{text}} {times} times; expected once, where the document goes{also}"
        )
    if unknown:
        there = ", ".join(sorted(columns or ())[:NAMED])
        fields = f", and the fields of its row: {there}" if there else ""
        raise ConfigError(
            f"{key} {template[:60]!r} has {unknown}, which is unknown; valid: {{text}}, the "
            f"document{fields}; write literal braces twice, such as {{{{{missing[0]}}}}}"
        )
    for name in columns or ():  # names that templates cannot use, and that would be sent literally
        if f"{{{name}}}" in template and name not in (*names, "text") and not PLACE.fullmatch(f"{{{name}}}"):
            raise ConfigError(
                f"{key} {template[:60]!r} has {{{name}}}: names of fields can only have letters, digits, _, . and -; "
                f"rename it in the rows"
            )
    return Template(tuple(words), tuple(names))


def check_system(system: str | None, columns: Collection[str] = ()) -> None:
    """Raise `ConfigError` if the system prompt contains a placeholder for the document or a field."""
    for name in ("text", *columns):
        if system is not None and f"{{{name}}}" in system:
            raise ConfigError(
                f"prompt.system {system[:60]!r} has {{{name}}}: the system prompt is sent unchanged; put the document "
                f"and fields of its row into prompt.template"
            )


def _parse(template: str) -> tuple[list[str], list[str]]:
    """Split at names in braces, and unescape double braces; names with surrounding spaces stay literal."""
    words, names = [""], []
    opened: list[str] = []  # open braces, as written
    at = 0
    while at < len(template):
        found = PLACE.match(template, at)
        word = found[0] if found else template[at]
        if word == "{{" or (word == "}}" and opened[-1:] != ["{"]):
            words[-1] += word[0]
        elif word == "}}":
            word = "}"
            words[-1] += word
        elif len(word) > 1:
            names.append(word[1:-1])
            words.append("")
        else:
            words[-1] += word
        if word in ("{", "{{"):
            opened.append(word)
        elif word in ("}", "}}") and opened and len(opened[-1]) == len(word):
            opened.pop()
        at += len(word)
    return words, names
