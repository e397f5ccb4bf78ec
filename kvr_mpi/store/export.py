"""Export results as JSON Lines (for jq), CSV or Parquet (for pandas), and embeddings as numpy arrays."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterable, Sequence
from typing import BinaryIO

import numpy as np

from kvr_mpi.errors import ConfigError
from kvr_mpi.store.record import ARRAYS, ASKED_FOR, COMPUTED, KINDS, LONG, REALS, Record
from kvr_mpi.store.results import Results

BATCH_ROWS = 1024
ASKED_ABOUT = ("document", "question")
CHECKED = ("copied", "unsupported")  # of which short tables have counts
MARKED = "marked"  # the answer with its unsupported words in brackets; only if it is chosen


def asked_fields(records: Iterable[Record], columns: Sequence[str] = ()) -> tuple[str, ...]:
    """List the fields of a short table: the answer and what a job requested, in the order of a record."""
    asked = [*ASKED_ABOUT, "text_logprob", "scored_tokens"]
    asked += [name for name in ASKED_FOR if name in LONG and name not in CHECKED]
    found, computed = {"id", "status", "error", "answer", "finish_reason"}, {"coverage"}
    for record in records:
        found.update(name for name in asked if getattr(record, name))
        computed |= set(COMPUTED) if record.unsupported else set()
    names = [*(name for name in KINDS if name in found), *(name for name in COMPUTED if name in computed)]
    return (*names, *(f"columns.{name}" for name in columns))


def choose_fields(names: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """Check the names of fields; raise `ConfigError` with all fields if one is unknown."""
    known = [*_names(columns), MARKED]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"no field {unknown[0]!r}; expected names of {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def _write_csv(records: Iterable[Record], stream: BinaryIO, columns: Sequence[str], chosen: Sequence[str]) -> None:
    """Write a header and one row per document, with these fields or all; lists are space-separated."""
    # Not a TextIOWrapper: it would close the stream, and raise when it is deleted after the reader closed the pipe.
    text = codecs.getwriter("utf-8")(stream)
    names = chosen or _names(columns)
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writeheader()
    for record in records:
        row = _row(record, columns)
        writer.writerow(
            {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in row.items()}
        )


def _write_parquet(records: Iterable[Record], stream: BinaryIO, columns: Sequence[str], chosen: Sequence[str]) -> None:
    """Write one row group per `BATCH_ROWS` documents, compressed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("writing Parquet needs pyarrow; `pip install pyarrow`") from error
    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string()}
    arrays = {name: pyarrow.list_(kinds["float" if name in REALS else "int"]) for name in ARRAYS}
    types = {name: arrays.get(name) or kinds[kind] for name, kind in KINDS.items()}
    types |= {name: kinds[kind] for name, kind in COMPUTED.items()}
    names = chosen or _names(columns)
    schema = pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in names])
    with pyarrow.parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        rows: list[dict[str, object]] = []
        for record in records:
            rows.append(_row(record, columns))
            if len(rows) == BATCH_ROWS:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                rows = []
        writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def _names(columns: Sequence[str]) -> list[str]:
    """List the columns of a table: the fields of a record, and one column per copied column of the documents' rows."""
    return [*(name for name in KINDS if name != "columns"), *COMPUTED, *(f"columns.{name}" for name in columns)]


def _row(record: Record, columns: Sequence[str]) -> dict[str, object]:
    """Convert a record to a row; values copied from the document's row become JSON unless they are text."""
    row, passed = {**record.as_dict(), **record.computed, MARKED: record.marked}, record.passed
    del row["columns"]
    for name in columns:
        value = passed.get(name)
        row[f"columns.{name}"] = value if value is None or isinstance(value, str) else json.dumps(value)
    return row


def write_embeddings(results: Results, stream: BinaryIO) -> None:
    """Write embeddings in numpy's format, one row per document that has one: its id, and float32 (dimension,).

    The array is structured, with the fields ``id`` and ``embedding``. Raises `ConfigError` if there are none.
    """
    names, found = results.embeddings()
    ids = np.array(names)
    rows = np.empty(len(names), [("id", ids.dtype), ("embedding", np.float32, found.shape[1:])])
    rows["id"], rows["embedding"] = ids, found
    np.lib.format.write_array(stream, rows, allow_pickle=False)


def write_export(
    records: Iterable[Record], kind: str, stream: BinaryIO, columns: Sequence[str] = (), chosen: Sequence[str] = ()
) -> None:
    """Write records as ``jsonl``, ``csv`` or ``parquet``.

    Tables include these `columns` of the documents' rows. If there are `chosen` fields, only these are written.
    """
    if kind == "jsonl":
        for record in records:
            whole = record.as_json()
            if chosen:
                whole |= {MARKED: record.marked} | {f"columns.{name}": record.passed.get(name) for name in columns}
                whole = {name: whole[name] for name in chosen}
            stream.write(json.dumps(whole, ensure_ascii=False).encode() + b"\n")
    elif kind == "csv":
        _write_csv(records, stream, columns, chosen)
    else:
        _write_parquet(records, stream, columns, chosen)
