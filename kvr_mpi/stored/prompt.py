"""A stored prompt, and its beginning as a prefix whose keys and values are loaded on demand.

The leader of a chain finds a stored prompt and sends its `StoredPrefix`; each rank opens it and checks what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvr_mpi.errors import DataError
from kvr_mpi.kv.loading import LoadedLayers
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LoadedModel
from kvr_mpi.store.pieces import Piece, open_pieces
from kvr_mpi.store.stored_kv import StoredKV


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A stored prompt; its files stay open as long as this object exists.

    name : the document's id.
    ids : its tokens, and those of its answer.
    text : bounds of the document's text among them.
    """

    files: Any
    name: str
    kv: StoredKV
    ids: tuple[int, ...]
    text: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Where the keys and values of a prompt's first tokens are stored.

    name : the document's id.
    pieces : what makes up its keys and values.
    tokens : how many of the prompt's first tokens.
    compression : by which method and settings its heads have dropped tokens; empty: they hold all.
    """

    name: str
    pieces: tuple[Piece, ...]
    tokens: int
    compression: str = ""

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> StoredPrefix:
        """Reconstruct it from the result of `asdict`, sent as JSON."""
        return cls(**{**plain, "pieces": tuple(Piece(**each) for each in plain["pieces"])})

    def open(self, ids: Sequence[int], loaded: LoadedModel) -> SharedPrefix:
        """Open it as the prefix of a prompt with these ids; layers are read on demand.

        A rank of a tensor-parallel group reads its own KV heads.

        Whatever is wrong raises a `DataError` when the first layer is read: other tokens than these, other keys and
        values than those of `pieces`, another shape or type than the model's, or a block that fails its checksum.

        Parameters
        ----------
        ids : sequence of int
            The prompt's.
        loaded : LoadedModel
        """
        ids = tuple(ids[: self.tokens])
        stored = _opening(self, ids, loaded)
        if self.compression:
            return SharedPrefix(
                ids, (), heads=_head_reader(self, loaded, stored), compression=self.compression, source=self
            )
        read = _row_reader(self, loaded, stored)
        layers = LoadedLayers(len(loaded.shape.layers), lambda number: read(number, 0, len(ids)), loaded.device)
        return SharedPrefix(ids, layers, read=read, source=self)


def open_prompt(name: str, pieces: Sequence[Piece]) -> StoredPrompt:
    """Open a stored prompt.

    Parameters
    ----------
    name : str
        The document's id.
    pieces : sequence of Piece

    Raises
    ------
    DataError
        If it is not there, damaged, other than `pieces` say, or does not say whose keys and values these are.
    """
    for piece in pieces:
        if not Path(piece.path).is_file():
            raise DataError(
                f"{piece.path} existed when the job began, and is gone: the run may have been merged; start the job "
                f"again"
            )
    files = ExitStack()
    kv = open_pieces(name, pieces, files)
    if kv.tokens is None:
        raise DataError(f"{name}: what is stored does not record which tokens its keys and values are of")
    return StoredPrompt(files, name, kv, tuple(kv.tokens.ids), kv.tokens.text)


def _row_reader(
    source: StoredPrefix, loaded: LoadedModel, stored: Callable[[], StoredKV]
) -> Callable[[int, int, int], torch.Tensor | None]:
    """Return a function that reads rows of a layer."""
    heads = _own_heads(loaded)

    def read(number: int, first: int, last: int) -> torch.Tensor | None:
        kv = stored()
        if number not in kv.layers:
            return None
        keys, values = kv.read(number, first, last, heads)
        return torch.cat([keys.flatten(1), values.flatten(1)], 1)

    return read


def _head_reader(
    source: StoredPrefix, loaded: LoadedModel, stored: Callable[[], StoredKV]
) -> Callable[[int], list[tuple[torch.Tensor, torch.Tensor]] | None]:
    """Return a function that reads the rows that compression kept of each head."""
    heads, tokens = _own_heads(loaded), source.tokens

    def read(number: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        kv = stored()
        if number not in kv.layers:
            return None
        rows = kv.rows(number)
        if rows is None:
            keys, values = kv.read(number, 0, tokens, heads)
            return list(zip(keys.unbind(1), values.unbind(1), strict=True))
        keys, values = kv.read(number)
        bounds = rows.bounds_before(tokens)
        if any(first == last for first, last in bounds):
            raise DataError(
                f"{source.name}: a head of layer {number} keeps none of the first {tokens} tokens, up to the end of "
                f"the text, because its compression selected tokens of the question; to ask again, compress with "
                f"observes = 'document'"
            )
        own = slice(*(heads or (None,)))
        return [(keys[first:last, 0], values[first:last, 0]) for first, last in bounds[own]]

    return read


def _own_heads(loaded: LoadedModel) -> tuple[int, int] | None:
    """Range of KV heads on this rank; None for all."""
    return None if loaded.part is None else loaded.part.own_kv_heads


def _opening(source: StoredPrefix, ids: Sequence[int], loaded: LoadedModel) -> Callable[[], StoredKV]:
    """Return a function that opens and checks stored keys and values once."""
    opened: list[StoredPrompt] = []

    def stored() -> StoredKV:
        if not opened:
            found = open_prompt(source.name, source.pieces)
            _check(found, ids, loaded)
            opened.append(found)
        return opened[0].kv

    return stored


def _check(stored: StoredPrompt, ids: Sequence[int], loaded: LoadedModel) -> None:
    """Refuse keys and values of other tokens, shapes or dtypes than the model's."""
    name = stored.name
    if stored.ids[: len(ids)] != tuple(ids):
        raise DataError(
            f"{name}: its stored prompt does not begin with the expected {len(ids)} tokens; the run may have changed: "
            f"start the job again"
        )
    kv, tokens, dtype = stored.kv, len(stored.ids), str(loaded.dtype).removeprefix("torch.")
    for number, shape in enumerate(loaded.shape.layers):
        if not shape.elements:
            continue
        heads = shape.num_kv_heads if loaded.part is None else loaded.part.kv_heads
        has, rows = (kv.format(number), kv.rows(number)) if number in kv.layers else (None, None)
        # What each head keeps of its own has looked at the number of its rows.
        of_one = (tokens, heads) if rows is None else (sum(rows.counts), 1)
        is_right = has == ((*of_one, shape.key_dim), (*of_one, shape.value_dim), dtype)
        if not is_right or (rows is not None and len(rows.counts) != heads):
            raise DataError(
                f"{name}: layer {number} has keys and values {has and tuple(has)}; this model has {heads} heads of "
                f"{shape.key_dim} and {shape.value_dim} elements, {dtype}"
            )
