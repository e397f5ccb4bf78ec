"""Reads the headers and tensors of GGUF files, also of models that are split into several files.

Source of the format: the GGUF specification of ggml.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvr_mpi.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = 2, 3
STRING, ARRAY = 8, 9
# Formats of the other types of values.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
LENGTH = struct.Struct("<Q")
# llama.cpp's names of the files of a split model.
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a GGUF file.

    shape : as in torch, the slowest dimension first.
    kind : number of its type (gguf.GGMLQuantizationType).
    offset : of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    file: Path


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The metadata and tensors of a model, from one or several files."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path, *, reads_texts: bool = True) -> GgufModel:
    """Read the metadata and the table of tensors of a GGUF model; of all of its files, if it is split.

    reads_texts : if False, only the length of arrays of texts is read, in a fifth of the time.

    Raises `ModelError` if a file is damaged, cut short, or missing.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    files = parts_of(path)
    for number, file in enumerate(files):
        with _opened(file) as content:
            values, table = _read_header(content, file, reads_texts)
        count, own = values.get("split.count", 0), values.get("split.no", 0)
        if (max(count, 1), own) != (len(files), number):
            merged = f"{path.stem}-merged.gguf"
            raise ModelError(
                f"{file.name} is part {own + 1} of a model in {count} files, but was given as file {number + 1} of "
                f"{len(files)}: give the part named NAME-00001-of-{count:05}.gguf, with the others beside it, or merge "
                f"them with `llama-gguf-split --merge FIRST_PART {merged}`"
            )
        metadata = metadata or values
        if repeated := sorted({tensor.name for tensor in table} & tensors.keys()):
            raise ModelError(f"{file.name} contains tensors that an earlier part has, too: {repeated[0]}")
        tensors |= {tensor.name: tensor for tensor in table}
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelError(f"{path.name}: its parts contain {len(tensors)} tensors, but it was split with {total}")
    return GgufModel(metadata, tensors)


def parts_of(path: Path) -> list[Path]:
    """Return the files of a GGUF model in order: itself, or all parts if its name is that of a part.

    Raises `ModelError` if parts are missing.
    """
    named = PART.fullmatch(path.name)
    if named is None:
        return [path]
    count = int(named["count"])
    files = [path.with_name(f"{named['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{path.name} is one of {count} files of a model, and {len(missing)} of them are not in {path.parent} "
            f"({missing[0]}): copy all parts into one folder"
        )
    return files


@contextmanager
def _opened(path: Path) -> Iterator[mmap.mmap]:
    """Map a file's content into memory."""
    with path.open("rb") as stream:
        begins = stream.read(len(MAGIC))
        if begins != MAGIC:
            raise ModelError(f"{path.name} is not a GGUF file: it begins with {begins!r}, not {MAGIC!r}")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def _read_header(content: mmap.mmap, path: Path, reads_texts: bool) -> tuple[dict[str, Any], list[GgufTensor]]:
    """Return the metadata and the table of tensors; `reads_texts` as in `read_gguf`."""
    try:
        version, tensors, keys = struct.unpack_from("<IQQ", content, len(MAGIC))
        if version not in VERSIONS:
            raise ModelError(f"{path.name} has version {version} of the GGUF format; expected 2 or 3, little-endian")
        at, metadata = len(MAGIC) + 20, dict[str, Any]()
        for _ in range(keys):
            key, at = _read_string(content, at)
            kind = struct.unpack_from("<I", content, at)[0]
            value, at = _read_value(content, at + 4, kind, reads_texts)
            if key in metadata:
                raise ModelError(f"{path.name}: the metadata key {key} stands in it twice")
            metadata[key] = value
        entries = []
        for _ in range(tensors):
            name, at = _read_string(content, at)
            dimensions = struct.unpack_from("<I", content, at)[0]
            *shape, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", content, at + 4)
            at += 4 + 8 * dimensions + 12
            entries.append((name, tuple(reversed(shape)), kind, offset))
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ModelError(f"{path.name} is damaged or cut short: its header cannot be read ({error})") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path.name}: general.alignment = {alignment!r}, expected a positive number")
    data = -(-at // alignment) * alignment
    table = [GgufTensor(name, shape, kind, data + offset, path) for name, shape, kind, offset in entries]
    if table and max(tensor.offset for tensor in table) >= len(content):
        raise ModelError(f"{path.name} is cut short: it has {len(content)} bytes, and some tensors begin after them")
    if len({tensor.name for tensor in table}) < len(table):
        raise ModelError(f"{path.name} contains two tensors of the same name")
    return metadata, table


def _read_string(content: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = LENGTH.unpack_from(content, at)
    end = at + 8 + length
    if end > len(content):
        raise struct.error(f"a text of {length} bytes at byte {at}")
    return content[at + 8 : end].decode(), end


def _read_value(content: mmap.mmap, at: int, kind: int, reads_texts: bool) -> tuple[Any, int]:
    """Return a value and where the next begins; without `reads_texts` the length of an array of strings."""
    if kind in SCALARS:
        return struct.unpack_from(SCALARS[kind], content, at)[0], at + struct.calcsize(SCALARS[kind])
    if kind == STRING:
        return _read_string(content, at)
    if kind != ARRAY:
        raise struct.error(f"a value of type {kind}")
    kind, count = struct.unpack_from("<IQ", content, at)
    at += 12
    if kind in SCALARS:
        form = f"<{count}{SCALARS[kind][1]}"
        return list(struct.unpack_from(form, content, at)), at + struct.calcsize(form)
    if kind != STRING:
        raise struct.error(f"an array of type {kind}")
    if reads_texts:
        texts = []
        for _ in range(count):
            text, at = _read_string(content, at)
            texts.append(text)
        return texts, at
    length_at = LENGTH.unpack_from
    for _ in range(count):
        at += 8 + length_at(content, at)[0]
    return count, at
