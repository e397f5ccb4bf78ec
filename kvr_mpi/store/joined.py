"""A document's keys and values in pieces, each of some tokens and of all KV heads or some, read as one (see ``parts``).

Rows of pieces follow each other as the slices do; the pieces of a row have the same tokens, and the heads of a group's
ranks, in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvr_mpi.errors import DataError
from kvr_mpi.store.arrays import StoredArray
from kvr_mpi.store.hdf5 import explained
from kvr_mpi.store.head_rows import HeadRows, join_head_rows
from kvr_mpi.store.stored_kv import CachedTokens, KeysValues, StoredKV, StoredLayer

TOKENS_DIM, HEADS_DIM = 0, 1
# First and last KV head, not included.
Heads = tuple[int, int]


@dataclass(frozen=True, slots=True)
class JoinedArray:
    """What keys or values of a layer are, that lie in several pieces; see `StoredArray`."""

    shape: tuple[int, ...]
    type_name: str


@dataclass(frozen=True, slots=True)
class JoinedLayer:
    """One layer's keys and values, in rows of pieces; read as a `StoredLayer`.

    What compression has left is in one row of pieces, whose heads have tokens of their own, one after the other.
    """

    pieces: tuple[tuple[StoredLayer, ...], ...]

    @property
    def rows(self) -> HeadRows | None:
        """Whose its rows are, if each head keeps its own tokens."""
        return join_head_rows([piece.rows for piece in self.pieces[0] if piece.rows is not None])

    @property
    def number(self) -> int:
        """Of the layer."""
        return self.pieces[0][0].number

    @property
    def tokens(self) -> int:
        """Tokens it has keys and values of."""
        rows = self.rows
        return sum(row[0].tokens for row in self.pieces) if rows is None else len(rows.positions)

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return sum(piece.bytes for row in self.pieces for piece in row)

    @property
    def keys(self) -> JoinedArray:
        """What they are."""
        return self._array([[piece.keys for piece in row] for row in self.pieces])

    @property
    def values(self) -> JoinedArray:
        """What they are."""
        return self._array([[piece.values for piece in row] for row in self.pieces])

    def read(self, first: int = 0, last: int | None = None, heads: Heads | None = None) -> KeysValues:
        """Read a range of tokens, as `StoredLayer.read`, of all KV heads or some: of these only the pieces are read."""
        import torch

        stop, at, found = self.tokens if last is None else last, 0, []
        if not 0 <= first <= stop <= self.tokens:
            raise DataError(f"layer {self.number} has {self.tokens} tokens; {first} to {stop} were asked for")
        if self.rows is not None:
            assert heads is None, "whoever reads some heads of compressed layers takes their rows"
            return _read_rows(self.pieces[0], first, stop)
        for row in self.pieces:
            start, end = max(first - at, 0), min(stop - at, row[0].tokens)
            if start < end:
                found.append(_read_row(row, start, end, heads))
            at += row[0].tokens
        found = found or [_read_row(self.pieces[0], 0, 0, heads)]
        keys, values = (torch.cat(each, TOKENS_DIM) for each in zip(*found, strict=True))
        return keys, values

    def check(self) -> None:
        """Hold all of it against its checksums; see `StoredLayer.check`."""
        for row in self.pieces:
            for piece in row:
                with explained(_file_of(piece)):
                    piece.check()

    def _array(self, rows: Sequence[Sequence[StoredArray]]) -> JoinedArray:
        heads = 1 if self.rows is not None else sum(array.shape[1] for array in rows[0])
        return JoinedArray((self.tokens, heads, *rows[0][0].shape[2:]), rows[0][0].type_name)


@dataclass(frozen=True, slots=True)
class JoinedKV:
    """A document's keys and values, all tokens' and all heads', in files that are open; read as a `StoredKV`.

    stored : what each rank wrote, in rows; `own` is in the record's own group.
    """

    stored: tuple[tuple[StoredKV, ...], ...]
    own: StoredKV

    @property
    def compression(self) -> str:
        """By which method and settings heads have dropped tokens; empty: they hold all."""
        return self.own.compression

    @property
    def tokens(self) -> CachedTokens:
        """Whose they are."""
        tokens = self.own.tokens
        assert tokens is not None, "it says where it begins"
        rows = {layer.number: layer.rows for layer in self.layers}
        kept = {number: each for number, each in rows.items() if each is not None}
        return replace(tokens, first=0, heads=None, rows=kept)

    @property
    def layers(self) -> tuple[JoinedLayer, ...]:
        """All layers that have keys and values, in order."""
        rows = [list(zip(*(one.layers for one in row), strict=True)) for row in self.stored]
        return tuple(JoinedLayer(pieces) for pieces in zip(*rows, strict=True))

    @property
    def bytes(self) -> int:
        """Of all layers."""
        return sum(one.bytes for one in self._pieces)

    def check(self) -> None:
        """Hold all of it against its checksums; see `StoredLayer.check`."""
        for layer in self.layers:
            layer.check()

    def seal(self) -> str:
        """Hash of everything but keys and values themselves; see `StoredKV.seal`."""
        return hashlib.sha256("".join(one.seal() for one in self._pieces).encode()).hexdigest()

    def read_layers(self) -> Iterator[KeysValues | None]:
        """Read one layer after the other; None for one that has no keys and values."""
        layers = {layer.number: layer for layer in self.layers}
        for number in range(max(layers, default=-1) + 1):
            yield layers[number].read() if number in layers else None

    @property
    def _pieces(self) -> list[StoredKV]:
        return [one for row in self.stored for one in row]


def read_layer(layer: StoredLayer | JoinedLayer, first: int, last: int, heads: Heads | None) -> KeysValues:
    """Read a range of tokens, as `StoredLayer.read`, of all KV heads or some."""
    return _read_row((layer,), first, last, heads) if isinstance(layer, StoredLayer) else layer.read(first, last, heads)


def _read_row(row: Sequence[StoredLayer], first: int, last: int, heads: Heads | None) -> KeysValues:
    """Read some tokens of the pieces of a row, of the heads that are wanted; digests are of all heads of a piece."""
    import torch

    found, at = [], 0
    for piece in row:
        count = piece.keys.shape[HEADS_DIM]
        start, end = (0, count) if heads is None else (max(heads[0] - at, 0), min(heads[1] - at, count))
        if start < end:
            with explained(_file_of(piece)):
                found.append([each[:, start:end] for each in piece.read(first, last)])
        at += count
    keys, values = (torch.cat(each, HEADS_DIM) for each in zip(*found, strict=True))
    return keys, values


def _read_rows(row: Sequence[StoredLayer], first: int, last: int) -> KeysValues:
    """Read a range of rows of pieces whose heads, and their rows, follow each other."""
    import torch

    found, at = [], 0
    for piece in row:
        with explained(_file_of(piece)):
            found.append(piece.read(min(max(first - at, 0), piece.tokens), min(max(last - at, 0), piece.tokens)))
        at += piece.tokens
    keys, values = (torch.cat(each, TOKENS_DIM) for each in zip(*found, strict=True))
    return keys, values


def _file_of(layer: StoredLayer) -> Path:
    return Path(layer.keys.data.file.filename)
