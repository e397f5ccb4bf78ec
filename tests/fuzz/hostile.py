"""Files that nobody writes by chance: each is meant to exhaust, mislead or stop whoever reads it."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable

import numpy as np
from mutators import DEEP

MEBI = 1 << 20


def _spaces(before: bytes, after: bytes) -> bytes:
    """A gzip stream with 1.2 GB of spaces, in one line: the same member again and again."""
    return gzip.compress(before) + gzip.compress(b" " * (48 * MEBI)) * 25 + gzip.compress(after)


def _row(text: object, name: object = "a") -> bytes:
    return json.dumps({"id": name, "text": text}).encode() + b"\n"


def _wide_parquet() -> bytes:
    """Rows of 1.2 GB when they are read: one value of a dictionary, many times."""
    import pyarrow
    import pyarrow.parquet

    stream = io.BytesIO()
    words = pyarrow.DictionaryArray.from_arrays(np.zeros(1200, np.int32), ["y" * MEBI])
    pyarrow.parquet.write_table(pyarrow.table({"text": words}), stream, compression="zstd", row_group_size=1200)
    return stream.getvalue()


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "brackets": ("jsonl", lambda: _row("x") + b"[" * DEEP + b"\n" + _row("y", "b")),
    "objects": ("jsonl", lambda: b'{"a":' * DEEP + b"\n"),
    "long number": ("jsonl", lambda: b'{"id": 1' + b"0" * 100_000 + b', "text": "x"}\n'),
    "nan as id": ("jsonl", lambda: b'{"id": NaN, "text": "x"}\n{"id": Infinity, "text": NaN}\n'),
    "odd ids": (
        "jsonl",
        lambda: b"".join(_row("x", name) for name in ([], {}, True, "\u202e", "\x1b[2J", "a\nb", "..")),
    ),
    "lone surrogate": ("jsonl", lambda: b'{"id": "\\ud800", "text": "\\udfff"}\n'),
    "one name twice": ("jsonl", lambda: b'{"id": "a", "id": "b", "text": "x", "text": "y"}\n'),
    "no newline": ("jsonl", lambda: b"\xef\xbb\xbf" + _row("x").strip()),
    "only newlines": ("jsonl", lambda: b"\n" * MEBI),
    "bomb of one line": ("gzip", lambda: _spaces(_row("x"), b"\n" + _row("y", "b"))),
    "bomb of a text": ("gzip", lambda: _spaces(b'{"id": "a", "text": "', b'"}\n')),
    "empty gzip": ("gzip", lambda: gzip.compress(b"")),
    "wide parquet": ("parquet", _wide_parquet),
    "lock of brackets": ("lock", lambda: b"[" * DEEP),
    "large lock": ("lock", lambda: b'{"owner": "' + b"x" * (64 * MEBI) + b'"}'),
    "log of brackets": ("log", lambda: b"[" * DEEP + b"\n"),
    "one long log line": ("log", lambda: b"x" * (64 * MEBI)),
    "run of brackets": ("run", lambda: b'{"a":' * DEEP),
    "table of brackets": ("table", lambda: b"[" * DEEP),
    "large table": ("table", lambda: b'{"key": "' + b"x" * (9 * MEBI) + b'"}'),
    "machine of brackets": ("machine", lambda: b'{"a":' * DEEP),
    "large machine": ("machine", lambda: b'{"name": "' + b"x" * (300 * MEBI) + b'"}'),
    "job of brackets": ("job", lambda: b"a = " + b"[" * DEEP),
    "large job": ("job", lambda: b"[model]\npath = '" + b"x" * (300 * MEBI) + b"'\n"),
    "nothing": ("results", lambda: b""),
}
