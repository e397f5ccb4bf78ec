"""Everything that can be wrong with a result file that HDF5 can open, by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import h5py
import numpy as np
import pytest
from damage import (
    Damage,
    attribute,
    attribute_bytes,
    attribute_of_time,
    deflated,
    external,
    move,
    of_time,
    relined,
    replace_in,
    setting,
    stored_outside,
    to_group,
    unwritten,
    virtual,
    without,
)
from untrusted import HEADER, kv_of

from kvr_mpi.store.record import ARRAYS, ASKED_FOR, REALS, Record
from kvr_mpi.store.volumes import SCHEMA_VERSION

PICKLE = np.void(b"cos\nsystem\n(S'touch owned'\ntR.")
COMPOUND = np.zeros(3, dtype=[("a", "i8"), ("b", "f4")])
DEEP = b"[" * 100_000
WRONG: dict[str, tuple[Any, ...]] = {"str": (5, None, ["a"]), "int": ("5", 1.5, True, 2**64), "float": ("5", [0.5])}
# Where keys and values are, of the two documents.
A, B = kv_of("a"), kv_of("b")
LAYER, KEYS = f"{A}/layer_000", f"{A}/layer_000/keys"


def misplaced(place: str) -> dict[str, Damage]:
    """Put everything that cannot be there in the place of a group or dataset."""
    found: dict[str, Damage] = {
        "missing": move(place, "other"),
        "group": to_group(place),
        "scalar": replace_in(place, lambda _: 5),
        "text": replace_in(place, lambda _: "{}"),
        "floats": replace_in(place, lambda _: np.zeros(3)),
        "numbers": replace_in(place, lambda _: np.arange(3)),
        "column": replace_in(place, lambda _: np.zeros((3, 1), np.uint8)),
        "null": replace_in(place, lambda _: h5py.Empty("u1")),
        "pickle": replace_in(place, lambda _: PICKLE),
        "compound": replace_in(place, lambda _: COMPOUND),
        "named-type": replace_in(place, lambda _: np.dtype("f4")),
        "external-link": replace_in(place, external("/numbers")),
        "dangling-external-link": replace_in(place, lambda _: h5py.ExternalLink("no.h5", "/x")),
        "soft-link": replace_in(place, lambda _: h5py.SoftLink(f"/{place.replace(A, B)}")),  # else to itself
        "dangling-link": replace_in(place, lambda _: h5py.SoftLink("/nowhere")),
        "virtual": virtual(place, "numbers"),
        "stored-outside": stored_outside(place, (16,), "u1"),
        "unwritten": unwritten(place, (100,), "u1"),
        "unwritten-chunks": unwritten(place, (100,), "u1", chunks=(10,)),
        "huge": unwritten(place, (2**50,), "u1", chunks=(8,), compression="gzip"),
    }
    return {f"{place.replace(A, 'kv')}-{what}": damage for what, damage in found.items()}


# In the records, or on the way to them: no command may go on.
RECORD_DAMAGE: dict[str, Damage] = {
    **misplaced("records"),
    **misplaced("log"),
    "records-deflated": deflated("records"),
    "log-deflated": deflated("log"),
    "line-cut": relined(lambda line: b'{"id": "a", "st\n'),
    "line-empty": relined(lambda line: b"\n"),
    "line-unsealed": relined(lambda line: b'{"id": "a"}\n'),
    "line-deep": relined(lambda line: DEEP + b"\n"),
    "line-list": relined(lambda line: b"[1, 2]\n"),
    "line-header": relined(lambda line: line | {"line": "header"}),
    "line-unknown": relined(lambda line: {"line": "other"}),
    "line-not-utf8": relined(lambda line: b"\xff\xfe\n"),
    **{f"{name}-missing": without(name) for name in [spec.name for spec in fields(Record)] if name not in ASKED_FOR},
    **{
        f"{spec.name}-{number}": setting(spec.name, value)
        for spec in fields(Record)
        if spec.name not in ARRAYS
        for number, value in enumerate(WRONG[str(spec.type)])
    },
    **{
        f"{name}-{number}": setting(name, value)
        for name in ARRAYS
        for number, value in enumerate((5, "5", ["5"], [[1]], {"1": 2}, [None] if name not in REALS else ["x"]))
    },
    "answer-surrogate": setting("answer", "\ud800"),
    "field-unknown": setting("note", "more"),
    "status-unknown": setting("status", "maybe"),
    "pieces-missing": without("pieces"),
    "pieces-text": setting("pieces", "abc"),
    "pieces-numbers": setting("pieces", [1]),
    "schema-missing": attribute("/", "schema", None),
    "schema-other": attribute("/", "schema", "anndata"),
    "schema-number": attribute("/", "schema", 1),
    "schema-list": attribute("/", "schema", ["kvr-mpi", "kvr-mpi"]),
    "schema-null": attribute("/", "schema", h5py.Empty("S5")),
    "schema-pickle": attribute("/", "schema", PICKLE),
    "schema-time": attribute_of_time("/", "schema"),
    "schema-not-utf8": attribute_bytes("/", "schema", b"\xff\xfe"),
    "version-missing": attribute("/", "schema_version", None),
    "version-newer": attribute("/", "schema_version", SCHEMA_VERSION + 1),
    "version-far": attribute("/", "schema_version", 2**62),
    "version-text": attribute("/", "schema_version", "1"),
    "version-fraction": attribute("/", "schema_version", 1.5),
    "version-list": attribute("/", "schema_version", [1, 1]),
    "version-time": attribute_of_time("/", "schema_version"),
}


def log_line(number: int, **values: Any) -> Damage:
    return relined(lambda line: line | values, "log", number)


# In what a file says of itself and of its keys and values.
HEADER_DAMAGE: dict[str, Damage] = {
    **{
        f"{name}-{what}": log_line(0, **{name: value})
        for name in ("identity", "model", "software")
        for what, value in {"list": [1, 2], "text": "name", "null": None, "number": 5}.items()
    },
    **{
        f"model-without-{name}": log_line(0, model={k: v for k, v in HEADER.model.items() if k != name})
        for name in HEADER.model
    },
    "header-missing": relined(lambda line: None, "log", 0),
    "header-deep": relined(lambda line: DEEP + b"\n", "log", 0),
    "volume-path": log_line(1, name="../other.h5"),
    "volume-number": log_line(1, name=5),
    "volume-pieces": log_line(1, pieces=[1, 2]),
    "piece-size": log_line(1, pieces={"a": ["1", "2"]}),
    "piece-seal": log_line(1, pieces={"a": [1, 2]}),
    "piece-short": log_line(1, pieces={"a": [1]}),
}
# In keys and values: nothing that shows the document may go on.
KV_DAMAGE: dict[str, Damage] = {
    name: damage
    for place in (A, LAYER, KEYS, f"{LAYER}/digests", f"{A}/token_ids")
    for name, damage in misplaced(place).items()
} | {
    **{
        f"layer-named-{name or 'nothing'}": move(LAYER, f"{A}/layer_{name}")
        for name in ("", "x", "0x1", "1e3", "-1", "0 0", "000 ", "٣", "%2E%2E")
    },
    "layer-unnamed": move(LAYER, f"{A}/strange"),
    "keys-virtual": virtual(KEYS, "floats"),
    "keys-stored-outside": stored_outside(KEYS, (4, 1, 4), "f4"),
    "keys-unwritten": unwritten(KEYS, (4, 1, 4), "f4"),
    "keys-unwritten-chunks": unwritten(KEYS, (4, 1, 4), "f4", chunks=(4, 1, 4)),
    "keys-deflated": deflated(KEYS),
    "keys-integers": replace_in(KEYS, lambda _: np.zeros((4, 1, 4), dtype=np.int32)),
    "keys-time": of_time(KEYS),
    "digests-other": replace_in(f"{LAYER}/digests", lambda _: np.zeros((1, 2), np.int64)),
    "digests-huge": unwritten(f"{LAYER}/digests", (2**40, 2), "i8", chunks=(64, 2)),
    "ids-other": replace_in(f"{A}/token_ids", lambda _: np.arange(4)),
    "ids-huge": unwritten(f"{A}/token_ids", (2**40,), "i8", chunks=(64,)),
    "kv-text-other": attribute(A, "text_stop", 2),
    "kv-text-outside": attribute(A, "text_stop", 99),
    "kv-text-missing": attribute(A, "text_start", None),
    "kv-blocks-other": attribute(A, "block_tokens", 4),
    "kv-blocks-none": attribute(A, "block_tokens", 0),
}
# The type of keys is not looked at to show their shape.
KV_READ_DAMAGE: dict[str, Damage] = {
    "keys-huge": unwritten(KEYS, (2**40, 2**5, 2**5), "f4", chunks=(8, 8, 8), compression="gzip"),
}


def cases(*tables: dict[str, Damage]) -> list[Any]:
    return [pytest.param(damage, id=name) for table in tables for name, damage in table.items()]
