"""The HDF5 schema, version 4, and its one reader and writer.

    /                    attributes: schema = "kvr-mpi", schema_version = 4,
                         created; as JSON: identity (what the answers depend
                         on), model (name, architecture, dtype), software
                         (versions); header_sha256 of all of these
    /documents/KEY       one group per document; KEY is its id,
                         percent-encoded
      attributes
        id, status       status is "done" or "error"
        error            why the document failed
        document, question    of ``kvr ask`` and of several prompts
        columns          fields of the document's row, as JSON
        document_sha256, prompt_sha256
        prompt_tokens    length of the prompt
        computed_tokens  of them, those that were computed; the others' keys
                         and values were there already
        text_tokens      of the document's text in the prompt; absent if there
                         are none
        dropped_tokens   of the text, cut off from a prompt that was too long
        new_tokens, finish_reason, strategy, parts, finished_at
        ttft_s, prefill_tokens_per_s, wait_s, decode_s
        compression      method and settings; empty: nothing was dropped
        retained_tokens, retained_bytes    what compression has left
        cache            of a rolling cache: what it held, and whether that
                         is exact
        kernels          hardware, dtype and kernels that the answer may
                         depend on; absent for float32 on CPUs
        answer_bytes, answer_tokens, kv_bytes, kv_sha256    what to read
        record_sha256    of all of these, answer, token_ids and slices
      answer             text (UTF-8), one element
      token_ids          of the answer (int64)
      slices             bounds of the prompt over the ranks (int64,
                         ranks + 1)
      logprobs           natural log-probabilities of token_ids (float64)
      top_tokens, top_logprobs    the most likely tokens in each place
                         (int64, float64; tokens * top, flat)
      token_texts        the texts of all these tokens, by id (JSON)
      samples            all answers, if n > 1 (list of JSON objects);
                         answer is the first of them
      scores             of given continuations (list of JSON objects)
      kv/...             keys and values, if asked for (see ``kv``)

Text has a fixed length (see ``hdf5``): plain h5py gives attributes as bytes, ``[0].decode()`` the answer. Datasets
carry HDF5's checksums (Fletcher's), keys and values their own. Fields in `ASKED_FOR` are only there if a job asked for
them. Files of any other version are refused.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import numpy as np

from kvr_mpi import __version__
from kvr_mpi.errors import DataError, ForeignError
from kvr_mpi.store.hdf5 import (
    MOST_TEXT_BYTES,
    attribute_names,
    create_group,
    dataset_in,
    group_in,
    open_hdf5,
    read_attribute,
    read_text,
    stored_text,
    write_attribute,
    write_dataset,
    write_text,
)
from kvr_mpi.store.kv import open_kv, strange_members, write_kv
from kvr_mpi.store.record import ARRAYS as ARRAYS
from kvr_mpi.store.record import ASKED_FOR, DATASETS, TEXTS
from kvr_mpi.store.record import REALS as REALS
from kvr_mpi.store.record import Record as Record
from kvr_mpi.store.stored_kv import CachedTokens, KeysValues

SCHEMA, SCHEMA_VERSION = "kvr-mpi", 4
STATUSES = ("done", "error")
FIELD_TYPES: dict[str, Any] = {"str": str, "int": int, "float": float}
HEADER_FIELDS = ("schema", "created", "identity", "model", "software")
# What a record announces of its datasets, so that nothing is inflated that is larger, and of their contents.
ANNOUNCED: dict[str, Any] = {"answer_bytes": int, "answer_tokens": int, "kv_bytes": int, "kv_sha256": str}
RECORD_SEAL, HEADER_SEAL = "record_sha256", "header_sha256"
# More than these is no answer and no chain.
MAX_TOKENS, MAX_SLICES = 1 << 22, 1 << 20
# Of the likeliest tokens, in each place.
MAX_TOP = 20


def software() -> dict[str, str]:
    """Versions of everything the answers came through."""
    return {
        "kvr_mpi": __version__,
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "transformers": _version_of("transformers"),
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
    }


def _version_of(package: str) -> str:
    """Version of what is loaded, which says more (``+cu130``); else of what is installed: loading takes seconds."""
    loaded = sys.modules.get(package)
    return str(loaded.__version__) if loaded is not None else metadata.version(package)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of all its documents.

    identity : what the answers depend on; a run is only resumed with the same.
    model : name, architecture, dtype: for people.
    """

    identity: dict[str, Any]
    model: dict[str, Any]


def start_file(file: h5py.File, header: Header) -> None:
    """Write the header of a new file."""
    values: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for name, value in {**asdict(header), "software": software()}.items():
        values[name] = stored_text(json.dumps(value, sort_keys=True))
    for name, value in {**values, HEADER_SEAL: _seal(values)}.items():
        write_attribute(file, name, value)
    create_group(file, "documents")


def read_header(file: h5py.File) -> Header:
    """Read the header of a file that `open_file` let through."""
    header = Header(_read_json(file, "identity"), _read_json(file, "model"))
    if not {"name", "architecture", "dtype"} <= header.model.keys():
        raise DataError(f"{file.filename}: its header has no model; expected name, architecture and dtype")
    return header


def read_software(file: h5py.File) -> dict[str, str]:
    """Versions a file was made with."""
    return {name: str(version) for name, version in _read_json(file, "software").items()}


def write_record(
    file: h5py.File,
    record: Record,
    layers: Iterable[KeysValues | None] = (),
    tokens: CachedTokens | None = None,
) -> None:
    """Add a document's group, with each layer's keys and values if given, and whose, as `write_kv`."""
    group = create_group(file["documents"], key_of(record.id))
    values = {name: stored_text(value) if isinstance(value, str) else value for name, value in record.as_dict().items()}
    values = {name: value for name, value in values.items() if value or name not in ASKED_FOR}
    for name in ARRAYS:
        if name in values:
            write_dataset(group, name, np.asarray(values[name], dtype=np.float64 if name in REALS else np.int64))
    for name in TEXTS:
        if name in values:
            write_text(group, name, values[name])
    kv_bytes, kv_sha256 = write_kv(group, layers, tokens)
    announced = (len(values["answer"].encode()), len(values["token_ids"]), kv_bytes, kv_sha256)
    values |= dict(zip(ANNOUNCED, announced, strict=True))
    for name, value in values.items():
        if name not in DATASETS:
            write_attribute(group, name, value)
    write_attribute(group, RECORD_SEAL, _seal(values))


def drop_record(file: h5py.File, document_id: str) -> None:
    """Take a document out again, however much of it was written."""
    if key_of(document_id) in file["documents"]:
        del file["documents"][key_of(document_id)]


def check_program(file: h5py.File) -> None:
    """Raise `ForeignError` if an HDF5 file was written by another program."""
    if "schema" not in file.attrs or read_attribute(file, "schema", str) != SCHEMA:
        raise ForeignError(
            f"{file.filename} is an HDF5 file, but not written by kvr-mpi (expected the attribute schema = {SCHEMA!r})"
        )


@contextmanager
def open_file(path: Path) -> Iterator[h5py.File]:
    """Open one of our files for reading, having looked at what it says it is.

    Raises
    ------
    DataError
        If it is missing, damaged, foreign, or of another schema version; also for what is found while it is open.
    """
    with open_hdf5(path) as file:
        check_program(file)
        version = read_attribute(file, "schema_version", int)
        if version != SCHEMA_VERSION:
            remedy = "upgrade kvr-mpi" if version > SCHEMA_VERSION else "process its documents again"
            raise ForeignError(
                f"{path} has schema version {version}; this kvr-mpi reads version {SCHEMA_VERSION} only: {remedy}"
            )
        values: dict[str, Any] = {name: read_attribute(file, name, str) for name in HEADER_FIELDS}
        values["schema_version"] = version
        if read_attribute(file, HEADER_SEAL, str) != _seal(values):
            raise DataError(f"{path} is damaged: its header differs from what was written (checksum)")
        yield file


def document_groups(file: h5py.File) -> Iterator[tuple[h5py.Group, str, bool]]:
    """Yield every document's group, its id, and whether it is done."""
    documents = group_in(file, "documents")
    for key in documents:
        group = group_in(documents, key)
        name, status = read_attribute(group, "id", str), read_attribute(group, "status", str)
        if key_of(name) != key:
            raise DataError(f"{file.filename}:{group.name}: its id {name!r} does not belong there")
        if status not in STATUSES:
            raise DataError(f"{file.filename}:{group.name}: status {status!r}; expected one of {', '.join(STATUSES)}")
        yield group, name, status == "done"


def read_record(group: h5py.Group) -> Record:
    """Read a document's group, and compare it with its checksum; of `ASKED_FOR`, what is not there has its default.

    Raises
    ------
    DataError
        If a field is of another type or size than announced, or the record is not what was written.
    """
    names, values = attribute_names(group), dict[str, Any]()
    for spec in fields(Record):
        if spec.name not in DATASETS and (spec.name in names or spec.name not in ASKED_FOR):
            values[spec.name] = read_attribute(group, spec.name, FIELD_TYPES[str(spec.type)])
    values |= {name: read_attribute(group, name, kind) for name, kind in ANNOUNCED.items()}
    values |= _read_datasets(group, values)
    if read_attribute(group, RECORD_SEAL, str) != _seal(values):
        raise DataError(
            f"{group.file.filename}:{group.name} is damaged: the record differs from what was written (checksum)"
        )
    arrays = {name: tuple(values[name]) for name in ARRAYS if name in values}
    return Record(**{name: value for name, value in values.items() if name not in ANNOUNCED} | arrays)


def _read_datasets(group: h5py.Group, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read arrays and long texts, none of which may be longer than announced."""
    found: dict[str, Any] = {}
    tokens = min(values["answer_tokens"], MAX_TOKENS)
    limits = {"token_ids": tokens, "slices": MAX_SLICES, "logprobs": tokens}
    for name in ARRAYS:
        if name in group:
            dataset, limit = (
                dataset_in(group, name, "f" if name in REALS else "i", (1,)),
                limits.get(name, tokens * MAX_TOP),
            )
            if dataset.shape[0] > limit:
                raise DataError(f"{_where(dataset)} has {dataset.shape[0]} elements; the record announces {limit}")
            found[name] = dataset[()].tolist()
    for name in TEXTS:
        if name in group:
            limit = max(1, values["answer_bytes"]) if name == "answer" else MOST_TEXT_BYTES
            found[name] = read_text(dataset_in(group, name, "S", (1,)), limit)
    return found


def check_record(group: h5py.Group) -> Record:
    """Read all of a document, its keys and values too (in pieces), and make sure that nothing else is in its group.

    Raises
    ------
    DataError
        If anything is not as it was written.
    """
    record = read_record(group)
    open_kv(group).check()
    known = {spec.name for spec in fields(Record)} | {*ANNOUNCED, RECORD_SEAL}
    strange = {*group} - {*DATASETS, "kv"} | attribute_names(group) - known | strange_members(group)
    if strange:
        raise DataError(f"{group.file.filename}:{group.name} has unknown members: {', '.join(sorted(strange)[:5])}")
    return record


def _seal(values: Mapping[str, Any]) -> str:
    """Checksum of values as they are stored: text, whole numbers, floats, lists of whole numbers."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _where(dataset: h5py.Dataset) -> str:
    return f"{dataset.file.filename}:{dataset.name}"


def _read_json(file: h5py.File, name: str) -> dict[str, Any]:
    try:
        value = json.loads(read_attribute(file, name, str))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.filename}: attribute {name!r} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{file.filename}: attribute {name!r} is a JSON {type(value).__name__}; expected an object")
    return value


def key_of(document_id: str) -> str:
    """Group name of a document: percent-encoded, so that no id is a path, and never ``.`` or ``..``."""
    key = quote(document_id, safe=" ,+=@()")
    return key.replace(".", "%2E") if set(key) == {"."} else key
