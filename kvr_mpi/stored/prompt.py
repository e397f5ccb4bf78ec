"""One stored prompt, and its beginning as a prefix whose keys and values are loaded when they are needed.

The leader of a chain finds a stored prompt and sends its `StoredPrefix`; each rank opens it and checks what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvr_mpi.errors import DataError
from kvr_mpi.kv.loading import LoadedLayers
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LoadedModel
from kvr_mpi.store.hdf5 import explained, group_in, hold_open
from kvr_mpi.store.joined import read_layer
from kvr_mpi.store.outputs import Record, read_record
from kvr_mpi.store.parts import PartIndexes, WholeKV, WholeLayer, open_whole_kv


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt in files that are open as long as this is held.

    ids : its tokens, and those of its answer.
    text : bounds of the document's text among them.
    """

    files: Any
    record: Record
    kv: WholeKV
    ids: tuple[int, ...]
    text: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Where the keys and values of a prompt's first tokens are stored.

    path, key : HDF5 file, and the document's group in it.
    tokens : how many of the prompt's first tokens.
    seal : hash of what is stored there (`WholeKV.seal`).
    compression : by which method and settings its heads have dropped tokens; empty: they hold all.
    """

    path: str
    key: str
    tokens: int
    seal: str
    compression: str = ""

    def open(self, ids: Sequence[int], loaded: LoadedModel, parts: PartIndexes) -> SharedPrefix:
        """Make a prefix of what is stored, for a prompt with these ids; nothing is read before its first layer is.

        A rank of a tensor-parallel group reads its own KV heads.

        Whatever is wrong raises a `DataError` when the first layer is read: other tokens than these, other keys and
        values than those of `seal`, another shape or type than the model's, or a block that fails its checksum.

        Parameters
        ----------
        ids : sequence of int
            The prompt's.
        loaded : LoadedModel
        parts : PartIndexes
            Where keys and values are, if every rank wrote its own.
        """
        ids = tuple(ids[: self.tokens])
        open_layer = _opening(self, ids, loaded, parts)
        if self.compression:
            return SharedPrefix(
                ids, (), heads=_head_reader(self, loaded, open_layer), compression=self.compression, source=self
            )
        read = _row_reader(self, loaded, open_layer)
        layers = LoadedLayers(len(loaded.shape.layers), lambda number: read(number, 0, len(ids)), loaded.device)
        return SharedPrefix(ids, layers, read=read, source=self)


def open_prompt(path: Path, key: str, parts: PartIndexes) -> StoredPrompt:
    """Open a stored prompt.

    Parameters
    ----------
    parts : PartIndexes
        Where its keys and values are, if every rank wrote its own.

    Raises
    ------
    DataError
        If it is not there, damaged, or does not say whose keys and values these are.
    """
    if not path.is_file():
        raise DataError(
            f"{path} existed when the job began, and is gone: the run may have been merged; start the job again"
        )
    file, others = hold_open(path), ExitStack()
    with explained(path):
        group = group_in(group_in(file, "documents"), key)
        record, kv = read_record(group), open_whole_kv(group, parts, others)
    if kv.tokens is None:
        raise DataError(f"{path}:/documents/{key} does not record which tokens its keys and values are of")
    return StoredPrompt((file, others), record, kv, tuple(kv.tokens.ids), kv.tokens.text)


def _row_reader(
    source: StoredPrefix, loaded: LoadedModel, open_layer: Callable[[int], WholeLayer | None]
) -> Callable[[int, int, int], torch.Tensor | None]:
    """Return what reads rows of a layer."""
    heads = _own_heads(loaded)

    def read(number: int, first: int, last: int) -> torch.Tensor | None:
        layer = open_layer(number)
        if layer is None:
            return None
        with explained(Path(source.path)):
            keys, values = read_layer(layer, first, last, heads)
        return torch.cat([keys.flatten(1), values.flatten(1)], 1)

    return read


def _head_reader(
    source: StoredPrefix, loaded: LoadedModel, open_layer: Callable[[int], WholeLayer | None]
) -> Callable[[int], list[tuple[torch.Tensor, torch.Tensor]] | None]:
    """Return what reads the rows that compression has kept of each head."""
    own, path, tokens = slice(*(_own_heads(loaded) or (None,))), Path(source.path), source.tokens

    def read(number: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        layer = open_layer(number)
        if layer is None:
            return None
        with explained(path):
            if layer.rows is None:
                keys, values = layer.read(0, tokens)
                return list(zip(keys.unbind(1), values.unbind(1), strict=True))[own]
            keys, values = layer.read()
        bounds = layer.rows.bounds_before(tokens)
        if any(first == last for first, last in bounds):
            raise DataError(
                f"{path}: a head of layer {number} keeps none of the first {tokens} tokens, up to the end of the text, "
                f"because its compression selected tokens of the question; to ask again, compress with observes = "
                f"'document'"
            )
        return [(keys[first:last, 0], values[first:last, 0]) for first, last in bounds[own]]

    return read


def _own_heads(loaded: LoadedModel) -> tuple[int, int] | None:
    """First and last KV head, not included, that this rank has; None: all."""
    return None if loaded.part is None else loaded.part.own_kv_heads


def _opening(
    source: StoredPrefix, ids: Sequence[int], loaded: LoadedModel, parts: PartIndexes
) -> Callable[[int], WholeLayer | None]:
    """Return what finds layers of a stored prompt, which is opened and checked when the first is asked for."""
    opened: list[StoredPrompt] = []

    def open_layer(number: int) -> WholeLayer | None:
        if not opened:
            stored = open_prompt(Path(source.path), source.key, parts)
            if stored.kv.seal() != source.seal:
                raise DataError(f"{stored.record.id}: its stored keys and values have changed since the job began")
            _check(stored, ids, loaded)
            opened.append(stored)
        return next((one for one in opened[0].kv.layers if one.number == number), None)

    return open_layer


def _check(stored: StoredPrompt, ids: Sequence[int], loaded: LoadedModel) -> None:
    """Refuse keys and values of other tokens, or of another shape or type than the model's."""
    name = stored.record.id
    if stored.ids[: len(ids)] != tuple(ids):
        raise DataError(
            f"{name}: its stored prompt does not begin with the expected {len(ids)} tokens; the run may have changed: "
            f"start the job again"
        )
    tokens, found = len(stored.ids), {layer.number: layer for layer in stored.kv.layers}
    dtype = str(loaded.dtype).removeprefix("torch.")
    for number, shape in enumerate(loaded.shape.layers):
        if not shape.elements:
            continue
        layer, heads = found.get(number), shape.num_kv_heads if loaded.part is None else loaded.part.kv_heads
        has = None if layer is None else (layer.keys.shape, layer.values.shape, layer.keys.type_name)
        rows = None if layer is None else layer.rows
        if rows is not None:  # which has looked at the number of its rows
            of_one = sum(rows.counts), 1
            is_right = has == ((*of_one, shape.key_dim), (*of_one, shape.value_dim), dtype)
            is_right &= len(rows.counts) == heads
        else:
            is_right = has == ((tokens, heads, shape.key_dim), (tokens, heads, shape.value_dim), dtype)
        if not is_right:
            raise DataError(
                f"{name}: layer {number} has keys and values {has}; this model has {heads} heads of {shape.key_dim} "
                f"and {shape.value_dim} elements, {dtype}"
            )
