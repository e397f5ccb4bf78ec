"""Keys and values that every rank wrote of its own tokens: a run's folder ``parts``, until a merge puts them together.

    RUN/shard-...h5, ledger-...       records, each with the keys and values of the last rank's tokens
    RUN/parts/shard-...h5, ledger-... the other ranks': a record for each, named by document, tokens and heads

In a tensor-parallel group each rank has some KV heads of its slice, and the record those of the group's first rank;
where several have the same, one writes them. A part is written, made durable, checked and read as any record is. A
document is done when its record and all parts of it are there. Whoever reads a document's keys and values reads them as
one (`open_whole_kv`), from its parts or from what a merge has made of them, which does not know how prompts were cut.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvr_mpi.errors import DataError
from kvr_mpi.store.folder import Index, clear_results, index_run, run_files
from kvr_mpi.store.hdf5 import explained, group_in, hold_open
from kvr_mpi.store.head_rows import join_head_rows
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.ledger import ShardLine
from kvr_mpi.store.outputs import Record, key_of, open_file, read_record
from kvr_mpi.store.stored_kv import CachedTokens, StoredKV, StoredPiece
from kvr_mpi.topology import KVHeads

PARTS = "parts"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank wrote of a document's keys and values.

    start, stop : tokens.
    heads : KV heads; None: all.
    part : id of the part that has it; empty: it is in the record's own group.
    """

    start: int
    stop: int
    heads: KVHeads | None
    part: str


def part_record(record: Record, tokens: CachedTokens) -> Record:
    """Say what a part of a document is of, that has the keys and values of these tokens from the first one on."""
    return Record(
        part_id(record.id, tokens.ids, tokens.first, tokens.heads),
        "done",
        document=record.id,
        slices=record.slices,
        document_sha256=record.document_sha256,
        prompt_sha256=record.prompt_sha256,
        prompt_tokens=record.prompt_tokens,
    )


def part_id(document_id: str, ids: Sequence[int], start: int, heads: KVHeads | None) -> str:
    """Name a part by its tokens, so that none stands for one of another attempt that was cut otherwise.

    Of some KV heads they may be an answer's, too, which may be another one after another attempt.
    """
    name = f"{document_id}/{start}-{len(ids)}"
    if heads is None:
        return name
    digest = hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]
    return f"{name}:{heads.first}-{heads.last}:{digest}"


def document_of(part: str) -> str:
    """Id of the document that a part is of, by the part's own."""
    return part.rpartition("/")[0]


def pieces_of(record: Record, own: CachedTokens | None) -> list[list[Piece]]:
    """Say what makes up a document's keys and values: of each slice, in order, the pieces of all KV heads.

    Parameters
    ----------
    record : Record
    own : CachedTokens, optional
        Those of its own group.
    """
    if own is None:
        return []
    bounds = [(start, stop) for start, stop in itertools.pairwise(record.slices) if start < own.first]
    heads = [None] if own.heads is None else own.heads.shares
    rows = [
        [Piece(start, stop, each, part_id(record.id, own.ids[:stop], start, each)) for each in heads]
        for start, stop in [*bounds, (own.first, len(own.ids))]
    ]
    rows[-1] = [replace(piece, part="") if piece.heads == own.heads else piece for piece in rows[-1]]
    return rows


def parts_of(record: Record, own: CachedTokens | None) -> list[str]:
    """List the parts that a document's keys and values need beside what is in its own group; of a part, none."""
    if record.document and record.document == document_of(record.id):
        return []
    return [piece.part for piece in itertools.chain.from_iterable(pieces_of(record, own)) if piece.part]


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
        for name, needs in (_read_needs(file, here) if line is None else line.parts).items():
            if name in here and not there.issuperset(needs):
                found.add(name)
    return found


def _read_needs(file: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """Read of some documents of a file which parts they need."""
    with open_file(file) as stored:
        documents = group_in(stored, "documents")
        groups = {name: group_in(documents, key_of(name)) for name in names}
        return {name: parts_of(read_record(group), open_kv(group).tokens) for name, group in groups.items()}


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


@contextlib.contextmanager
def open_document(file: Any, key: str, parts: PartIndexes | None = None) -> Iterator[tuple[Record, StoredKV]]:
    """Find a document's record, and all of its keys and values, for as long as the block takes.

    Parameters
    ----------
    file : h5py.File
        That is open.
    key : str
        Of the document's group.
    parts : PartIndexes, optional
        Looked up anew if left out.

    Raises
    ------
    DataError
        If the record is damaged; else as `open_whole_kv`.
    """
    with ExitStack() as others:
        group = group_in(group_in(file, "documents"), key)
        yield read_record(group), open_whole_kv(group, parts or PartIndexes(), others)


def open_whole_kv(group: Any, parts: PartIndexes, stack: ExitStack) -> StoredKV:
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
    if stored.is_whole:
        return StoredKV(((stored,),), stored.tokens)
    return open_parts(group, read_record(group), parts.beside(Path(group.file.filename)), stack)


def open_parts(group: Any, record: Record, index: Index, stack: ExitStack) -> StoredKV:
    """Find the parts of a document, one piece of which is in its record's own group.

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
    own, where = open_kv(group), f"{group.file.filename}:{group.name}"
    slices = pieces_of(record, own.tokens)
    ends = [0, *(row[0].stop for row in slices)]
    if not slices or [row[0].start for row in slices] != ends[:-1]:
        raise DataError(f"{where}: its slices {list(record.slices)} do not lead up to token {own.first_token}")
    found = []
    for row in slices:
        stored = [_open_part(record, piece, own.compression, index, stack) if piece.part else own for piece in row]
        for piece, one in zip(row, stored, strict=True):
            _check_piece(piece, one, own, where)
        found.append(tuple(stored))
    rows = {
        layers[0].number: join_head_rows([layer.rows for layer in layers if layer.rows is not None])
        for layers in zip(*(piece.layers for piece in found[0]), strict=True)
    }
    kept = {number: each for number, each in rows.items() if each is not None}
    assert own.tokens is not None, "it says where it begins"
    return StoredKV(tuple(found), replace(own.tokens, first=0, heads=None, rows=kept))


def _check_piece(piece: Piece, stored: StoredPiece, own: StoredPiece, where: str) -> None:
    """Refuse a piece that has not the layers, tokens or shapes that go with the record's own."""
    about = f"{where}: its part from token {piece.start} on"
    if [layer.number for layer in stored.layers] != [layer.number for layer in own.layers]:
        raise DataError(f"{about} has different layers than the record")
    for layer, like in zip(stored.layers, own.layers, strict=True):
        shapes = (layer.keys.shape[1:], layer.values.shape[1:]), (like.keys.shape[1:], like.values.shape[1:])
        same_type = (layer.keys.type_name, layer.values.type_name) == (like.keys.type_name, like.values.type_name)
        counts_fit = like.rows is not None or layer.tokens == piece.stop - piece.start
        alike = shapes[0] == shapes[1] and same_type and (layer.rows is None) == (like.rows is None)
        if not alike or not counts_fit:
            raise DataError(
                f"{about} has {layer.tokens} tokens of {shapes[0]} in layer {layer.number}; expected "
                f"{piece.stop - piece.start} of {shapes[1]}"
            )


def _open_part(record: Record, piece: Piece, compression: str, index: Index, stack: ExitStack) -> StoredPiece:
    name = piece.part
    if name not in index.places:
        which = "" if piece.heads is None else f", KV heads {piece.heads.first} to {piece.heads.last},"
        raise DataError(f"{record.id}: its keys and values of tokens {piece.start} to {piece.stop}{which} are missing")
    place = index.places[name]
    file = hold_open(place.file)
    stack.callback(file.close)
    with explained(place.file):
        group = group_in(group_in(file, "documents"), place.key)
        part, stored = read_record(group), open_kv(group)
        told = part.document, part.prompt_sha256, stored.first_token, stored.heads, stored.compression
        if told != (record.id, record.prompt_sha256, piece.start, piece.heads, compression):
            raise DataError(f"{place.file}:{group.name} belongs to another prompt, or to other tokens, than {name!r}")
        return stored


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
