"""Everything that can be wrong with a result file that HDF5 can open, by name."""

from __future__ import annotations

import json
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
    dataset_with_attributes,
    external,
    move,
    named_type_with_attributes,
    of_time,
    replace,
    replace_in,
    stored_outside,
    to_group,
    two_names,
    unwritten,
    virtual,
)
from untrusted import HEADER

from kvr_mpi.store.outputs import ARRAYS, SCHEMA_VERSION, Record
from kvr_mpi.store.record import DATASETS

ATTRIBUTES = [spec for spec in fields(Record) if spec.name not in DATASETS]
PICKLE = np.void(b"cos\nsystem\n(S'touch owned'\ntR.")
COMPOUND = np.zeros(3, dtype=[("a", "i8"), ("b", "f4")])
# In a document, or on the way to it: no command may go on.
RECORD_DAMAGE: dict[str, Damage] = {
    "answer-missing": replace("answer", None),
    "answer-group": to_group("documents/a/answer"),
    "answer-number": replace("answer", 5),
    "answer-numbers": replace("answer", np.arange(3)),
    "answer-several": replace("answer", ["one", "two"]),
    "answer-one-in-a-list": replace("answer", ["one"]),
    "answer-null": replace("answer", h5py.Empty("S5")),
    "answer-pickle": replace("answer", PICKLE),
    "answer-pickles": replace("answer", np.array([PICKLE, PICKLE])),
    "answer-compound": replace("answer", COMPOUND),
    "answer-not-utf8": replace("answer", np.array(b"\xff\xfe\xfd", dtype=h5py.string_dtype("utf-8", 3))),
    "answer-bytes": replace("answer", [np.arange(3, dtype=np.uint8)]),
    "answer-time": of_time("documents/a/answer"),
    "answer-external-link": replace_in("documents/a/answer", external("/secret")),
    "answer-dangling-external-link": replace_in("documents/a/answer", lambda _: h5py.ExternalLink("no.h5", "/x")),
    "answer-soft-link": replace_in("documents/a/answer", lambda _: h5py.SoftLink("/documents/b/answer")),
    "answer-dangling-soft-link": replace_in("documents/a/answer", lambda _: h5py.SoftLink("/nowhere")),
    "answer-looping-soft-link": replace_in("documents/a/answer", lambda _: h5py.SoftLink("/documents/a/answer")),
    "answer-virtual": virtual("documents/a/answer", "words"),
    "answer-stored-outside": stored_outside("documents/a/answer", (1,), "S16"),
    "answer-unwritten": unwritten("documents/a/answer", (), "S16"),
    **{
        f"{name}-{what}": damage
        for name in ARRAYS
        for what, damage in {
            "missing": replace(name, None),
            "group": to_group(f"documents/a/{name}"),
            "scalar": replace(name, 5),
            "text": replace(name, "5 6 7"),
            "digits": replace(name, [b"5", b"6"]),
            "floats": replace(name, [0.5, 1.5]),
            "whole-floats": replace(name, [0.0, 2.0]),
            "column": replace(name, np.zeros((3, 1), dtype=np.int64)),
            "beyond-int64": replace(name, np.array([2**64 - 1], dtype=np.uint64)),
            "null": replace(name, h5py.Empty("i8")),
            "pickle": replace(name, PICKLE),
            "pickles": replace(name, np.array([PICKLE, PICKLE])),
            "compound": replace(name, COMPOUND),
            "time": of_time(f"documents/a/{name}"),
            "external-link": replace_in(f"documents/a/{name}", external("/numbers")),
            "soft-link": replace_in(f"documents/a/{name}", lambda _: h5py.SoftLink("/documents/b/slices")),
            "virtual": virtual(f"documents/a/{name}", "numbers"),
            "stored-outside": stored_outside(f"documents/a/{name}", (3,), "i8"),
            "unwritten": unwritten(f"documents/a/{name}", (3,), "i8"),
            "unwritten-chunks": unwritten(f"documents/a/{name}", (3,), "i8", chunks=(3,)),
            "unwritten-compressed": unwritten(f"documents/a/{name}", (3,), "i8", chunks=(3,), compression="gzip"),
            "huge": unwritten(f"documents/a/{name}", (2**50,), "i8", chunks=(8,), compression="gzip"),
        }.items()
    },
    **{f"{spec.name}-missing": attribute("documents/a", spec.name, None) for spec in ATTRIBUTES},
    **{
        f"{spec.name}-wrong-type": attribute("documents/a", spec.name, 5 if spec.type == "str" else "5")
        for spec in ATTRIBUTES
    },
    **{f"{spec.name}-array": attribute("documents/a", spec.name, np.arange(3)) for spec in ATTRIBUTES},
    **{f"{spec.name}-null": attribute("documents/a", spec.name, h5py.Empty("f8")) for spec in ATTRIBUTES},
    **{f"{spec.name}-pickle": attribute("documents/a", spec.name, PICKLE) for spec in ATTRIBUTES},
    **{f"{spec.name}-time": attribute_of_time("documents/a", spec.name) for spec in ATTRIBUTES},
    **{
        f"{spec.name}-not-utf8": attribute_bytes("documents/a", spec.name, b"\xffdone\xfe")
        for spec in ATTRIBUTES
        if spec.type == "str"
    },
    **{f"{spec.name}-fraction": attribute("documents/a", spec.name, 1.5) for spec in ATTRIBUTES if spec.type == "int"},
    "status-unknown": attribute("documents/a", "status", "maybe"),
    "id-of-another": attribute("documents/a", "id", "b"),
    "id-of-nobody": attribute("documents/a", "id", "../../x"),
    "key-of-another": move("documents/a", "documents/c"),
    "key-not-encoded": move("documents/a", "documents/é"),
    "two-names": two_names,
    "document-dataset": dataset_with_attributes,
    "document-named-type": named_type_with_attributes,
    "document-external-link": replace_in("documents/a", external("/documents/a")),
    "document-soft-link": replace_in("documents/a", lambda _: h5py.SoftLink("/documents/b")),
    "document-dangling-link": replace_in("documents/a", lambda _: h5py.SoftLink("/nowhere")),
    "documents-missing": move("documents", "papers"),
    "documents-scalar": replace_in("documents", lambda _: 5),
    "documents-names": replace_in("documents", lambda _: ["a", "b"]),
    "documents-no-names": replace_in("documents", lambda _: np.zeros(0)),
    "documents-named-type": replace_in("documents", lambda _: np.dtype("f8")),
    "documents-external-link": replace_in("documents", external("/documents")),
    "documents-soft-link": replace_in("documents", lambda _: h5py.SoftLink("/")),
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
# In what a file says of itself: nothing that shows it may go on.
HEADER_DAMAGE: dict[str, Damage] = {
    f"{name}-{what}": damage
    for name in ("identity", "model", "software")
    for what, damage in {
        "missing": attribute("/", name, None),
        "no-json": attribute("/", name, "{'a': 1}"),
        "half": attribute("/", name, '{"a": '),
        "list": attribute("/", name, "[1, 2]"),
        "text": attribute("/", name, '"name"'),
        "json-null": attribute("/", name, "null"),
        "number": attribute("/", name, 5),
        "array": attribute("/", name, np.arange(3)),
        "null": attribute("/", name, h5py.Empty("S5")),
        "pickle": attribute("/", name, PICKLE),
        "time": attribute_of_time("/", name),
        "not-utf8": attribute_bytes("/", name, b'{"\xff": 1}'),
        "deep": attribute("/", name, "[" * 100_000),
    }.items()
} | {
    f"model-without-{name}": attribute("/", "model", json.dumps({k: v for k, v in HEADER.model.items() if k != name}))
    for name in HEADER.model
}
# In keys and values: nothing that shows the document may go on.
KEYS = "documents/a/kv/layer_000/keys"
KV_DAMAGE: dict[str, Damage] = {
    "kv-dataset": replace("kv", np.arange(3)),
    "kv-scalar": replace("kv", 5),
    "kv-named-type": replace("kv", np.dtype("f8")),
    "kv-external-link": replace_in("documents/a/kv", external("/documents/a/kv")),
    "kv-soft-link": replace_in("documents/a/kv", lambda _: h5py.SoftLink("/documents/b/kv")),
    "kv-dangling-link": replace_in("documents/a/kv", lambda _: h5py.SoftLink("/nowhere")),
    **{
        f"layer-named-{name or 'nothing'}": move("documents/a/kv/layer_000", f"documents/a/kv/layer_{name}")
        for name in ("", "x", "0x1", "1e3", "-1", "0 0", "000 ", "٣", "../..".replace("/", "%2F"))
    },
    "layer-unnamed": move("documents/a/kv/layer_000", "documents/a/kv/strange"),
    "layer-dataset": replace_in("documents/a/kv/layer_000", lambda _: np.arange(3)),
    "layer-scalar": replace_in("documents/a/kv/layer_000", lambda _: 5),
    "layer-external-link": replace_in("documents/a/kv/layer_000", external("/documents/a/kv/layer_000")),
    "layer-soft-link": replace_in("documents/a/kv/layer_000", lambda _: h5py.SoftLink("/documents/b/kv/layer_000")),
    "keys-missing": move(KEYS, "documents/a/kv/layer_000/k"),
    "keys-group": to_group(KEYS),
    "keys-named-type": replace_in(KEYS, lambda _: np.dtype("f4")),
    "keys-external-link": replace_in(KEYS, external("/floats")),
    "keys-soft-link": replace_in(KEYS, lambda _: h5py.SoftLink("/documents/b/kv/layer_000/keys")),
    "keys-virtual": virtual(KEYS, "floats"),
    "keys-stored-outside": stored_outside(KEYS, (4, 1, 4), "f4"),
    "keys-unwritten": unwritten(KEYS, (4, 1, 4), "f4"),
    "keys-unwritten-chunks": unwritten(KEYS, (4, 1, 4), "f4", chunks=(4, 1, 4)),
    "keys-null": replace_in(KEYS, lambda _: h5py.Empty("f4")),
    "keys-text": replace_in(KEYS, lambda _: "keys"),
    "keys-pickle": replace_in(KEYS, lambda _: PICKLE),
    "keys-compound": replace_in(KEYS, lambda _: COMPOUND),
    "keys-integers": replace_in(KEYS, lambda _: np.zeros((4, 1, 4), dtype=np.int32)),
    "keys-time": of_time(KEYS),
    "kv-digests-missing": move("documents/a/kv/layer_000/digests", "documents/a/kv/layer_000/d"),
    "kv-digests-other": replace_in("documents/a/kv/layer_000/digests", lambda _: np.zeros((1, 2), np.int64)),
    "kv-digests-huge": unwritten("documents/a/kv/layer_000/digests", (2**40, 2), "i8", chunks=(64, 2)),
    "kv-ids-missing": move("documents/a/kv/token_ids", "documents/a/kv/token"),
    "kv-ids-other": replace_in("documents/a/kv/token_ids", lambda _: np.arange(4)),
    "kv-ids-floats": replace_in("documents/a/kv/token_ids", lambda _: np.zeros(4)),
    "kv-ids-huge": unwritten("documents/a/kv/token_ids", (2**40,), "i8", chunks=(64,)),
    "kv-ids-external": replace_in("documents/a/kv/token_ids", external("/floats")),
    "kv-text-other": attribute("documents/a/kv", "text_stop", 2),
    "kv-text-outside": attribute("documents/a/kv", "text_stop", 99),
    "kv-text-missing": attribute("documents/a/kv", "text_start", None),
    "kv-blocks-other": attribute("documents/a/kv", "block_tokens", 4),
    "kv-blocks-none": attribute("documents/a/kv", "block_tokens", 0),
}
# The type of keys is not looked at to show their shape.
KV_READ_DAMAGE: dict[str, Damage] = {
    "keys-huge": unwritten(KEYS, (2**40, 2**5, 2**5), "f4", chunks=(8, 8, 8), compression="gzip"),
}


def cases(*tables: dict[str, Damage]) -> list[Any]:
    return [pytest.param(damage, id=name) for table in tables for name, damage in table.items()]
