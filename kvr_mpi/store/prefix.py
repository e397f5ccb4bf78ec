"""Prefixes of stored prompts, whose keys and values are loaded on demand.

The leader of a chain finds a stored prompt and sends its `StoredPrefix`; each rank opens and checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvr_mpi.errors import DataError
from kvr_mpi.kv.pool import Pool
from kvr_mpi.kv.sequence import Pair, SequenceKV, StoredRows
from kvr_mpi.model import LoadedModel
from kvr_mpi.store.kv import CachedTokens, Piece
from kvr_mpi.store.kv_reader import KVReader


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
        start, stop = bounds or (0, len(ids))
        heads = None if loaded.part is None else loaded.part.own_kv_heads

        kv: KVReader | None = None  # while layers are read

        def read(layer: int) -> StoredRows:
            nonlocal kv
            if kv is None:
                kv, tokens = open_prompt(self.name, self.pieces)
                _check(self.name, kv, tokens.ids, ids, loaded)
            if layer not in kv.layers:
                return None
            rows: StoredRows
            if self.compression:
                rows = _read_heads(self.name, kv, layer, len(ids), heads)
            else:
                keys, values = kv.read(layer, sequence.first_kept(layer), stop, heads)
                rows = torch.cat([keys.flatten(1), values.flatten(1)], 1)
            if layer == kv.layers[-1]:  # no file stays open while answers are decoded
                kv.close()
                kv = None
            return rows

        sequence = SequenceKV(
            loaded,
            pool,
            longest or len(ids),
            length=len(ids),
            start=start,
            stop=stop,
            is_last=stop == len(ids),
            longest=longest,
            read=read,
            ids=ids,
            compression=self.compression,
            source=self,
        )
        return sequence


def open_prompt(name: str, pieces: Sequence[Piece]) -> tuple[KVReader, CachedTokens]:
    """Open the keys and values of a stored prompt, and read their tokens.

    Raises `DataError` if files are missing, damaged, different from `pieces`, or without tokens.
    """
    check_files(pieces)
    kv = KVReader(name, pieces)
    if kv.tokens is None:
        raise DataError(f"{name}: its stored keys and values do not record their tokens")
    return kv, kv.tokens


def check_files(pieces: Sequence[Piece]) -> None:
    """Raise `DataError` if a file is missing."""
    for piece in pieces:
        if not Path(piece.path).is_file():
            raise DataError(
                f"{piece.path} existed when the job began, and is gone: the run may have been merged; start the job "
                f"again"
            )


def _read_heads(name: str, kv: KVReader, layer: int, tokens: int, heads: tuple[int, int] | None) -> list[Pair]:
    """Read each head's rows of the first tokens, of those that compression kept; `heads` are a range, None: all."""
    kept = kv.kept(layer)
    if kept is None:
        keys, values = kv.read(layer, 0, tokens, heads)
        return list(zip(keys.unbind(1), values.unbind(1), strict=True))
    key_rows, value_rows = (torch.split(each.squeeze(1), [*map(len, kept)]) for each in kv.read(layer))
    counts = [int(np.searchsorted(own, tokens)) for own in kept]
    if not all(counts):
        raise DataError(
            f"{name}: a head of layer {layer} keeps none of the first {tokens} tokens, up to the end of the text, "
            f"because its compression selected tokens of the question; to ask again, compress with "
            f"observes = 'document'"
        )
    found = [(key_rows[head][:count], value_rows[head][:count]) for head, count in enumerate(counts)]
    return found[slice(*(heads or (None,)))]


def _check(name: str, kv: KVReader, stored: Sequence[int], ids: tuple[int, ...], loaded: LoadedModel) -> None:
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
        has, kept = (kv.format(number), kv.kept(number)) if number in kv.layers else (None, None)
        # With compression, the rows of all heads are stored one after the other.
        of_one = (len(stored), heads) if kept is None else (sum(map(len, kept)), 1)
        is_right = has == ((*of_one, shape.key_dim), (*of_one, shape.value_dim), dtype)
        if not is_right or (kept is not None and len(kept) != heads):
            raise DataError(
                f"{name}: layer {number} has keys and values {has}; this model has {heads} heads of "
                f"{shape.key_dim} and {shape.value_dim} elements, {dtype}"
            )
