"""Writer of stored keys and values: the only code that writes our HDF5 files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import h5py
import numpy as np

from kvr_mpi.disk import rename, sync, unfinished_path
from kvr_mpi.errors import DataError
from kvr_mpi.store.hdf5 import NewFile, create_dataset, size_bytes, write_array, write_attribute, write_dataset
from kvr_mpi.store.kv import (
    BLOCK_TOKENS,
    HEADS,
    KINDS,
    ROWS,
    CachedTokens,
    KeysValues,
    Piece,
    block_digest,
    describe_layer,
    seal_piece,
)
from kvr_mpi.store.kv_reader import KVReader, check_pieces
from kvr_mpi.store.log import SCHEMA_VERSION
from kvr_mpi.store.volumes import EMBEDDINGS, KV, SCHEMA, key_of

LINES_BYTES = 4 << 20  # of lines, written at once
EMBEDDINGS_AT_ONCE = 1024


class KVWriter:
    """Writes a volume, or ``results.h5``: one piece after the other, each layer by layer.

    The file has a temporary name until `finish`. Without that, it is removed at the end of a ``with`` block, or by
    `abandon`. Every method raises `OSError` if something could not be written.

    path : the file's final name.
    replaces : whether the file may replace another one of that name.
    pieces : bytes and hash of each complete piece, by id, as the log lists them.
    """

    def __init__(self, path: Path, *, replaces: bool = False) -> None:
        self.path, self.pieces, self._replaces = path, dict[str, tuple[int, str]](), replaces
        self._part = unfinished_path(path)
        self._file = NewFile(self._part)
        write_attribute(self._file, "schema", SCHEMA)
        write_attribute(self._file, "schema_version", SCHEMA_VERSION)
        self._file.create_group(KV)
        self._id = ""  # of the piece that is being written
        self._tokens: CachedTokens | None = None
        self._layers, self._bytes = list[list[Any]](), 0  # of `describe_layer`, and what was written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    @property
    def is_writing(self) -> bool:
        """Whether a piece is incomplete."""
        return bool(self._id)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return int(self._file.id.get_filesize())

    def begin(self, piece: str, tokens: CachedTokens | None) -> None:
        """Begin a piece with an id of `piece_id`; it replaces one that a failed attempt left.

        tokens : of the piece; None: the keys and values can be read, but no prompt can continue from them.
        """
        if self.pieces.pop(piece, None):
            del self._file[KV][key_of(piece)]
        self._id, self._tokens, self._layers, self._bytes = piece, tokens, [], 0
        self._kv = self._file[KV].create_group(key_of(piece))

    def add(self, number: int, layer: KeysValues) -> None:
        """Write a layer's keys and values (tokens, kv_heads, head_dim), in their own dtype."""
        place = self._kv.create_group(f"layer_{number:03d}")
        (keys, key_bits), (values, value_bits) = (write_array(place, *each) for each in zip(KINDS, layer, strict=True))
        blocks = [slice(at, at + BLOCK_TOKENS) for at in range(0, len(key_bits), BLOCK_TOKENS)]
        found = [[block_digest(bits[rows]) for bits in (key_bits, value_bits)] for rows in blocks]
        digests = np.array(found, np.int64).reshape(len(blocks), len(KINDS))
        write_dataset(place, "digests", digests)
        kept = None if self._tokens is None else self._tokens.kept.get(number)
        if kept is not None:
            write_dataset(place, ROWS[0], np.array([len(own) for own in kept], np.int64))
            write_dataset(place, ROWS[1], np.concatenate(kept))
        self._layers.append(describe_layer(number, keys, values, digests, kept))
        self._bytes += size_bytes(keys) + size_bytes(values)
        self._file.check()

    def end(self) -> None:
        """Complete the piece."""
        kv, tokens = self._kv, self._tokens
        write_attribute(kv, "block_tokens", BLOCK_TOKENS)
        if tokens is not None:
            write_dataset(kv, "token_ids", np.asarray(tokens.ids, np.int64))
            write_attribute(kv, "text_start", tokens.text[0])
            write_attribute(kv, "text_stop", tokens.text[1])
            if tokens.first:
                write_attribute(kv, "first_token", tokens.first)
            if tokens.compression:
                write_attribute(kv, "compression", tokens.compression)
            if tokens.heads is not None:
                for name, value in zip(HEADS, (tokens.heads.first, tokens.heads.last, tokens.heads.of), strict=True):
                    write_attribute(kv, name, value)
        self.pieces[self._id] = self._bytes, seal_piece(tokens, self._layers)
        self._id = ""

    def discard(self) -> None:
        """Delete the piece that is being written."""
        del self._file[KV][key_of(self._id)]
        self._id = ""

    def copy(self, piece: str, kv: KVReader) -> None:
        """Write a document as one piece; its checksums are verified as it is read."""
        self.begin(piece, kv.tokens)
        for number in kv.layers:
            self.add(number, kv.read(number))
        self.end()

    def embeddings(self, rows: int) -> EmbeddingsWriter:
        """Return a writer of the embeddings of so many records."""
        return EmbeddingsWriter(self._file, rows)

    def write_lines(self, name: str, lines: BinaryIO) -> None:
        """Write lines of text, such as records, as a dataset of bytes."""
        data = create_dataset(self._file, name, h5py.h5t.STD_U8LE, (lines.seek(0, os.SEEK_END),))
        space, at = data.get_space(), lines.seek(0)
        while block := lines.read(LINES_BYTES):
            space.select_hyperslab((at,), (len(block),))
            data.write(h5py.h5s.create_simple((len(block),)), space, np.frombuffer(block, np.uint8))
            at += len(block)

    def finish(self, check: Callable[[Path], None] = lambda part: None) -> None:
        """Complete the file: sync it, read it again, and give it its name.

        check : raises an exception if the complete file is not as it should be.
        """
        assert not self.is_writing, "a document is being written"
        self._file.close()
        sync(self._part)
        written = [Piece(name, str(self._part), *of) for name, of in self.pieces.items()]
        try:
            damage = [*check_pieces(self._part, written).values()]
        except DataError as error:
            damage = [str(error)]
        if damage:
            raise OSError(errno.EIO, f"it differs from what was written: {damage[0]}", str(self._part))
        check(self._part)
        if not self._replaces and os.path.lexists(self.path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
        rename(self._part, self.path)
        sync(self.path.parent)

    def abandon(self) -> None:
        """Remove the file unless it is complete."""
        with suppress(Exception):
            self._file.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)


class EmbeddingsWriter:
    """Writes the embeddings of records to a new ``results.h5``, some rows at a time; nothing if there is none.

    rows : number of records.
    """

    def __init__(self, file: h5py.File, rows: int) -> None:
        self._file, self._rows, self._written = file, rows, 0
        self._waiting: list[Sequence[float]] = []
        self._data: Any = None
        self._dimension = 0

    def add(self, embedding: Sequence[float]) -> None:
        """Add the next record's embedding, which may be empty; raises `DataError` if it has another dimension."""
        if embedding and self._data is None:
            self._dimension = len(embedding)
            self._data = create_dataset(self._file, EMBEDDINGS, h5py.h5t.IEEE_F32LE, (self._rows, self._dimension))
        if embedding and len(embedding) != self._dimension:
            raise DataError(f"embeddings have {self._dimension} and {len(embedding)} dimensions; expected one of them")
        self._waiting.append(embedding)
        if len(self._waiting) >= EMBEDDINGS_AT_ONCE and self._data is not None:
            self.flush()

    def flush(self) -> None:
        """Write the rows that were added."""
        if self._data is None or not self._waiting:
            return
        rows = np.array([row or [np.nan] * self._dimension for row in self._waiting], np.float32)
        space = self._data.get_space()
        space.select_hyperslab((self._written, 0), rows.shape)
        self._data.write(h5py.h5s.create_simple(rows.shape), space, rows)
        self._written += len(rows)
        self._waiting.clear()
