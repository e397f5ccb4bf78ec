"""Keys and values in HDF5, in the model's dtype, with everything needed to continue from them.

    /kv/KEY              attributes: block_tokens; text_start, text_stop (the
                         document's text in the prompt); first_token of the
                         first row (if not 0, earlier rows are in another
                         piece, see ``pieces``); with tensor parallelism
                         first_head, last_head (exclusive), all_heads
    /kv/KEY/token_ids    of the tokens whose keys and values these are: the
                         prompt and all but the last new one (int64)
    /kv/KEY/layer_000/keys, values
                         (tokens, kv_heads, head_dim)
    /kv/KEY/layer_000/digests
                         XXH3 (64 bits, big-endian, as signed numbers) of
                         every block of tokens of keys and of values
                         (int64, blocks x 2)

In compressed layers each head has its own rows: see ``head_rows``.

HDF5 verifies its own checksums at 2 GB/s, which would be most of the loading time; XXH3 takes a tenth of that. One
hash, which the log's checksum covers, includes everything except the keys and values themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import h5py
import numpy as np

from kvr_mpi.errors import DataError, counted
from kvr_mpi.store.arrays import digest_of, open_array, write_array
from kvr_mpi.store.hdf5 import (
    attribute_names,
    dataset_in,
    group_in,
    read_attribute,
    where,
    write_attribute,
    write_dataset,
)
from kvr_mpi.store.head_rows import MAX_HEADS, NAMES, open_head_rows, write_head_rows
from kvr_mpi.store.stored_kv import BLOCK_TOKENS, CachedTokens, KeysValues, StoredLayer, StoredPiece
from kvr_mpi.topology import KVHeads

LAYER_NAME = re.compile(r"layer_[0-9]{3,}", re.ASCII)
KINDS = ("keys", "values")
HEADS = ("first_head", "last_head", "all_heads")
MEMBERS = {*KINDS, "digests", *NAMES}
# Keys and values are hardly compressible: a group that claims more than this multiple of the file's size is hostile.
MAX_INFLATION = 64


def write_kv(
    parent: h5py.Group, key: str, layers: Iterable[KeysValues | None], tokens: CachedTokens | None
) -> tuple[int, str]:
    """Write keys and values layer by layer as they arrive; without layers no group is created.

    Parameters
    ----------
    parent : h5py.Group
        ``/kv``.
    key : str
        Name of the group to make.
    layers : iterable of (keys, values) or None
        Each layer's (tokens, kv_heads, head_dim); None for a layer that has none.
    tokens : CachedTokens or None
        Their tokens; None: the keys and values can be read, but no prompt can continue from them.

    Returns
    -------
    (int, str)
        Bytes of keys and values, and the hash of `StoredPiece.seal`: 0 and empty if there are none.
    """
    found: list[StoredLayer] = []
    kv = None
    for number, layer in enumerate(layers):
        if layer is None:
            continue
        if kv is None:
            kv = parent.create_group(key)
        place = kv.create_group(f"layer_{number:03d}")
        written = [write_array(place, name, tensor) for name, tensor in zip(KINDS, layer, strict=True)]
        blocks = -(-max(map(len, written)) // BLOCK_TOKENS)
        digests = np.zeros((blocks, len(KINDS)), np.int64)
        for column, bits in enumerate(written):
            for block in range(blocks):
                rows = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
                digests[block, column] = digest_of(bits[rows])
        write_dataset(place, "digests", digests)
        keys, values = (open_array(place, kind) for kind in KINDS)
        kept = None if tokens is None else tokens.rows.get(number)
        if kept is not None:
            write_head_rows(place, kept)
        found.append(StoredLayer(number, keys, values, digests, rows=kept))
    if kv is None:
        return 0, ""
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
            _write_heads(kv, tokens.heads)
    stored = StoredPiece(tuple(found), tokens)
    return stored.bytes, stored.seal()


def open_kv(kv: h5py.Group, announced_bytes: int, sha256: str) -> StoredPiece:
    """Open the keys and values of a document in a group; data are read later.

    Parameters
    ----------
    kv : h5py.Group
    announced_bytes, sha256
        The results of `write_kv`, as listed in the log.

    Raises
    ------
    DataError
        If the group's contents differ from what was written.
    """
    place = where(kv)
    stored = _open(kv)
    if stored.bytes != announced_bytes:
        raise DataError(f"{place} has {stored.bytes} bytes; the log announces {announced_bytes}")
    if stored.seal() != sha256:
        raise DataError(f"{place} is damaged: its description differs from what was written (checksum)")
    if stored.bytes > MAX_INFLATION * kv.file.id.get_filesize():
        raise DataError(
            f"{place} has {stored.bytes} bytes in a file of {kv.file.id.get_filesize()}, which cannot be real data"
        )
    if strange := _strange_members(kv):
        raise DataError(f"{place} has unknown members: {', '.join(sorted(strange)[:5])}")
    return stored


def _strange_members(kv: h5py.Group) -> set[str]:
    """List unknown members of a group of keys and values."""
    strange = attribute_names(kv) - {"block_tokens", "text_start", "text_stop", "first_token", "compression", *HEADS}
    for name in kv:
        if LAYER_NAME.fullmatch(name):
            layer = group_in(kv, name)
            strange |= attribute_names(layer) | {*layer} - MEMBERS
    return strange


def _open(kv: h5py.Group) -> StoredPiece:
    layers = tuple(sorted(_layers(kv), key=lambda layer: layer.number))
    rows = {layer.number: layer.rows for layer in layers if layer.rows is not None}
    longest = max((layer.tokens for layer in layers if layer.rows is None), default=0)
    longest = max([longest, *(1 + int(each.positions.max()) for each in rows.values())])
    tokens = _read_tokens(kv, longest)
    compression = read_attribute(kv, "compression", str) if "compression" in attribute_names(kv) else ""
    if bool(compression) != bool(rows) or (rows and (tokens is None or tokens.first or longest != len(tokens.ids))):
        raise DataError(
            f"{where(kv)} says {compression or 'no compression'!r}, has {counted(len(rows), 'layer')} whose heads "
            f"keep their "
            f"own tokens, up to token {longest}: these do not match"
        )
    heads = _read_heads(kv, (layer.kv_heads for layer in layers))
    if heads is not None and tokens is None:
        raise DataError(f"{where(kv)} has some of the KV heads, but does not record the tokens")
    if tokens is not None:
        tokens = replace(tokens, compression=compression, rows=rows, heads=heads)
    return StoredPiece(layers, tokens)


def _layers(kv: h5py.Group) -> Iterator[StoredLayer]:
    """List the layers."""
    block = read_attribute(kv, "block_tokens", int)
    if block < 1:
        raise DataError(f"{where(kv)} has blocks of {block} tokens; expected at least 1")
    for name in kv:
        if name == "token_ids":
            continue
        if not LAYER_NAME.fullmatch(name):
            raise DataError(f"{where(kv)}/{name} is not a layer; expected layer_000, ...")
        layer = group_in(kv, name)
        keys, values = (open_array(layer, kind) for kind in KINDS)
        digests = dataset_in(layer, "digests", "i", (2,))
        expected = (-(-max(keys.shape[0], values.shape[0]) // block), len(KINDS))
        if digests.shape != expected or keys.shape[0] != values.shape[0]:
            raise DataError(
                f"{where(layer)}: keys {keys.shape}, values {values.shape}, digests {digests.shape} do not match"
            )
        rows = open_head_rows(layer, keys.shape)
        yield StoredLayer(int(name.removeprefix("layer_")), keys, values, digests[()], block, rows)


def _read_tokens(kv: h5py.Group, longest: int) -> CachedTokens | None:
    """Read the token ids that the keys and values belong to."""
    if "token_ids" not in kv:
        return None
    ids = dataset_in(kv, "token_ids", "i", (1,))
    text = read_attribute(kv, "text_start", int), read_attribute(kv, "text_stop", int)
    first = read_attribute(kv, "first_token", int) if "first_token" in attribute_names(kv) else 0
    if not 0 <= first <= ids.shape[0] <= first + longest or not 0 <= text[0] <= text[1] <= ids.shape[0]:
        raise DataError(
            f"{where(kv)} has {ids.shape[0]} tokens, text from {text[0]} to {text[1]}, {longest} keys from {first} on"
        )
    return CachedTokens(tuple(ids[()].tolist()), text, first)


def _write_heads(kv: Any, heads: KVHeads) -> None:
    """Write which KV heads a document's group has."""
    for name, value in zip(HEADS, (heads.first, heads.last, heads.of), strict=True):
        write_attribute(kv, name, value)


def _read_heads(kv: Any, counts: Iterable[int]) -> KVHeads | None:
    """Read which KV heads a document's group has; None for all.

    Parameters
    ----------
    counts : iterable of int
        Number of KV heads of each of its layers.

    Raises
    ------
    DataError
        If they are not an even share of the heads, or their number differs from the layers'.
    """
    if not attribute_names(kv) & {*HEADS}:
        return None
    heads = KVHeads(*(read_attribute(kv, name, int) for name in HEADS))
    if not 0 <= heads.first < heads.last <= heads.of <= MAX_HEADS or not heads.is_even_share:
        raise DataError(
            f"{where(kv)} has the KV heads from {heads.first} to {heads.last} of {heads.of}; expected an even share"
        )
    if {*counts} != {heads.last - heads.first}:
        raise DataError(f"{where(kv)} has the KV heads from {heads.first} to {heads.last}, and its layers have others")
    return heads
