"""A document's keys and values: in one piece, or in pieces that several ranks wrote, read as one.

A rank stores the keys and values of its own tokens; in a tensor-parallel group, of its own KV heads. A record lists the
ids of all pieces that it needs. An id names the document, tokens and heads, and has a digest of the prompt and the
tokens, so that a piece from another attempt is never used. ``results.h5`` stores a document as one piece.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvr_mpi.disk import read_whole
from kvr_mpi.errors import DataError
from kvr_mpi.store.hdf5 import group_in, hdf5_errors, type_name
from kvr_mpi.store.kv import CachedTokens, HeadRows, KeysValues, StoredLayer, StoredPiece, open_kv
from kvr_mpi.store.record import Record
from kvr_mpi.store.volumes import KV, key_of, open_volume
from kvr_mpi.topology import KVHeads

TOKENS_DIM, HEADS_DIM = 0, 1


@dataclass(frozen=True, slots=True)
class Piece:
    """The location and contents of a piece.

    id : of `piece_id`.
    path : the volume.
    bytes : size of keys and values.
    sha256 : hash of `StoredPiece.seal`.
    """

    id: str
    path: str
    bytes: int
    sha256: str


def check_pieces(path: Path, pieces: Iterable[Piece]) -> dict[Piece, str]:
    """Verify all checksums of pieces in a volume; return the damaged ones, with the damage.

    Raises `DataError` if the whole file is damaged, and other errors of `read_whole`.
    """

    def check() -> dict[Piece, str]:
        damaged: dict[Piece, str] = {}
        with open_volume(path) as file:
            kv = group_in(file, KV)
            for piece in pieces:
                try:
                    with hdf5_errors(path):
                        open_kv(group_in(kv, key_of(piece.id)), piece.bytes, piece.sha256).check()
                except DataError as error:
                    damaged[piece] = str(error)
        return damaged

    return read_whole(check, path)


def verify_written(path: Path, pieces: Mapping[str, tuple[int, str]]) -> None:
    """Read a complete, synced volume again before it is used; raise `OSError` unless it has what was written.

    pieces : bytes and hash of each piece, by id.
    """
    try:
        damaged = check_pieces(path, [Piece(name, str(path), *of) for name, of in pieces.items()])
    except DataError as error:
        raise OSError(errno.EIO, f"it differs from what was written: {error}", str(path)) from error
    for why in damaged.values():
        raise OSError(errno.EIO, f"it differs from what was written: {why}", str(path))


def seal_pieces(pieces: Sequence[Piece]) -> str:
    """Combine the hashes of a document's pieces; empty if there are none."""
    seals = "".join(piece.sha256 for piece in pieces)
    return seals if len(pieces) < 2 else hashlib.sha256(seals.encode()).hexdigest()


def piece_id(record: Record, tokens: CachedTokens | None) -> str:
    """Return the id of a rank's part of a document; tokens are None if unknown."""
    ids, first, heads = ([], 0, None) if tokens is None else (list(tokens.ids), tokens.first, tokens.heads)
    digest = hashlib.sha256(json.dumps([record.prompt_sha256, ids]).encode()).hexdigest()[:16]
    of = "" if heads is None else f"{heads.first}-{heads.last}:"
    return f"{record.id}/{first}-{len(ids)}:{of}{digest}"


def piece_ids(record: Record, own: CachedTokens | None) -> list[str]:
    """Return the ids of all pieces of a document, in order; the record's slices are the ranks' token ranges.

    `own` are the tokens of the piece stored by the rank that writes the record.
    """
    if own is None:
        return [piece_id(record, None)]
    bounds = [(start, stop) for start, stop in itertools.pairwise(record.slices) if start < own.first]
    heads = [None] if own.heads is None else own.heads.shares
    return [
        piece_id(record, replace(own, ids=own.ids[:stop], first=start, heads=each))
        for start, stop in [*bounds, (own.first, len(own.ids))]
        for each in heads
    ]


@dataclass(frozen=True, slots=True)
class StoredKV:
    """A document's keys and values, of all tokens and heads, in open files.

    pieces : one piece per rank. Rows follow each other as the slices do; the pieces of a row have the same tokens, and
        the KV heads of a tensor-parallel group's ranks, in order.
    tokens : their tokens; None if the file does not record them.
    files : the open files; they are closed no later than the last reference to this object is deleted.
    """

    pieces: tuple[tuple[StoredPiece, ...], ...]
    tokens: CachedTokens | None
    files: ExitStack

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self.files.close()

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers that have keys and values, in order."""
        return tuple(layer.number for layer in self.pieces[0][0].layers)

    @property
    def compression(self) -> str:
        """Method and settings of compression; empty if all tokens are kept."""
        return "" if self.tokens is None else self.tokens.compression

    def rows(self, layer: int) -> HeadRows | None:
        """Return the tokens that each head of a layer keeps; None unless the document is compressed."""
        return None if self.tokens is None else self.tokens.rows.get(layer)

    def format(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """Return the shapes (tokens, kv_heads, head_dim) of a layer's keys and values, and their dtype.

        If each head keeps its own tokens, the shapes are (rows, 1, head_dim).
        """
        pieces, rows = self._of_layer(layer), self.rows(layer)
        some = pieces[0][0]
        tokens = sum(row[0].tokens for row in pieces) if rows is None else len(rows.positions)
        heads = sum(piece.keys.shape[1] for piece in pieces[0]) if rows is None else 1
        keys, values = ((tokens, heads, *array.shape[2:]) for array in (some.keys, some.values))
        return keys, values, type_name(some.keys)

    def read(
        self, layer: int, first: int = 0, last: int | None = None, heads: tuple[int, int] | None = None
    ) -> KeysValues:
        """Read a layer's keys and values of a range of tokens, without conversion, each (tokens, kv_heads, head_dim).

        Only pieces that overlap the range are read. Raises `DataError` if a block is damaged, or the dtype is not one
        that keys and values have.

        layer : one of `layers`.
        first, last : range of tokens, or of rows if each head keeps its own tokens. `last` is exclusive; None: to the
            end.
        heads : range of KV heads, the last exclusive; None: all. Not for layers where each head keeps its own tokens.
        """
        grid = self._of_layer(layer)
        if self.rows(layer) is not None:  # one row of pieces, whose heads are stored one after the other
            assert heads is None, "some heads of a compressed layer are read by their rows"
            grid = [[one] for one in grid[0]]
        tokens = sum(row[0].tokens for row in grid)
        stop, at, found = tokens if last is None else last, 0, []
        if not 0 <= first <= stop <= tokens:
            raise DataError(f"layer {layer} has {tokens} tokens; {first} to {stop} were requested")
        for row in grid:
            start, end = max(first - at, 0), min(stop - at, row[0].tokens)
            if start < end:
                found.append(_read_row(row, start, end, heads))
            at += row[0].tokens
        return _concatenated(found or [_read_row(grid[0], 0, 0, heads)], TOKENS_DIM)

    def check(self) -> None:
        """Verify all checksums, a piece at a time; see `StoredPiece.check`."""
        for piece in itertools.chain.from_iterable(self.pieces):
            piece.check()

    def _of_layer(self, layer: int) -> list[list[StoredLayer]]:
        index = self.layers.index(layer)
        return [[piece.layers[index] for piece in row] for row in self.pieces]


def _read_row(row: Sequence[StoredLayer], first: int, last: int, heads: tuple[int, int] | None) -> KeysValues:
    """Read some tokens and heads of adjacent pieces; digests cover all heads of a piece."""
    found, at = [], 0
    for layer in row:
        count = layer.keys.shape[HEADS_DIM]
        start, end = (0, count) if heads is None else (max(heads[0] - at, 0), min(heads[1] - at, count))
        if start < end:
            keys, values = layer.read(first, last)
            found.append((keys[:, start:end], values[:, start:end]))
        at += count
    return _concatenated(found, HEADS_DIM)


def _concatenated(parts: Sequence[KeysValues], dim: int) -> KeysValues:
    if len(parts) == 1:
        return parts[0]
    import torch

    keys, values = (torch.cat(each, dim) for each in zip(*parts, strict=True))
    return keys, values


def open_pieces(name: str, pieces: Sequence[Piece], *, is_part: bool = False) -> StoredKV:
    """Open all pieces of a document's keys and values; data are read later.

    With `is_part`, a single piece is read as it is, even if it is not a whole document. Raises `DataError`, which
    begins with `name`, if a piece is damaged, or the pieces do not fit together.
    """

    def open_all() -> StoredKV:
        files: dict[Path, Any] = {}
        found = []
        with ExitStack() as stack:
            for piece in pieces:
                path = Path(piece.path)
                with hdf5_errors(path):
                    if path not in files:
                        files[path] = stack.enter_context(open_volume(path))
                    group = group_in(group_in(files[path], KV), key_of(piece.id))
                    found.append(open_kv(group, piece.bytes, piece.sha256))
            rows, tokens = (((found[0],),), found[0].tokens) if is_part else _join(name, found)
            return StoredKV(rows, tokens, stack.pop_all())

    return read_whole(open_all, Path(pieces[0].path) if pieces else Path(name))


def _join(name: str, found: Sequence[StoredPiece]) -> tuple[tuple[tuple[StoredPiece, ...], ...], CachedTokens | None]:
    """Arrange pieces in rows by tokens, each by heads; also return the tokens of the whole document.

    Raises `DataError` if tokens or heads are missing, or the pieces have different prompts, layers or dtypes.
    """
    if not found:
        return ((StoredPiece(),),), None
    known = [(piece.tokens, piece) for piece in found if piece.tokens is not None]
    if len(found) == 1 and not any(tokens.first or tokens.heads is not None for tokens, _ in known):
        return ((found[0],),), found[0].tokens
    if len(known) != len(found):
        raise DataError(f"{name}: its keys and values are in pieces that do not record their tokens")
    known.sort(key=lambda one: (one[0].first, 0 if one[0].heads is None else one[0].heads.first))
    rows = [[*row] for _, row in itertools.groupby(known, key=lambda one: (one[0].first, len(one[0].ids)))]
    whole, like = rows[-1][-1]
    starts, stops = [row[0][0].first for row in rows], [len(row[0][0].ids) for row in rows]
    if starts != [0, *stops[:-1]]:
        raise DataError(
            f"{name}: its keys and values begin at the tokens {starts} and end at {stops}; some are missing"
        )
    for tokens, piece in known:
        about, count = f"{name}: its keys and values from token {tokens.first} on", len(tokens.ids) - tokens.first
        if list(tokens.ids) != list(whole.ids[: len(tokens.ids)]) or tokens.compression != whole.compression:
            raise DataError(f"{about} belong to another prompt")
        kinds = ([_kind(layer) for layer in each.layers] for each in (piece, like))
        for here, there in itertools.zip_longest(*kinds):
            if here != there:
                raise DataError(f"{about} have the layer {here}; expected {there}")
        if wrong := [layer.tokens for layer in piece.layers if layer.rows is None and layer.tokens != count]:
            raise DataError(f"{about} have {wrong[0]} tokens; expected {count}")
    for row in rows:
        heads: list[KVHeads | None] = [tokens.heads for tokens, _ in row]
        if heads != ([None] if heads[0] is None else list(heads[0].shares)):
            raise DataError(f"{name}: KV heads are missing for its tokens from {row[0][0].first} on")
    kept: dict[int, HeadRows] = {}
    for layers in zip(*(piece.layers for _, piece in rows[0]), strict=True):
        if some := [layer.rows for layer in layers if layer.rows is not None]:
            counts = itertools.chain.from_iterable(one.counts for one in some)
            kept[layers[0].number] = HeadRows(tuple(counts), np.concatenate([one.positions for one in some]))
    return tuple(tuple(piece for _, piece in row) for row in rows), replace(whole, first=0, heads=None, rows=kept)


def _kind(layer: StoredLayer) -> tuple[Any, ...]:
    """Return what the layers of all pieces have in common: number, shapes of a token, dtypes, whether compressed."""
    arrays = layer.keys, layer.values
    return layer.number, *(one.shape[1:] for one in arrays), *map(type_name, arrays), layer.rows is not None
