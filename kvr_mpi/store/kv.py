"""Keys and values in HDF5, in the model's dtype, with everything needed to continue from them.

    /kv/KEY              attributes: block_tokens; text_start, text_stop (the
                         document's text in the prompt); first_token of the
                         first row (if not 0, earlier rows are in another
                         piece); with tensor parallelism first_head,
                         last_head (exclusive), all_heads; with compression
                         its method and settings: compression
    /kv/KEY/token_ids    of the tokens whose keys and values these are: the
                         prompt and all but the last new one (int64)
    /kv/KEY/layer_000/keys, values
                         (tokens, kv_heads, head_dim); of a compressed layer
                         (rows, 1, head_dim), one KV head after the other
    /kv/KEY/layer_000/digests
                         XXH3 (64 bits, big-endian, as signed numbers) of
                         every block of tokens of keys and of values
                         (int64, blocks x 2)
    /kv/KEY/layer_000/head_rows, positions
                         of a compressed layer only: rows of each KV head
                         (int64); index of each row in token_ids, ascending
                         in each head (int32)

HDF5 verifies its own checksums at 2 GB/s, which would be most of the loading time; XXH3 takes a tenth of that. One
hash, which the log's checksum covers, includes everything except the keys and values themselves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from kvr_mpi.disk import read_whole
from kvr_mpi.errors import ConfigError, DataError, counted
from kvr_mpi.store.hdf5 import (
    Bits,
    as_tensor,
    attribute_names,
    dataset_in,
    group_in,
    hdf5_errors,
    read_attribute,
    read_bits,
    size_bytes,
    type_name,
    where,
    write_array,
    write_attribute,
    write_dataset,
)
from kvr_mpi.topology import KVHeads

if TYPE_CHECKING:
    import torch

KeysValues = tuple["torch.Tensor", "torch.Tensor"]
BLOCK_TOKENS, CHECKED_TOKENS = 256, 1024  # tokens per digest, and read at once to check them
MAX_HEADS = 4096
LAYER_NAME = re.compile(r"layer_[0-9]{3,}", re.ASCII)
KINDS, ROWS = ("keys", "values"), ("head_rows", "positions")
HEADS = ("first_head", "last_head", "all_heads")
MEMBERS = {*KINDS, "digests", *ROWS}
# Keys and values are hardly compressible: a group that claims more than this multiple of the file's size is hostile.
MAX_INFLATION = 64


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The rows of each head of a compressed layer.

    counts : of each KV head.
    positions : index of each row in `CachedTokens.ids`, one head after the other (rows,).
    """

    counts: tuple[int, ...]
    positions: npt.NDArray[np.int32]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First row of each head, and the end of the last."""
        return list(itertools.pairwise(itertools.accumulate(self.counts, initial=0)))

    def bounds_before(self, tokens: int) -> list[tuple[int, int]]:
        """Bounds of each head's rows whose position is below `tokens`."""
        return [
            (first, first + int(np.searchsorted(self.positions[first:last], tokens))) for first, last in self.bounds
        ]


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The token ids of stored keys and values, and the bounds of the document's text.

    ids : the prompt, then the stored tokens of the answer.
    text : bounds of the document's text in `ids`.
    first : index of the first token whose keys and values are stored here; see ``stored_kv`` for earlier tokens.
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

    digests : (blocks, 2), per `BLOCK_TOKENS` tokens.
    rows : head and token of each row, if each head keeps its own tokens; then "tokens" below means rows.
    """

    number: int
    keys: h5py.Dataset
    values: h5py.Dataset
    digests: Any
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

        Raises `DataError` if a block is damaged, or the dtype is not one that keys and values have.
        """
        stop = self.tokens if last is None else last
        if not 0 <= first <= stop <= self.tokens:
            raise DataError(f"{where(self.keys)} has {self.tokens} tokens; {first} to {stop} were requested")
        return as_tensor(self.keys, self._bits(0, first, stop)), as_tensor(self.values, self._bits(1, first, stop))

    def _bits(self, column: int, first: int, last: int) -> Bits:
        """Read a range of tokens of keys (column 0) or values (1), and verify the blocks that contain them."""
        dataset, block = (self.keys, self.values)[column], BLOCK_TOKENS
        start, stop = first // block * block, min(-(-last // block) * block, self.tokens)
        path = Path(dataset.file.filename)

        def read() -> Bits:
            with hdf5_errors(path):
                return read_bits(dataset, start, stop)

        bits = read_whole(read, path)
        for at in range(start, stop, block):
            if _digest_of(bits[at - start : at - start + block]) != self.digests[at // block, column]:
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
        """Verify all checksums, a few blocks at a time; raises `DataError`."""
        for layer in self.layers:
            for start in range(0, layer.tokens, CHECKED_TOKENS):
                layer.read(start, min(start + CHECKED_TOKENS, layer.tokens))

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


def _facts(layer: StoredLayer) -> list[Any]:
    arrays = layer.keys, layer.values
    shapes, types = [list(one.shape) for one in arrays], [type_name(one) for one in arrays]
    rows = [] if layer.rows is None else [list(layer.rows.counts), _digest_of(layer.rows.positions)]
    return [layer.number, shapes, types, BLOCK_TOKENS, np.asarray(layer.digests).tolist(), *rows]


def _digest_of(array: Bits) -> int:
    """XXH3 of a contiguous array, as a signed integer."""
    return int.from_bytes(xxhash.xxh3_64(array.data.cast("B") if array.size else b"").digest(), "big", signed=True)


def refuse_compressed(compression: str, name: str, what: str) -> None:
    """Refuse document `name` for `what` if its keys and values are compressed; raises `ConfigError`."""
    if compression:
        raise ConfigError(
            f"{name!r} has compressed keys and values ({compression}), whose heads keep different tokens; {what} needs "
            f"whole ones: use kvr ask, or prefill it again without [compress]"
        )


class PieceWriter:
    """Writes a piece layer by layer.

    parent : ``/kv``.
    key : name of the group to make.
    tokens : their tokens; None: the keys and values can be read, but no prompt can continue from them.
    """

    def __init__(self, parent: h5py.Group, key: str, tokens: CachedTokens | None) -> None:
        self._kv, self._tokens, self._layers = parent.create_group(key), tokens, list[StoredLayer]()

    def add(self, number: int, layer: KeysValues) -> None:
        """Write a layer's keys and values (tokens, kv_heads, head_dim)."""
        place = self._kv.create_group(f"layer_{number:03d}")
        (keys, key_bits), (values, value_bits) = (write_array(place, *each) for each in zip(KINDS, layer, strict=True))
        blocks = [slice(at, at + BLOCK_TOKENS) for at in range(0, len(key_bits), BLOCK_TOKENS)]
        digests = [[_digest_of(bits[rows]) for bits in (key_bits, value_bits)] for rows in blocks]
        stored = np.array(digests, np.int64).reshape(len(blocks), len(KINDS))
        write_dataset(place, "digests", stored)
        kept = None if self._tokens is None else self._tokens.rows.get(number)
        if kept is not None:
            write_dataset(place, ROWS[0], np.asarray(kept.counts, np.int64))
            write_dataset(place, ROWS[1], kept.positions)
        self._layers.append(StoredLayer(number, keys, values, stored, rows=kept))

    def finish(self) -> tuple[int, str]:
        """Write the tokens; return the bytes of keys and values, and the hash of `StoredPiece.seal`."""
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
        stored = StoredPiece(tuple(self._layers), tokens)
        return stored.bytes, stored.seal()

    def discard(self) -> None:
        """Delete what was written."""
        del self._kv.parent[self._kv.name]


def open_kv(kv: h5py.Group, announced_bytes: int, sha256: str) -> StoredPiece:
    """Open the keys and values of a document in a group; data are read later.

    Raises `DataError` if they differ from what `PieceWriter.finish` returned, according to the log.
    """
    place, layers = where(kv), tuple(sorted(_layers(kv), key=lambda layer: layer.number))
    stored = StoredPiece(layers, _read_tokens(kv, layers))
    if stored.bytes != announced_bytes:
        raise DataError(f"{place} has {stored.bytes} bytes; the log announces {announced_bytes}")
    if stored.seal() != sha256:
        raise DataError(f"{place} is damaged: its description differs from what was written (checksum)")
    if stored.bytes > MAX_INFLATION * kv.file.id.get_filesize():
        raise DataError(
            f"{place} has {stored.bytes} bytes in a file of {kv.file.id.get_filesize()}, which cannot be real data"
        )
    return stored


def _layers(kv: h5py.Group) -> Iterator[StoredLayer]:
    """List the layers."""
    block = read_attribute(kv, "block_tokens", int)
    if block != BLOCK_TOKENS:
        raise DataError(f"{where(kv)} has blocks of {block} tokens; expected {BLOCK_TOKENS}")
    for name in kv:
        if name == "token_ids":
            continue
        if not LAYER_NAME.fullmatch(name):
            raise DataError(f"{where(kv)}/{name} is not a layer; expected layer_000, ...")
        layer = group_in(kv, name)
        if strange := {*layer} - MEMBERS:
            raise DataError(f"{where(layer)} has unknown members: {', '.join(sorted(strange)[:5])}")
        keys, values = (dataset_in(layer, kind, "f", (3,)) for kind in KINDS)
        digests = dataset_in(layer, "digests", "i", (2,))
        expected = (-(-max(keys.shape[0], values.shape[0]) // BLOCK_TOKENS), len(KINDS))
        if digests.shape != expected or keys.shape[0] != values.shape[0]:
            raise DataError(
                f"{where(layer)}: keys {keys.shape}, values {values.shape}, digests {digests.shape} do not match"
            )
        rows = read_head_rows(layer, keys.shape)
        yield StoredLayer(int(name.removeprefix("layer_")), keys, values, digests[()], rows)


def read_head_rows(layer: h5py.Group, shape: tuple[int, ...]) -> HeadRows | None:
    """Read which tokens each head of a layer keeps; None if all heads keep the same tokens.

    Raises `DataError` if the rows do not match the `shape` of the keys, or the positions of a head do not ascend.
    """
    if not any(name in layer for name in ROWS):
        return None
    counts, positions = dataset_in(layer, ROWS[0], "i", (1,)), dataset_in(layer, ROWS[1], "i", (1,))
    if counts.shape[0] > MAX_HEADS or positions.shape != shape[:1] or shape[1] != 1 or positions.dtype != np.int32:
        raise DataError(
            f"{where(layer)}: rows of {counts.shape[0]} heads, positions {positions.shape} {positions.dtype} and keys "
            f"{shape} do not match"
        )
    found = HeadRows(tuple(counts[()].tolist()), positions[()])
    if not found.counts or min(found.counts) < 1 or sum(found.counts) != shape[0]:
        raise DataError(f"{where(layer)}: heads of {list(found.counts[:8])} rows and more do not add up to {shape[0]}")
    for first, last in found.bounds:
        own = found.positions[first:last]
        if own[0] < 0 or not bool((np.diff(own) > 0).all()):
            raise DataError(f"{where(layer)}: rows {first} to {last} are not in ascending order of tokens")
    return found


def _read_tokens(kv: h5py.Group, layers: Sequence[StoredLayer]) -> CachedTokens | None:
    """Read the tokens that the keys and values belong to, and which heads keep them."""
    place, names = where(kv), attribute_names(kv)
    rows = {layer.number: layer.rows for layer in layers if layer.rows is not None}
    compression = read_attribute(kv, "compression", str) if "compression" in names else ""
    longest = max((layer.tokens for layer in layers if layer.rows is None), default=0)
    longest = max([longest, *(1 + int(each.positions.max()) for each in rows.values())])
    tokens = None
    if "token_ids" in kv:
        ids = dataset_in(kv, "token_ids", "i", (1,))
        text = read_attribute(kv, "text_start", int), read_attribute(kv, "text_stop", int)
        first = read_attribute(kv, "first_token", int) if "first_token" in names else 0
        if not 0 <= first <= ids.shape[0] <= first + longest or not 0 <= text[0] <= text[1] <= ids.shape[0]:
            raise DataError(
                f"{place} has {ids.shape[0]} tokens, text from {text[0]} to {text[1]}, {longest} keys from {first} on"
            )
        tokens = CachedTokens(tuple(ids[()].tolist()), text, first, compression, rows, _read_heads(kv, layers))
    elif names & {*HEADS}:
        raise DataError(f"{place} has some of the KV heads, but does not record the tokens")
    if bool(compression) != bool(rows) or (rows and (tokens is None or tokens.first or longest != len(tokens.ids))):
        raise DataError(
            f"{place} says {compression or 'no compression'!r}, has {counted(len(rows), 'layer')} whose heads keep "
            f"their own tokens, up to token {longest}: these do not match"
        )
    return tokens


def _read_heads(kv: h5py.Group, layers: Sequence[StoredLayer]) -> KVHeads | None:
    """Read which KV heads a document's group has: an even share of all heads, in every layer; None for all."""
    if not attribute_names(kv) & {*HEADS}:
        return None
    heads = KVHeads(*(read_attribute(kv, name, int) for name in HEADS))
    told = f"{where(kv)} has the KV heads from {heads.first} to {heads.last}"
    if not 0 <= heads.first < heads.last <= heads.of <= MAX_HEADS or not heads.is_even_share:
        raise DataError(f"{told} of {heads.of}; expected an even share")
    if {layer.kv_heads for layer in layers} != {heads.last - heads.first}:
        raise DataError(f"{told}, and its layers have others")
    return heads
