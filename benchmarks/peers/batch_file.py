"""The batch file that all peers answer: short pieces of the demo's documents, each a chat request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

PIECE_CHARS = 400  # of a document; about a hundred tokens
# Taken in turn, so that answers end one after the other and a kill meets some that are done and some that are not.
NEW_TOKENS = (4, 8, 16, 24, 32)
ASKED = "Say in one sentence what this is about.\n\n"


def write_batch_file(path: Path, documents: Path, rows: int) -> list[str]:
    """Write `rows` greedy requests about pieces of the documents in a folder.

    Returns
    -------
    list of str
        Their ids, in the file's order.

    Raises
    ------
    ValueError
        If the documents are too short for so many.
    """
    pieces = list(_pieces(documents))
    if rows > len(pieces):
        raise ValueError(f"{rows} rows: {documents} has {len(pieces)} pieces of {PIECE_CHARS} characters")
    ids = [f"row-{number:03d}" for number in range(rows)]
    with path.open("w") as file:
        for number, (name, piece) in enumerate(zip(ids, pieces, strict=False)):
            body = {
                "model": "peer",
                "messages": [{"role": "user", "content": ASKED + piece}],
                "max_tokens": NEW_TOKENS[number % len(NEW_TOKENS)],
                "temperature": 0,
            }
            row = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    return ids


def _pieces(documents: Path) -> Iterator[str]:
    for document in sorted(documents.iterdir()):
        text = document.read_text()
        yield from (text[at : at + PIECE_CHARS] for at in range(0, len(text) - PIECE_CHARS + 1, PIECE_CHARS))
