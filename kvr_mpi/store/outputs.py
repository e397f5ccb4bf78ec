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

Files come from anywhere: reading follows no link out of the file and runs nothing.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import h5py
import numpy as np

from kvr_mpi import __version__
from kvr_mpi.errors import DataError
from kvr_mpi.store.kv import check_plain, write_array

if TYPE_CHECKING:
    import torch

SCHEMA, SCHEMA_VERSION = "kvr-mpi", 1
# Arrays of a record, kept as datasets; all its other fields are attributes.
ARRAYS = ("token_ids", "slices")

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
    decode_s: float = 0.0
    parts: int = 1  # prompts it took: more than one if the text was split
    finished_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))

    def as_dict(self) -> dict[str, Any]:
        """Fields as plain JSON values."""
        return {**asdict(self), "token_ids": list(self.token_ids), "slices": list(self.slices)}


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
    file.attrs["schema"], file.attrs["schema_version"] = SCHEMA, SCHEMA_VERSION
    file.attrs["created"] = datetime.now(UTC).isoformat(timespec="seconds")
    for name, value in {**asdict(header), "software": software()}.items():
        file.attrs[name] = json.dumps(value, sort_keys=True)
    file.create_group("documents")


def read_header(file: h5py.File) -> Header:
    """Read the header of a file that `open_file` let through."""
    try:
        return Header(**{spec.name: json.loads(str(file.attrs[spec.name])) for spec in fields(Header)})
    except (KeyError, ValueError) as error:
        raise DataError(f"{file.filename}: its header is damaged: {error}") from error


def read_software(file: h5py.File) -> dict[str, str]:
    """Versions a file was made with."""
    try:
        return {str(name): str(version) for name, version in json.loads(str(file.attrs["software"])).items()}
    except (KeyError, ValueError, AttributeError) as error:
        raise DataError(f"{file.filename}: its header is damaged: {error}") from error


def write_record(file: h5py.File, record: Record, layers: Iterable[KeysValues | None] = ()) -> None:
    """Add a document's group, with each layer's keys and values (tokens, kv_heads, head_dim) if given."""
    group = file["documents"].create_group(key_of(record.id))
    for name, value in record.as_dict().items():
        if name in ARRAYS:
            group.create_dataset(name, data=np.asarray(value, dtype=np.int64))
        elif name == "answer":
            # HDF5 strings end at a NUL, and no model means to write one.
            group.create_dataset(name, data=value.replace("\0", "\ufffd"), dtype=h5py.string_dtype())
        else:
            group.attrs[name] = value.replace("\0", "\ufffd") if isinstance(value, str) else value
    for number, layer in enumerate(layers):
        if layer is not None:
            place = group.create_group(f"kv/layer_{number:03d}")
            write_array(place, "keys", layer[0])
            write_array(place, "values", layer[1])


@contextmanager
def open_file(path: Path) -> Iterator[h5py.File]:
    """Open one of our files for reading, having looked at what it says it is.

    Raises
    ------
    DataError
        If it is missing, damaged, foreign, or of a newer schema.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise DataError(f"{path} is no readable HDF5 file: {error}") from error
    with file:
        schema, version = file.attrs.get("schema"), file.attrs.get("schema_version")
        if schema != SCHEMA:
            raise DataError(f"{path} is an HDF5 file, but not of kvr-mpi (schema {schema!r}; expected {SCHEMA!r})")
        if not isinstance(version, (int, np.integer)) or version > SCHEMA_VERSION:
            raise DataError(
                f"{path} has schema version {version}; this kvr-mpi reads up to {SCHEMA_VERSION}: upgrade it"
            )
        yield file


def document_groups(file: h5py.File) -> Iterator[h5py.Group]:
    """Yield the documents' groups; refuse links, which could lead out of the file."""
    documents = child(file, "documents")
    for name in documents:
        yield child(documents, name)


def child(group: h5py.Group, name: str) -> Any:
    """Return a member that is really in this file.

    Raises
    ------
    DataError
        If it is missing, a soft or external link, or its data are elsewhere.
    """
    link = group.get(name, getlink=True) if name in group else None
    where = f"{group.file.filename}{group.name.rstrip('/')}/{name}"
    if link is None:
        raise DataError(f"{where} is missing")
    if not isinstance(link, h5py.HardLink):
        raise DataError(f"{where} is a {type(link).__name__}, which could lead out of the file; expected data")
    item = group[name]
    check_plain(item)
    return item


def read_record(group: h5py.Group) -> Record:
    """Read a document's group.

    Raises
    ------
    DataError
        If a field is missing or of another type.
    """
    values: dict[str, Any] = {}
    try:
        for spec in fields(Record):
            if spec.name in ARRAYS:
                values[spec.name] = tuple(int(value) for value in child(group, spec.name)[()])
            elif spec.name == "answer":
                values[spec.name] = child(group, spec.name).asstr()[()]
            else:
                value = group.attrs[spec.name]
                values[spec.name] = value.item() if isinstance(value, np.generic) else str(value)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            f"{group.file.filename}{group.name} is no record of schema {SCHEMA_VERSION}: {error}"
        ) from error
    return Record(**values)


def kv_layers(group: h5py.Group) -> Iterator[tuple[int, h5py.Dataset, h5py.Dataset]]:
    """Yield (layer, keys, values) of a document that has its keys and values stored; see ``kv.read_array``."""
    if "kv" in group:
        layers = child(group, "kv")
        for name in layers:
            layer = child(layers, name)
            yield int(name.removeprefix("layer_")), child(layer, "keys"), child(layer, "values")


def key_of(document_id: str) -> str:
    """Group name of a document: percent-encoded, so that no id is a path, and never ``.`` or ``..``."""
    key = quote(document_id, safe=" ,+=@()")
    return key.replace(".", "%2E") if set(key) == {"."} else key
