"""Prefixes of stored prompts, whose keys and values are loaded on demand.

The leader of a chain finds a stored prompt and sends its `StoredPrefix`; each rank opens and checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from kvr_mpi.errors import DataError
from kvr_mpi.kv.loading import LoadedLayers
from kvr_mpi.kv.pool import Pool
from kvr_mpi.kv.sequence import Pair, SequenceKV, StoredRows
from kvr_mpi.model import LoadedModel
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.stored_kv import Piece, StoredKV, open_pieces


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Location of the stored keys and values of a prompt's first tokens.

    name : the document's id.
    pieces : the stored pieces of its keys and values.
    tokens : number of the prompt's first tokens.
    compression : method and settings of its compression; empty: all tokens are stored.
    """

    name: str
    pieces: tuple[Piece, ...]
    tokens: int
    compression: str = ""

    def open(
        self,
        ids: Sequence[int],
        loaded: LoadedModel,
        pool: Pool,
        *,
        bounds: tuple[int, int] | None = None,
        longest: int | None = None,
    ) -> SequenceKV:
        """Return the prefix of a prompt with these ids; layers are read on demand.

        bounds, longest : this rank's tokens, and the length of the longest prompt that continues it, if it is sharded.

        A rank of a tensor-parallel group reads its own KV heads. Files are checked when layers are read, which raises a
        `DataError` if tokens differ from `ids`, if keys and values differ from `pieces`, if shape or dtype differ from
        the model's, or if a block fails its checksum.
        """
        ids = tuple(ids[: self.tokens])
        stored = _Stored(self, ids, loaded)
        start, stop = bounds or (0, len(ids))

        def read(layer: int) -> StoredRows:
            if self.compression:
                return stored.heads(layer)
            return stored.rows(layer, sequence.first_kept(layer), stop)

        sequence = SequenceKV(
            loaded,
            pool,
            longest or len(ids),
            length=len(ids),
            start=start,
            stop=stop,
            is_last=stop == len(ids),
            longest=longest,
            read=LoadedLayers(len(loaded.shape.layers), read, loaded.device).__getitem__,
            ids=ids,
            compression=self.compression,
            source=self,
        )
        return sequence


def open_prompt(name: str, pieces: Sequence[Piece]) -> tuple[StoredKV, CachedTokens]:
    """Open the keys and values of a stored prompt, and read their tokens.

    Raises `DataError` if files are missing, damaged, different from `pieces`, or without tokens.
    """
    for piece in pieces:
        if not Path(piece.path).is_file():
            raise DataError(
                f"{piece.path} existed when the job began, and is gone: the run may have been merged; start the job "
                f"again"
            )
    kv = open_pieces(name, pieces)
    if kv.tokens is None:
        raise DataError(f"{name}: its stored keys and values do not record their tokens")
    return kv, kv.tokens


class _Stored:
    """Keys and values of a prompt's first tokens, opened and checked when the first layer is read."""

    def __init__(self, source: StoredPrefix, ids: tuple[int, ...], loaded: LoadedModel) -> None:
        self._source, self._ids, self._loaded = source, ids, loaded
        self._own_heads = None if loaded.part is None else loaded.part.own_kv_heads  # None: all

    @cached_property
    def _kv(self) -> StoredKV:
        kv, tokens = open_prompt(self._source.name, self._source.pieces)
        _check(self._source.name, kv, tokens.ids, self._ids, self._loaded)
        return kv

    def rows(self, layer: int, first: int, last: int) -> torch.Tensor | None:
        """Read rows of tokens, keys and values concatenated (tokens, elements); None if the layer has none."""
        if layer not in self._kv.layers:
            return None
        keys, values = self._kv.read(layer, first, last, self._own_heads)
        return torch.cat([keys.flatten(1), values.flatten(1)], 1)

    def heads(self, layer: int) -> list[Pair] | None:
        """Read the rows that compression kept of each head; None if the layer has none."""
        if layer not in self._kv.layers:
            return None
        rows, tokens = self._kv.rows(layer), self._source.tokens
        if rows is None:
            keys, values = self._kv.read(layer, 0, tokens, self._own_heads)
            return list(zip(keys.unbind(1), values.unbind(1), strict=True))
        keys, values = self._kv.read(layer)
        bounds = rows.bounds_before(tokens)
        if any(first == last for first, last in bounds):
            raise DataError(
                f"{self._source.name}: a head of layer {layer} keeps none of the first {tokens} tokens, up to the end "
                f"of the text, because its compression selected tokens of the question; to ask again, compress with "
                f"observes = 'document'"
            )
        own = slice(*(self._own_heads or (None,)))
        return [(keys[first:last, 0], values[first:last, 0]) for first, last in bounds[own]]


def _check(name: str, kv: StoredKV, stored: Sequence[int], ids: tuple[int, ...], loaded: LoadedModel) -> None:
    """Refuse keys and values whose tokens differ from `ids`, or whose shape or dtype differs from the model's."""
    if tuple(stored[: len(ids)]) != ids:
        raise DataError(
            f"{name}: its stored prompt does not begin with the expected {len(ids)} tokens; the run may have changed: "
            f"start the job again"
        )
    dtype = str(loaded.dtype).removeprefix("torch.")
    for number, shape in enumerate(loaded.shape.layers):
        if not shape.elements:
            continue
        heads = shape.num_kv_heads if loaded.part is None else loaded.part.kv_heads
        has, rows = (kv.format(number), kv.rows(number)) if number in kv.layers else (None, None)
        # With compression, the rows of all heads are stored one after the other.
        of_one = (len(stored), heads) if rows is None else (sum(rows.counts), 1)
        is_right = has == ((*of_one, shape.key_dim), (*of_one, shape.value_dim), dtype)
        if not is_right or (rows is not None and len(rows.counts) != heads):
            raise DataError(
                f"{name}: layer {number} has keys and values {has}; this model has {heads} heads of "
                f"{shape.key_dim} and {shape.value_dim} elements, {dtype}"
            )
