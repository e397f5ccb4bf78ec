"""Keys and values in HDF5, in the model's dtype, with everything needed to continue from them.

A rank stores the keys and values of its own tokens; in a tensor-parallel group, of its own KV heads. Each is a piece of
the document, and a record lists the ids of all pieces that it needs. An id names the document, tokens and heads, and
has a digest of the prompt and the tokens, so that a piece from another attempt is never used. ``results.h5`` stores a
document as one piece.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from kvr_mpi.store.hdf5 import Bits, type_name
from kvr_mpi.store.record import Record
from kvr_mpi.topology import KVHeads

if TYPE_CHECKING:
    import torch

KeysValues = tuple["torch.Tensor", "torch.Tensor"]
Kept = tuple[npt.NDArray[np.int32], ...]  # of each KV head of a layer, the positions of the tokens that it keeps
BLOCK_TOKENS = 256  # tokens per digest
KINDS, ROWS = ("keys", "values"), ("head_rows", "positions")
HEADS = ("first_head", "last_head", "all_heads")


@dataclass(frozen=True, slots=True)
class Piece:
    """The location of a piece.

    id : of `piece_id`.
    path : the volume.
    bytes : size of keys and values.
    sha256 : hash of `seal_piece`.
    """

    id: str
    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The token ids of stored keys and values, and the bounds of the document's text.

    ids : the prompt, then the stored tokens of the answer.
    text : bounds of the document's text in `ids`.
    first : index of the first token whose keys and values are stored here; earlier tokens are in other pieces.
    compression : method and settings with which heads dropped tokens; empty: all tokens are stored.
    kept : for each compressed layer, the indexes in `ids` of the tokens that each head keeps.
    heads : KV heads that are stored here, with tensor parallelism; None: all.
    """

    ids: Sequence[int]
    text: tuple[int, int]
    first: int = 0
    compression: str = ""
    kept: Mapping[int, Kept] = field(default_factory=dict)
    heads: KVHeads | None = None


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


def seal_piece(tokens: CachedTokens | None, layers: Sequence[Sequence[Any]]) -> str:
    """Hash a piece's tokens and layers, each as from `describe_layer`, by number; empty if nothing is stored."""
    if not layers:
        return ""
    known: list[Any] | None = None
    if tokens is not None:
        known = [list(tokens.ids), list(tokens.text), *([tokens.first] if tokens.first else [])]
        known += [tokens.compression] if tokens.compression else []
        known += [] if tokens.heads is None else [[tokens.heads.first, tokens.heads.last, tokens.heads.of]]
    return hashlib.sha256(json.dumps([known, layers]).encode()).hexdigest()


def describe_layer(
    number: int, keys: h5py.Dataset, values: h5py.Dataset, digests: npt.NDArray[np.int64], kept: Kept | None
) -> list[Any]:
    """Return what the hash of a piece covers of a layer: everything except the keys and values themselves."""
    shapes, types = [list(one.shape) for one in (keys, values)], [type_name(one) for one in (keys, values)]
    rows = [] if kept is None else [list(map(len, kept)), block_digest(np.concatenate(kept))]
    return [number, shapes, types, BLOCK_TOKENS, digests.tolist(), *rows]


def block_digest(array: Bits) -> int:
    """XXH3 of a contiguous array, as a signed integer."""
    return int.from_bytes(xxhash.xxh3_64(array.data.cast("B") if array.size else b"").digest(), "big", signed=True)
