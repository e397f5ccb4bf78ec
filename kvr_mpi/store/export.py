"""Results in other formats: JSON lines for jq, CSV and Parquet for pandas."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import fields
from typing import BinaryIO

from kvr_mpi.errors import ConfigError
from kvr_mpi.store.outputs import Record

BATCH_ROWS = 1024


def _write_jsonl(records: Iterable[Record], stream: BinaryIO) -> None:
    """Write one JSON object per line."""
    for record in records:
        stream.write(json.dumps(record.as_json(), ensure_ascii=False).encode() + b"\n")


def _write_csv(records: Iterable[Record], stream: BinaryIO) -> None:
    """Write a header and one row per document; lists are space-separated."""
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    try:
        writer = csv.DictWriter(
            text, [spec.name for spec in fields(Record)], lineterminator="\n", quoting=csv.QUOTE_ALL
        )
        writer.writeheader()
        for record in records:
            row = record.as_dict()
            writer.writerow(
                {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in row.items()}
            )
    finally:
        text.detach()  # or it would close the stream


def _write_parquet(records: Iterable[Record], stream: BinaryIO) -> None:
    """Write one row group per `BATCH_ROWS` documents, compressed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("writing Parquet needs pyarrow; `pip install kvr-mpi[parquet]`") from error
    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string()}
    schema = pyarrow.schema(
        [(spec.name, kinds.get(str(spec.type), pyarrow.list_(pyarrow.int64()))) for spec in fields(Record)]
    )
    with pyarrow.parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        rows: list[dict[str, object]] = []
        for record in records:
            rows.append(record.as_dict())
            if len(rows) == BATCH_ROWS:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                rows = []
        writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def write_export(records: Iterable[Record], kind: str, stream: BinaryIO) -> None:
    """Write documents as ``jsonl``, ``csv`` or ``parquet``."""
    {"jsonl": _write_jsonl, "csv": _write_csv, "parquet": _write_parquet}[kind](records, stream)
