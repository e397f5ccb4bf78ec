"""Questions about documents, in the job or in a file, each with a unique name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from kvr_mpi.disk import read_regular
from kvr_mpi.documents.files import MAX_ID_CHARS
from kvr_mpi.errors import ConfigError
from kvr_mpi.plain import parse_json

QUESTION = "{question}"
# Names are part of the ids of answers: DOCUMENT#NAME.
NAME = re.compile(r"[\w.-]{1,64}")
MAX_FILE_BYTES = 64 << 20


def number_questions(texts: Sequence[str]) -> dict[str, str]:
    """Name questions q1, q2, ..."""
    return {f"q{number}": text for number, text in enumerate(texts, 1)}


def read_questions(path: Path) -> dict[str, str]:
    """Read named questions: the lines of a text file, or JSON rows with ``question`` and optionally ``id``.

    Raises `ConfigError` if the file cannot be read, contains no questions, or has a name twice.
    """
    key = f"the file of questions {str(path)!r}"
    try:
        text = read_regular(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} cannot be read: {error}; expected a text file, one question per line") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.suffix.lower() != ".jsonl":
        return checked(number_questions([line for _, line in lines]), key)
    found: dict[str, str] = {}
    for number, line in lines:
        try:
            row = parse_json(line)
            text, name = row["question"], row.get("id", f"q{len(found) + 1}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{key}: line {number} is not a question ({type(error).__name__}: {error}); expected "
                f'{{"question": "..."}}, and optionally "id", its name'
            ) from error
        name = str(name) if isinstance(name, int) and not isinstance(name, bool) else name
        if name in found if isinstance(name, str) else True:
            raise ConfigError(f"{key}: line {number} has the id {name!r}; expected a text that is unique in the file")
        found[name] = text
    return checked(found, key)


def checked(questions: dict[str, str], key: str) -> dict[str, str]:
    """Check questions, and return them.

    Raises `ConfigError` if there are no questions, one is empty, not text or a duplicate, or a name cannot be part of
    an id.
    """
    if not questions:
        raise ConfigError(f'{key} contains no questions; add one (kvr ask: -q "...", or --questions FILE)')
    for name, text in questions.items():
        if not NAME.fullmatch(name):
            raise ConfigError(f"{key}: a question is named {name[:80]!r}; expected 1 to 64 letters, digits, ., - and _")
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{key}: question {name!r} is {text!r}; expected non-empty text")
    names: dict[str, str] = {}
    for name, text in questions.items():
        if (first := names.setdefault(text.strip(), name)) != name:
            raise ConfigError(
                f"{key}: {first!r} and {name!r} are the same question, {text[:80]!r}; leave one of them out"
            )
    return questions


def answer_id(document_id: str, name: str) -> tuple[str, str | None]:
    """Return the id of the answer to a question about a document; if too long, a shorter unique one, and an error."""
    answer = f"{document_id}#{name}"
    if len(answer) <= MAX_ID_CHARS:
        return answer, None
    digest = hashlib.sha256(document_id.encode()).hexdigest()[:16]
    return f"{document_id[: MAX_ID_CHARS // 2]}-{digest}#{name}", (
        f"the id {answer[:40]!r}... of this answer has {len(answer)} characters; {MAX_ID_CHARS} are allowed"
    )


def parse_answer_id(answer: str) -> tuple[str, str]:
    """Split an answer's id into the document's id and the question's name."""
    document_id, _, name = answer.rpartition("#")
    return document_id, name


def words_after(template: str, question: str) -> str:
    """Insert a question into the text after the document; raise `ConfigError` unless it has ``{question}`` once."""
    if template.count(QUESTION) != 1:
        raise ConfigError(
            f"questions.template {template[:60]!r} contains {QUESTION} {template.count(QUESTION)} times; expected "
            f"once; the document is not part of it, since the stored prompt comes before it"
        )
    return template.replace(QUESTION, question)
