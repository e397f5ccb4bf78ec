"""Keys and values that every rank wrote of its own tokens: a run's folder ``parts``, until a merge puts them together.

    RUN/shard-...h5, ledger-...       records, each with the keys and values of the last rank's tokens
    RUN/parts/shard-...h5, ledger-... the other ranks': a record for each, named by document and tokens

A part is written, made durable, checked and read as any record is. A document is done when its record and all parts of
it are there. What a merge makes of them does not know how prompts were cut.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvr_mpi.errors import DataError
from kvr_mpi.store.arrays import join
from kvr_mpi.store.folder import Index, clear_results, index_run, run_files
from kvr_mpi.store.hdf5 import explained, group_in, hold_open
from kvr_mpi.store.kv import CachedTokens, Contents, StoredKV, StoredLayer, open_kv
from kvr_mpi.store.outputs import Record, check_record, open_file, read_record

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


def bounds_before(record: Record, first_token: int) -> list[tuple[int, int]]:
    """List the bounds of the parts of a document whose record has the tokens from the first one on."""
    return [(start, stop) for start, stop in itertools.pairwise(record.slices) if start < first_token]


def index_parts(folder: Path) -> Index:
    """Say where the parts of a run's folder are; empty if it has none.

    Raises
    ------
    DataError
        If a file of them is damaged.
    """
    parts = folder / PARTS
    return index_run(parts, verify=True) if run_files(parts) else Index({})


def incomplete(folder: Path, done: Iterable[str], parts: Iterable[str]) -> set[str]:
    """Find the documents that are done, but for parts that are not there.

    Parameters
    ----------
    done : iterable of str
        Ids of documents with a record.
    parts : iterable of str
        Ids of the parts that are there.
    """
    index, there = index_run(folder), set(parts)
    wanted, found = set(done), set[str]()
    for file, places in index.by_file().items():
        with open_file(file) as stored:
            documents = group_in(stored, "documents")
            for name in wanted & places.keys():
                group = group_in(documents, places[name].key)
                wanted_parts = bounds_before(read_record(group), open_kv(group).first_token)
                if any(part_id(name, start, stop) not in there for start, stop in wanted_parts):
                    found.add(name)
    return found


@dataclass(frozen=True, slots=True)
class Parts:
    """A document's parts, in files that are open as long as `stack` is."""

    stored: tuple[StoredKV, ...]

    def layers(self) -> Iterator[Contents | None]:
        """Yield each layer's keys and values, all tokens', each block held against its digest."""
        by_number: list[dict[int, StoredLayer]] = [{layer.number: layer for layer in one.layers} for one in self.stored]
        for number in range(max(by_number[-1], default=-1) + 1):
            if number not in by_number[-1]:
                yield None
                continue
            pairs = [layers[number].contents() for layers in by_number]
            keys, values = (join([pair[place] for pair in pairs]) for place in (0, 1))
            yield keys, values


def open_parts(group: Any, record: Record, index: Index, stack: ExitStack) -> Parts:
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
    return Parts((*found, last))


def whole_tokens(last: StoredKV) -> CachedTokens:
    """Say whose keys and values they are, once the parts are put together."""
    assert last.tokens is not None, "it says where it begins"
    return replace(last.tokens, first=0)


def _open_part(record: Record, start: int, stop: int, index: Index, stack: ExitStack) -> StoredKV:
    name = part_id(record.id, start, stop)
    if name not in index.places:
        raise DataError(f"{record.id}: its keys and values of tokens {start} to {stop} are missing")
    place = index.places[name]
    file = hold_open(place.file)
    stack.callback(file.close)
    with explained(place.file):
        group = group_in(group_in(file, "documents"), place.key)
        part = check_record(group)
        told, wanted = (part.document, part.prompt_sha256), (record.id, record.prompt_sha256)
        stored = open_kv(group)
        if told != wanted or stored.first_token != start:
            raise DataError(f"{place.file}:{group.name} is of another prompt, or of other tokens, than {name!r}")
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
