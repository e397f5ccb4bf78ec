"""Keys and values that every rank wrote of its own tokens: a run's folder ``parts``, until a merge puts them together.

    RUN/shard-...h5, ledger-...       records, each with the keys and values of the last rank's tokens
    RUN/parts/shard-...h5, ledger-... the other ranks': a record for each, named by document and tokens

A part is written, made durable, checked and read as any record is. A document is done when its record and all parts of
it are there. Whoever reads a document's keys and values reads them as one (`open_whole_kv`), from its parts or from
what a merge has made of them, which does not know how prompts were cut.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvr_mpi.errors import DataError
from kvr_mpi.store.arrays import StoredArray, join
from kvr_mpi.store.folder import Index, clear_results, index_run, run_files
from kvr_mpi.store.hdf5 import explained, group_in, hold_open
from kvr_mpi.store.kv import CachedTokens, Contents, KeysValues, StoredKV, StoredLayer, open_kv
from kvr_mpi.store.ledger import ShardLine
from kvr_mpi.store.outputs import Record, key_of, open_file, read_record

PARTS = "parts"


def part_record(record: Record, start: int, stop: int) -> Record:
    """Say what a part of a document is of, that has the tokens between two."""
    return Record(
        part_id(record.id, start, stop),
        "done",
        document=record.id,
        slices=record.slices,
        document_sha256=record.document_sha256,
        prompt_sha256=record.prompt_sha256,
        prompt_tokens=record.prompt_tokens,
    )


def part_id(document_id: str, start: int, stop: int) -> str:
    """Name a part by its tokens, so that none stands for one of another attempt that was cut otherwise."""
    return f"{document_id}/{start}-{stop}"


def document_of(part: str) -> str:
    """Id of the document that a part is of, by the part's own."""
    return part.rpartition("/")[0]


def bounds_before(record: Record, first_token: int) -> list[tuple[int, int]]:
    """List the bounds of the parts of a document whose record has the tokens from the first one on."""
    return [(start, stop) for start, stop in itertools.pairwise(record.slices) if start < first_token]


def edges_before(record: Record, first_token: int) -> list[int]:
    """Say where the parts of a document begin and end; empty if it has none, or is one."""
    bounds = [] if record.document and record.document == document_of(record.id) else bounds_before(record, first_token)
    return [*(start for start, _ in bounds[:1]), *(stop for _, stop in bounds)]


def index_parts(folder: Path) -> Index:
    """Say where the parts of a run's folder are; empty if it has none.

    Raises
    ------
    DataError
        If a file of them is damaged.
    """
    parts = folder / PARTS
    return index_run(parts, verify=True) if run_files(parts) else Index({})


def incomplete(folder: Path, done: Iterable[str], parts: Iterable[str], lines: Mapping[str, ShardLine]) -> set[str]:
    """Find the documents that are done, but for parts that are not there.

    Parameters
    ----------
    done : iterable of str
        Ids of documents with a record.
    parts : iterable of str
        Ids of the parts that are there.
    lines : mapping
        What the ledger says of the folder's files, by name, as far as that is believed; others are read.
    """
    index, there = index_run(folder), set(parts)
    wanted, found = set(done), set[str]()
    for file, places in index.by_file().items():
        here, line = wanted & places.keys(), lines.get(file.name)
        edges = line.parts if line is not None else None
        for name, cuts in (_read_edges(file, here) if edges is None else edges).items():
            if name in here and any(part_id(name, *bounds) not in there for bounds in itertools.pairwise(cuts)):
                found.add(name)
    return found


def _read_edges(file: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Read of some documents of a file where their parts begin and end."""
    with open_file(file) as stored:
        documents = group_in(stored, "documents")
        groups = {name: group_in(documents, key_of(name)) for name in names}
        return {name: edges_before(read_record(group), open_kv(group).first_token) for name, group in groups.items()}


@dataclass(frozen=True, slots=True)
class JoinedArray:
    """What keys or values of a layer are, that lie in several pieces; see `StoredArray`."""

    shape: tuple[int, ...]
    type_name: str
    error: float


@dataclass(frozen=True, slots=True)
class JoinedLayer:
    """One layer's keys and values, of which each piece has some tokens; read as a `StoredLayer`."""

    pieces: tuple[StoredLayer, ...]
    rows: None = None  # of heads with tokens of their own: those are never in pieces

    @property
    def number(self) -> int:
        """Of the layer."""
        return self.pieces[0].number

    @property
    def tokens(self) -> int:
        """Tokens it has keys and values of."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return sum(piece.bytes for piece in self.pieces)

    @property
    def keys(self) -> JoinedArray:
        """What they are."""
        return self._array([piece.keys for piece in self.pieces])

    @property
    def values(self) -> JoinedArray:
        """What they are."""
        return self._array([piece.values for piece in self.pieces])

    def read(self, first: int = 0, last: int | None = None) -> KeysValues:
        """Read a range of tokens; see `StoredLayer.read`."""
        import torch

        stop, at, wanted = self.tokens if last is None else last, 0, []
        if not 0 <= first <= stop <= self.tokens:
            raise DataError(f"layer {self.number} has {self.tokens} tokens; {first} to {stop} were asked for")
        for piece in self.pieces:
            start, end = max(first - at, 0), min(stop - at, piece.tokens)
            if start < end:
                wanted.append((piece, start, end))
            at += piece.tokens
        found = []
        for piece, start, end in wanted or [(self.pieces[0], 0, 0)]:
            with explained(_file_of(piece)):
                found.append(piece.read(start, end))
        keys, values = (torch.cat(each) for each in zip(*found, strict=True))
        return keys, values

    def contents(self) -> Contents:
        """Read all of it as it was written, in 8 bits if it is; raises as `read`."""
        pairs = []
        for piece in self.pieces:
            with explained(_file_of(piece)):
                pairs.append(piece.contents())
        keys, values = (join([pair[place] for pair in pairs]) for place in (0, 1))
        return keys, values

    def check(self) -> None:
        """Hold all of it against its checksums; see `StoredLayer.check`."""
        for piece in self.pieces:
            with explained(_file_of(piece)):
                piece.check()

    def _array(self, arrays: Sequence[StoredArray]) -> JoinedArray:
        error = max(array.error for array in arrays)
        return JoinedArray((self.tokens, *arrays[0].shape[1:]), arrays[0].type_name, error)


@dataclass(frozen=True, slots=True)
class JoinedKV:
    """A document's keys and values, all tokens', in files that are open; read as a `StoredKV`.

    stored : what each rank wrote, in the order of the tokens; the last is in the record's own group.
    """

    stored: tuple[StoredKV, ...]
    compression: str = ""  # what is compressed is never in pieces

    @property
    def tokens(self) -> CachedTokens:
        """Whose they are."""
        tokens = self.stored[-1].tokens
        assert tokens is not None, "it says where it begins"
        return replace(tokens, first=0)

    @property
    def layers(self) -> tuple[JoinedLayer, ...]:
        """All layers that have keys and values, in order."""
        return tuple(JoinedLayer(pieces) for pieces in zip(*(one.layers for one in self.stored), strict=True))

    @property
    def error_of_8_bits(self) -> float:
        """Largest of all pieces'; see `StoredKV.error_of_8_bits`."""
        return max(one.error_of_8_bits for one in self.stored)

    @property
    def is_compressed(self) -> bool:
        """Whether some take less in their files, by Blosc2."""
        return any(one.is_compressed for one in self.stored)

    @property
    def bytes(self) -> int:
        """Of all layers."""
        return sum(one.bytes for one in self.stored)

    def check(self) -> None:
        """Hold all of it against its checksums; see `StoredLayer.check`."""
        for layer in self.layers:
            layer.check()

    def seal(self) -> str:
        """Hash of everything but keys and values themselves; see `StoredKV.seal`."""
        return hashlib.sha256("".join(one.seal() for one in self.stored).encode()).hexdigest()

    def contents(self) -> Iterator[Contents | None]:
        """Yield each layer's keys and values as they were written, each block held against its digest."""
        layers = {layer.number: layer for layer in self.layers}
        for number in range(max(layers, default=-1) + 1):
            yield layers[number].contents() if number in layers else None


WholeKV = StoredKV | JoinedKV
WholeLayer = StoredLayer | JoinedLayer


class PartIndexes:
    """Where the parts of runs are, looked up when the first one of a run is asked for."""

    def __init__(self) -> None:
        self._found: dict[Path, Index] = {}

    def beside(self, file: Path) -> Index:
        """Say where the parts are of the run that a file is of; damaged files of them are passed over.

        Raises
        ------
        DataError
            If its parts cannot be listed.
        """
        parts = file.parent / PARTS
        if parts not in self._found:
            there = bool(run_files(parts)) and not parts.is_symlink()
            self._found[parts] = index_run(parts, passes_damaged=True) if there else Index({})
        return self._found[parts]


def open_whole_kv(group: Any, parts: PartIndexes, stack: ExitStack) -> WholeKV:
    """Find all of a document's keys and values, wherever its ranks wrote them; nothing of them is read yet.

    Parameters
    ----------
    group : h5py.Group
        The document's.
    stack : ExitStack
        Closes what is opened.

    Raises
    ------
    DataError
        If they are anything else than announced, or a part is missing, of another prompt, or does not fit.
    """
    stored = open_kv(group)
    if not stored.first_token:
        return stored
    return open_parts(group, read_record(group), parts.beside(Path(group.file.filename)), stack)


def open_parts(group: Any, record: Record, index: Index, stack: ExitStack) -> JoinedKV:
    """Find the parts of a document, whose last one is in its record's own group.

    Parameters
    ----------
    group : h5py.Group
        The record's.
    index : Index
        Of `index_parts`.
    stack : ExitStack
        Closes what is opened.

    Raises
    ------
    DataError
        If one is missing or damaged, of another prompt, or they do not fit together.
    """
    last = open_kv(group)
    bounds = bounds_before(record, last.first_token)
    found = [_open_part(record, start, stop, index, stack) for start, stop in bounds]
    where = f"{group.file.filename}:{group.name}"
    numbers = [layer.number for layer in last.layers]
    if not bounds or bounds[0][0] or bounds[-1][1] != last.first_token:
        raise DataError(f"{where}: its slices {list(record.slices)} do not lead up to token {last.first_token}")
    for (start, stop), part in zip(bounds, found, strict=True):
        if [layer.number for layer in part.layers] != numbers:
            raise DataError(f"{where}: its part from token {start} on has other layers than the record")
        for layer, own in zip(part.layers, last.layers, strict=True):
            shapes = (layer.keys.shape[1:], layer.values.shape[1:]), (own.keys.shape[1:], own.values.shape[1:])
            same_type = (layer.keys.type_name, layer.values.type_name) == (own.keys.type_name, own.values.type_name)
            if layer.tokens != stop - start or shapes[0] != shapes[1] or not same_type:
                raise DataError(
                    f"{where}: its part from token {start} on has {layer.tokens} tokens of {shapes[0]} in layer "
                    f"{layer.number}; expected {stop - start} of {shapes[1]}"
                )
    return JoinedKV((*found, last))


def _open_part(record: Record, start: int, stop: int, index: Index, stack: ExitStack) -> StoredKV:
    name = part_id(record.id, start, stop)
    if name not in index.places:
        raise DataError(f"{record.id}: its keys and values of tokens {start} to {stop} are missing")
    place = index.places[name]
    file = hold_open(place.file)
    stack.callback(file.close)
    with explained(place.file):
        group = group_in(group_in(file, "documents"), place.key)
        part, stored = read_record(group), open_kv(group)
        told, wanted = (part.document, part.prompt_sha256), (record.id, record.prompt_sha256)
        if told != wanted or stored.first_token != start:
            raise DataError(f"{place.file}:{group.name} is of another prompt, or of other tokens, than {name!r}")
        return stored


def _file_of(layer: StoredLayer) -> Path:
    return Path(layer.keys.data.file.filename)


def part_bytes(folder: Path) -> int:
    """Bytes of a run's parts."""
    return sum(file.stat().st_size for file in run_files(folder / PARTS))


def remove_parts(folder: Path) -> None:
    """Delete a run's parts, and nothing else: they are put together, or not wanted."""
    parts = folder / PARTS
    if not parts.is_symlink() and parts.is_dir():
        clear_results(parts)
        with contextlib.suppress(OSError):  # something else is in it
            parts.rmdir()
