"""The HDF5 schema, version 1, and its one reader and writer.

    /                      attributes: schema = "kvr-mpi", schema_version = 1, created, and as JSON: identity (what
                           the answers depend on), model (name, architecture, dtype), software (versions)
    /documents/KEY         one group per document; KEY is its id, percent-encoded
        attributes         id, status ("done" | "error"), error, document_sha256, prompt_sha256, prompt_tokens,
                           dropped_tokens, new_tokens, finish_reason, strategy, ttft_s, prefill_tokens_per_s,
                           wait_s, decode_s, parts, finished_at
        answer             text (UTF-8 string)
        token_ids          of the answer (int64)
        slices             bounds of the prompt over the ranks (int64, ranks + 1)
        kv/layer_000/keys, values     (tokens, kv_heads, head_dim) in the model's dtype, if asked for

Text has a fixed length (see ``hdf5``): plain h5py gives attributes as bytes, ``[()].decode()`` the answer.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import h5py
import numpy as np

from kvr_mpi import __version__
from kvr_mpi.errors import DataError, ForeignError
from kvr_mpi.store.hdf5 import dataset_in, fixed_text, group_in, open_hdf5, read_attribute, write_attribute
from kvr_mpi.store.kv import write_array

if TYPE_CHECKING:
    import torch

SCHEMA, SCHEMA_VERSION = "kvr-mpi", 1
# Arrays of a record, kept as datasets; all its other fields are attributes.
ARRAYS = ("token_ids", "slices")
STATUSES = ("done", "error")
FIELD_TYPES: dict[str, Any] = {"str": str, "int": int, "float": float}
LAYER_NAME = re.compile(r"layer_[0-9]{3,}", re.ASCII)

KeysValues = tuple["torch.Tensor", "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Record:
    """One document's outcome, as stored."""

    id: str
    status: str  # "done" or "error"
    error: str = ""
    answer: str = ""
    token_ids: tuple[int, ...] = ()
    slices: tuple[int, ...] = ()
    document_sha256: str = ""
    prompt_sha256: str = ""
    prompt_tokens: int = 0
    dropped_tokens: int = 0  # of the text, cut off because the prompt was too long
    new_tokens: int = 0
    finish_reason: str = ""
    strategy: str = ""
    ttft_s: float = 0.0  # from the chain's start on this prompt to its first token
    prefill_tokens_per_s: float = 0.0
    wait_s: float = 0.0  # of ttft_s, the last rank's wait for keys and values
    decode_s: float = 0.0  # from its first token to its last, the wait for the rest of its wave included
    parts: int = 1  # prompts it took: more than one if the text was split
    finished_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))

    def as_dict(self) -> dict[str, Any]:
        """Fields as plain values."""
        return {**asdict(self), "token_ids": list(self.token_ids), "slices": list(self.slices)}

    def as_json(self) -> dict[str, Any]:
        """Fields as JSON has them: no infinities, no NaN."""
        values = self.as_dict().items()
        return {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in values}


def software() -> dict[str, str]:
    """Versions of everything the answers came through."""
    import torch
    import transformers

    return {
        "kvr_mpi": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
    }


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
    write_attribute(file, "schema", SCHEMA)
    write_attribute(file, "schema_version", SCHEMA_VERSION)
    write_attribute(file, "created", datetime.now(UTC).isoformat(timespec="seconds"))
    for name, value in {**asdict(header), "software": software()}.items():
        write_attribute(file, name, json.dumps(value, sort_keys=True))
    file.create_group("documents")


def read_header(file: h5py.File) -> Header:
    """Read the header of a file that `open_file` let through."""
    header = Header(_read_json(file, "identity"), _read_json(file, "model"))
    if not {"name", "architecture", "dtype"} <= header.model.keys():
        raise DataError(f"{file.filename}: its header names no model; expected name, architecture and dtype")
    return header


def read_software(file: h5py.File) -> dict[str, str]:
    """Versions a file was made with."""
    return {name: str(version) for name, version in _read_json(file, "software").items()}


def write_record(file: h5py.File, record: Record, layers: Iterable[KeysValues | None] = ()) -> None:
    """Add a document's group, with each layer's keys and values (tokens, kv_heads, head_dim) if given."""
    group = file["documents"].create_group(key_of(record.id))
    for name, value in record.as_dict().items():
        if name in ARRAYS:
            group.create_dataset(name, data=np.asarray(value, dtype=np.int64))
        elif name == "answer":
            group.create_dataset(name, data=fixed_text(value))
        else:
            write_attribute(group, name, value)
    for number, layer in enumerate(layers):
        if layer is not None:
            place = group.create_group(f"kv/layer_{number:03d}")
            write_array(place, "keys", layer[0])
            write_array(place, "values", layer[1])


def drop_record(file: h5py.File, document_id: str) -> None:
    """Take a document out again, however much of it was written."""
    if key_of(document_id) in file["documents"]:
        del file["documents"][key_of(document_id)]


@contextmanager
def open_file(path: Path) -> Iterator[h5py.File]:
    """Open one of our files for reading, having looked at what it says it is.

    Raises
    ------
    DataError
        If it is missing, damaged, foreign, or of a newer schema; also for what is found while it is open.
    """
    with open_hdf5(path) as file:
        if "schema" not in file.attrs or read_attribute(file, "schema", str) != SCHEMA:
            raise ForeignError(
                f"{path} is an HDF5 file, but not of kvr-mpi (expected the attribute schema = {SCHEMA!r})"
            )
        version = read_attribute(file, "schema_version", int)
        if version > SCHEMA_VERSION:
            raise ForeignError(
                f"{path} has schema version {version}; this kvr-mpi reads up to {SCHEMA_VERSION}: upgrade it"
            )
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
    """Read a document's group.

    Raises
    ------
    DataError
        If a field is missing or of another type.
    """
    values: dict[str, Any] = {}
    for spec in fields(Record):
        if spec.name in ARRAYS:
            values[spec.name] = tuple(dataset_in(group, spec.name, "i", 1)[()].tolist())
        elif spec.name == "answer":
            values[spec.name] = dataset_in(group, spec.name, "S", 0)[()].decode()
        else:
            values[spec.name] = read_attribute(group, spec.name, FIELD_TYPES[str(spec.type)])
    return Record(**values)


def kv_layers(group: h5py.Group) -> Iterator[tuple[int, h5py.Dataset, h5py.Dataset]]:
    """Yield (layer, keys, values) of a document that has its keys and values stored; see ``kv.read_array``."""
    if "kv" in group:
        layers = group_in(group, "kv")
        for name in layers:
            if not LAYER_NAME.fullmatch(name):
                raise DataError(f"{group.file.filename}:{layers.name}/{name} is no layer; expected layer_000, ...")
            layer = group_in(layers, name)
            yield (
                int(name.removeprefix("layer_")),
                dataset_in(layer, "keys", "f", 3),
                dataset_in(layer, "values", "f", 3),
            )


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
