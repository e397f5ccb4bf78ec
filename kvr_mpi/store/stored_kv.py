"""A document's keys and values in open files, as one piece or as the pieces of several ranks.

Blocks of tokens are verified against their digests as they are read. Module ``kv`` describes, writes and opens the
layout in a file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvr_mpi.errors import DataError
from kvr_mpi.store.arrays import Bits, as_tensor, digest_of, read_bits, type_name
from kvr_mpi.store.hdf5 import explained, size_bytes, where
from kvr_mpi.store.head_rows import HeadRows
from kvr_mpi.topology import KVHeads

if TYPE_CHECKING:
    import h5py
    import torch

KeysValues = tuple["torch.Tensor", "torch.Tensor"]
# Tokens per digest.
BLOCK_TOKENS = 256
TOKENS_DIM, HEADS_DIM = 0, 1


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The token ids of stored keys and values, and the bounds of the document's text.

    ids : the prompt, then the stored tokens of the answer.
    text : bounds of the document's text in `ids`.
    first : index of the first token whose keys and values are stored here; see ``pieces`` for earlier tokens.
    compression : method and settings with which heads dropped tokens; empty: all tokens are stored.
    rows : tokens that each head keeps, by compressed layer.
    heads : KV heads that are stored here, with tensor parallelism; None: all.
    """

    ids: Sequence[int]
    text: tuple[int, int]
    first: int = 0
    compression: str = ""
    rows: Mapping[int, HeadRows] = field(default_factory=dict)
    heads: KVHeads | None = None


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One layer's keys and values (tokens, kv_heads, head_dim) in an open file.

    digests : (blocks, 2), per `block_tokens` tokens.
    rows : head and token of each row, if each head keeps its own tokens; then "tokens" below means rows.
    """

    number: int
    keys: h5py.Dataset
    values: h5py.Dataset
    digests: Any
    block_tokens: int = BLOCK_TOKENS
    rows: HeadRows | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.keys.shape[0])

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return int(self.keys.shape[1]) if self.rows is None else len(self.rows.counts)

    @property
    def bytes(self) -> int:
        """Size of keys and values."""
        return size_bytes(self.keys) + size_bytes(self.values)

    def read(self, first: int = 0, last: int | None = None) -> KeysValues:
        """Read the keys and values of a range of tokens, without conversion, each (tokens, kv_heads, head_dim).

        Raises
        ------
        DataError
            If a block is damaged, or the dtype is not one that keys and values have.
        """
        stop = self.tokens if last is None else last
        if not 0 <= first <= stop <= self.tokens:
            raise DataError(f"{where(self.keys)} has {self.tokens} tokens; {first} to {stop} were requested")
        return as_tensor(self.keys, self._bits(0, first, stop)), as_tensor(self.values, self._bits(1, first, stop))

    def check(self) -> None:
        """Verify all checksums, block by block.

        Raises
        ------
        DataError
            If a block is damaged.
        """
        for start in range(0, self.tokens, 4 * self.block_tokens):
            self.read(start, min(start + 4 * self.block_tokens, self.tokens))

    def _bits(self, column: int, first: int, last: int) -> Bits:
        """Read a range of tokens of keys (column 0) or values (1), and verify the blocks that contain them."""
        dataset, block = (self.keys, self.values)[column], self.block_tokens
        start, stop = first // block * block, min(-(-last // block) * block, self.tokens)
        bits = read_bits(dataset, start, stop)
        for at in range(start, stop, block):
            if digest_of(bits[at - start : at - start + block]) != self.digests[at // block, column]:
                raise DataError(
                    f"{where(dataset)} is damaged: tokens {at} to {min(at + block, self.tokens)} differ from what "
                    f"was written (checksum)"
                )
        return bits[first - start : last - start]


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """One rank's part of a document's keys and values, in an open file; empty if nothing is stored.

    tokens : their tokens; None if the file does not record them.
    """

    layers: tuple[StoredLayer, ...] = ()
    tokens: CachedTokens | None = None

    @property
    def bytes(self) -> int:
        """Size of all layers."""
        return sum(layer.bytes for layer in self.layers)

    def check(self) -> None:
        """Verify all checksums; see `StoredLayer.check`."""
        for layer in self.layers:
            layer.check()

    def seal(self) -> str:
        """Hash of the metadata and digests; empty if nothing is stored."""
        if not self.layers:
            return ""
        known: list[Any] | None = None
        if (tokens := self.tokens) is not None:
            known = [list(tokens.ids), list(tokens.text), *([tokens.first] if tokens.first else [])]
            known += [tokens.compression] if tokens.compression else []
            known += [] if tokens.heads is None else [[tokens.heads.first, tokens.heads.last, tokens.heads.of]]
        return hashlib.sha256(json.dumps([known, list(map(_facts, self.layers))]).encode()).hexdigest()


class LayerFormat(NamedTuple):
    """Shapes (tokens, kv_heads, head_dim) and dtype of a layer's keys and values.

    If each head keeps its own tokens, the shapes are (rows, 1, head_dim).
    """

    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: str


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

    def format(self, layer: int) -> LayerFormat:
        """Return shapes and dtype of a layer."""
        pieces, rows = self._of_layer(layer), self.rows(layer)
        some = pieces[0][0]
        tokens = sum(row[0].tokens for row in pieces) if rows is None else len(rows.positions)
        heads = sum(piece.keys.shape[1] for piece in pieces[0]) if rows is None else 1
        keys, values = ((tokens, heads, *array.shape[2:]) for array in (some.keys, some.values))
        return LayerFormat(keys, values, type_name(some.keys))

    def read(
        self, layer: int, first: int = 0, last: int | None = None, heads: tuple[int, int] | None = None
    ) -> KeysValues:
        """Read a layer's keys and values of a range of tokens, without conversion, each (tokens, kv_heads, head_dim).

        Only pieces that overlap the range are read.

        Parameters
        ----------
        layer : int
            One of `layers`.
        first, last : int
            Range of tokens, or of rows if each head keeps its own tokens. `last` is exclusive; None: to the end.
        heads : (int, int), optional
            Range of KV heads, the last exclusive; None: all. Not for layers where each head keeps its own tokens.

        Raises
        ------
        DataError
            If a block is damaged, or the dtype is not one that keys and values have.
        """
        import torch

        pieces, is_compressed = self._of_layer(layer), self.rows(layer) is not None
        if is_compressed:  # one row of pieces, whose heads are stored one after the other
            assert heads is None, "some heads of a compressed layer are read by their rows"
            pieces = [[piece] for piece in pieces[0]]
        tokens = sum(row[0].tokens for row in pieces)
        stop, at, found = tokens if last is None else last, 0, []
        if not 0 <= first <= stop <= tokens:
            raise DataError(f"layer {layer} has {tokens} tokens; {first} to {stop} were requested")
        for row in pieces:
            start, end = max(first - at, 0), min(stop - at, row[0].tokens)
            if start < end:
                found.append(_read_row(row, start, end, heads))
            at += row[0].tokens
        found = found or [_read_row(pieces[0], 0, 0, heads)]
        if len(found) == 1:
            return found[0]
        keys, values = (torch.cat(each, TOKENS_DIM) for each in zip(*found, strict=True))
        return keys, values

    def check(self) -> None:
        """Verify all checksums, a layer of a piece at a time; see `StoredLayer.check`."""
        for piece in itertools.chain.from_iterable(self.pieces):
            for layer in piece.layers:
                with explained(Path(layer.keys.file.filename)):
                    layer.check()

    def _of_layer(self, layer: int) -> list[list[StoredLayer]]:
        index = self.layers.index(layer)
        return [[piece.layers[index] for piece in row] for row in self.pieces]


def _read_row(row: Sequence[StoredLayer], first: int, last: int, heads: tuple[int, int] | None) -> KeysValues:
    """Read some tokens and heads of adjacent pieces; digests cover all heads of a piece."""
    import torch

    found, at = [], 0
    for piece in row:
        count = piece.keys.shape[HEADS_DIM]
        start, end = (0, count) if heads is None else (max(heads[0] - at, 0), min(heads[1] - at, count))
        if start < end:
            with explained(Path(piece.keys.file.filename)):
                keys, values = piece.read(first, last)
            found.append((keys, values) if (start, end) == (0, count) else (keys[:, start:end], values[:, start:end]))
        at += count
    if len(found) == 1:
        return found[0]
    keys, values = (torch.cat(each, HEADS_DIM) for each in zip(*found, strict=True))
    return keys, values


def _facts(layer: StoredLayer) -> list[Any]:
    arrays = layer.keys, layer.values
    shapes, types = [list(one.shape) for one in arrays], [type_name(one) for one in arrays]
    rows = [] if layer.rows is None else layer.rows.facts()
    return [layer.number, shapes, types, layer.block_tokens, np.asarray(layer.digests).tolist(), *rows]
