"""Pieces: the parts of a document's keys and values, each in a volume of the rank that wrote it.

A rank stores the keys and values of its own tokens; in a tensor-parallel group, of its own KV heads. A record lists the
ids of all pieces that it needs. An id names the document, tokens and heads, and has a digest of the prompt and the
tokens, so that a piece of another attempt is never used. Readers see all pieces as one (`open_pieces`); ``results.h5``
stores them as one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvr_mpi.errors import DataError
from kvr_mpi.store.arrays import type_name
from kvr_mpi.store.hdf5 import explained, group_in
from kvr_mpi.store.head_rows import join_head_rows
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.record import Record
from kvr_mpi.store.stored_kv import CachedTokens, StoredKV, StoredPiece
from kvr_mpi.store.volumes import KV, key_of, open_volume
from kvr_mpi.topology import KVHeads


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
    """Return the ids of all pieces of a document, in order.

    Parameters
    ----------
    record : Record
        Its slices are the ranks' token ranges.
    own : CachedTokens or None
        Tokens of the piece stored by the rank that writes the record.
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


def open_pieces(name: str, pieces: Sequence[Piece]) -> StoredKV:
    """Open all pieces of a document's keys and values; data are read later.

    Parameters
    ----------
    name : str
        The document's id.
    pieces : sequence of Piece

    Raises
    ------
    DataError
        If a piece is damaged, or the pieces do not fit together.
    """
    files: dict[Path, Any] = {}
    found = []
    with ExitStack() as stack:
        for piece in pieces:
            path = Path(piece.path)
            with explained(path):
                if path not in files:
                    files[path] = stack.enter_context(open_volume(path))
                group = group_in(group_in(files[path], KV), key_of(piece.id))
                found.append(open_kv(group, piece.bytes, piece.sha256))
        rows, tokens = _join(name, found)
        return StoredKV(rows, tokens, stack.pop_all())


def _join(name: str, found: Sequence[StoredPiece]) -> tuple[tuple[tuple[StoredPiece, ...], ...], CachedTokens | None]:
    """Arrange pieces in rows by tokens, each by heads; also return the tokens of the whole document.

    Raises
    ------
    DataError
        If tokens or heads are missing, or the pieces have different prompts, layers or dtypes.
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
    last = rows[-1][-1][0]
    starts, stops = [row[0][0].first for row in rows], [len(row[0][0].ids) for row in rows]
    if starts != [0, *stops[:-1]]:
        raise DataError(
            f"{name}: its keys and values begin at the tokens {starts} and end at {stops}; some are missing"
        )
    for tokens, piece in known:
        if list(tokens.ids) != list(last.ids[: len(tokens.ids)]) or tokens.compression != last.compression:
            raise DataError(f"{name}: its keys and values from token {tokens.first} on are of another prompt")
        _check_like(name, tokens, piece, rows[-1][-1][1])
    for row in rows:
        heads: list[KVHeads | None] = [tokens.heads for tokens, _ in row]
        if heads != ([None] if heads[0] is None else list(heads[0].shares)):
            raise DataError(f"{name}: KV heads are missing for its tokens from {row[0][0].first} on")
    kept = {
        layers[0].number: join_head_rows([layer.rows for layer in layers if layer.rows is not None])
        for layers in zip(*(piece.layers for _, piece in rows[0]), strict=True)
    }
    whole = replace(last, first=0, heads=None, rows={number: each for number, each in kept.items() if each is not None})
    return tuple(tuple(piece for _, piece in row) for row in rows), whole


def _check_like(name: str, tokens: CachedTokens, piece: StoredPiece, other: StoredPiece) -> None:
    """Refuse a piece whose layers, tokens or shapes do not match those of another piece of the document."""
    about = f"{name}: its keys and values from token {tokens.first} on"
    if [layer.number for layer in piece.layers] != [layer.number for layer in other.layers]:
        raise DataError(f"{about} have different layers than the others")
    count = len(tokens.ids) - tokens.first
    for layer, like in zip(piece.layers, other.layers, strict=True):
        shapes = (layer.keys.shape[1:], layer.values.shape[1:]), (like.keys.shape[1:], like.values.shape[1:])
        same_type = [*map(type_name, (layer.keys, layer.values))] == [*map(type_name, (like.keys, like.values))]
        counts_fit = like.rows is not None or layer.tokens == count
        if shapes[0] != shapes[1] or not same_type or (layer.rows is None) != (like.rows is None) or not counts_fit:
            raise DataError(
                f"{about} have {layer.tokens} tokens of {shapes[0]} in layer {layer.number}; expected {count} of "
                f"{shapes[1]}"
            )
