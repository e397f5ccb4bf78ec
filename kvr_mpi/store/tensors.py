"""Stored keys and values as safetensors, a file for each document, and back again.

A file has ``layer_000.keys`` and ``layer_000.values`` (tokens, kv_heads, head_dim) in the model's dtype, ``token_ids``,
and in its metadata, as JSON, what the results say of the document and of the run: nothing is lost on the way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kvr_mpi.disk import PART, create
from kvr_mpi.documents import Document
from kvr_mpi.documents.files import check_document
from kvr_mpi.errors import DataError, MissingError, OutputError
from kvr_mpi.store.folder import Index
from kvr_mpi.store.hdf5 import create_hdf5, group_in
from kvr_mpi.store.head_rows import refuse_compressed
from kvr_mpi.store.ledger import LedgerWriter
from kvr_mpi.store.merge import part_of
from kvr_mpi.store.outputs import (
    ARRAYS,
    FIELD_TYPES,
    REALS,
    Header,
    Record,
    check_record,
    key_of,
    open_file,
    read_header,
    read_record,
    start_file,
    write_record,
)
from kvr_mpi.store.parts import PartIndexes, open_whole_kv
from kvr_mpi.store.stored_kv import CachedTokens, KeysValues
from kvr_mpi.store.survey import RESULTS

if TYPE_CHECKING:
    import torch

SUFFIX, ABOUT, CHECKSUM = ".safetensors", "kvr-mpi", "xxh3_128"
# More than these no model has.
MAX_LAYERS = 10_000


def export_kv(index: Index, ids: Iterable[str], folder: Path, *, overwrite: bool = False) -> Iterator[tuple[str, Path]]:
    """Write a file for each of these documents that has keys and values; yields (id, file).

    Raises
    ------
    DataError
        If something is not what was written; the files before it are complete.
    ConfigError
        If keys and values of one are compressed.
    OutputError
        If a file cannot be written, or is there already.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    parts = PartIndexes()
    for name in ids:
        place = index.places[name]
        with open_file(place.file) as stored, ExitStack() as others:
            group = group_in(group_in(stored, "documents"), place.key)
            record, kv, header = read_record(group), open_whole_kv(group, parts, others), read_header(stored)
            refuse_compressed(kv.compression, name, "kvr export --kv")
            tensors, whose = dict(_tensors(kv.layers)), kv.tokens
        if not tensors:
            continue
        about: dict[str, Any] = {**asdict(header), "record": record.as_dict(), "text": None}
        if whose is not None:
            import torch

            tensors["token_ids"] = torch.tensor(whose.ids)
            about["text"] = list(whose.text)
        file = folder / (place.key + SUFFIX)
        if file.exists() and not overwrite:
            raise OutputError(f"{file} exists; add --overwrite, or choose another folder")
        part = file.with_name(file.name + PART)
        text = json.dumps(about)
        try:
            part.unlink(missing_ok=True)
            os.close(create(part))  # a file of our own: the library would follow a link that was planted there
            save_file(tensors, part, metadata={ABOUT: text, CHECKSUM: _checksum(text, tensors)})
            os.replace(part, file)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OutputError(f"{file} cannot be written: {error}") from error
        yield name, file


def import_kv(source: Path, folder: Path) -> list[str]:
    """Make a run of the files that `export_kv` wrote; returns the documents' ids. The folder has to be locked.

    Raises
    ------
    DataError
        If a file is damaged, none of ours, or of another run than the others.
    OutputError
        If the run cannot be written.
    """
    files = sorted(source.glob(f"*{SUFFIX}"))
    if not files:
        raise MissingError(f"{source}: no {SUFFIX} files found; expected a folder written by `kvr export --kv`")
    done: list[str] = []
    result, first = folder / RESULTS, None
    with part_of(result) as part:
        part.unlink(missing_ok=True)
        with create_hdf5(part) as merged:
            for file in files:
                header, record, layers, tokens = _read(file)
                if first is None:
                    first = header
                    start_file(merged, header)
                if header.identity != first.identity:
                    raise DataError(f"{file} is from another run than {files[0]}; import them separately")
                if record.id in done:
                    raise DataError(f"{file}: document {record.id!r} is also in an earlier file")
                write_record(merged, record, layers, tokens)
                check_record(group_in(group_in(merged, "documents"), key_of(record.id)))
                done.append(record.id)
        LedgerWriter(folder, "imported").publish(result, done, {}, {})
    return done


def _checksum(about: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash a file's words and tensors: safetensors has no checksum of its own, and a flipped bit would go unseen."""
    import torch

    digest = xxhash.xxh3_128(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(layers: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for layer in layers:
        keys, values = layer.read()
        yield f"layer_{layer.number:03d}.keys", keys.contiguous()
        yield f"layer_{layer.number:03d}.values", values.contiguous()


def _read(file: Path) -> tuple[Header, Record, list[KeysValues | None], CachedTokens | None]:
    """Read a file that anybody may have written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            metadata = stored.metadata() or {}
            about = json.loads(metadata[ABOUT])
            header = Header(dict(about["identity"]), dict(about["model"]))
            record = _record(about["record"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  it is no mapping
            if metadata[CHECKSUM] != _checksum(metadata[ABOUT], tensors):
                raise ValueError("it differs from what was written (checksum)")
            numbers = sorted({int(name[6:].partition(".")[0]) for name in tensors if name.startswith("layer_")})
            if numbers and not 0 <= numbers[0] <= numbers[-1] < MAX_LAYERS:
                raise ValueError(f"it has a layer {numbers[-1]}")
            layers: list[KeysValues | None] = [None] * (max(numbers, default=-1) + 1)
            for number in numbers:
                keys, values = (tensors[f"layer_{number:03d}.{kind}"] for kind in ("keys", "values"))
                if keys.ndim != 3 or values.ndim != 3 or len(keys) != len(values) or not keys.is_floating_point():
                    raise ValueError(f"layer {number} has keys {tuple(keys.shape)}, values {tuple(values.shape)}")
                layers[number] = (keys, values)
            tokens = None
            if about["text"] is not None:
                start, stop = map(int, about["text"])
                tokens = CachedTokens(tuple(tensors["token_ids"].tolist()), (start, stop))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is damaged, or was not written by `kvr export --kv`: {error}") from error
    return header, record, layers, tokens


def _record(values: dict[str, Any]) -> Record:
    """Make a record of what JSON says, every field of its type."""
    found: dict[str, Any] = {}
    for spec in fields(Record):
        if spec.name in values:
            value, kind = values[spec.name], float if spec.name in REALS else int
            found[spec.name] = tuple(map(kind, value)) if spec.name in ARRAYS else FIELD_TYPES[str(spec.type)](value)
    record = Record(**found)
    wrong = check_document(Document(record.id, "text")).error
    if wrong or record.status != "done":
        raise ValueError(wrong or f"its status is {record.status!r}; expected done")
    return record
