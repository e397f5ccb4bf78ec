"""One stored prompt, and its beginning as a prefix whose keys and values are loaded when they are needed."""

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


def prefix_of(
    ids: Sequence[int], loaded: LoadedModel, open_stored: Callable[[], StoredPrompt], path: Path
) -> SharedPrefix:
    """Make a prefix of what is stored; nothing is looked at before its first layer is asked for.

    A rank of a stage has its KV heads only; of what ranks wrote in pieces it reads those that have some of them.

    Whatever is wrong with it comes out then, as a `DataError`: other tokens than these, keys and values of another
    shape or type than the model's, blocks that are not what was written.

    Parameters
    ----------
    ids : sequence of int
        The tokens.
    open_stored : callable
        Gives the stored prompt that begins with them.
    path : Path
        Its file, for messages.
    """
    open_layer, heads = _opening(ids, loaded, open_stored), _own_heads(loaded)

    def read(number: int, first: int, last: int) -> torch.Tensor | None:
        layer = open_layer(number)
        if layer is None:
            return None
        with explained(path):
            keys, values = read_layer(layer, first, last, heads)
        return torch.cat([keys.flatten(1), values.flatten(1)], 1)

    layers = LoadedLayers(len(loaded.shape.layers), lambda number: read(number, 0, len(ids)), loaded.device)
    return SharedPrefix(tuple(ids), layers, read=read)


def compressed_prefix_of(
    ids: Sequence[int], loaded: LoadedModel, open_stored: Callable[[], StoredPrompt], path: Path, compression: str
) -> SharedPrefix:
    """Make a prefix of what compression has left, as `prefix_of`: of each head the rows of these tokens."""
    open_layer, own = _opening(ids, loaded, open_stored), slice(*(_own_heads(loaded) or (None,)))

    def read(number: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        layer = open_layer(number)
        if layer is None:
            return None
        with explained(path):
            if layer.rows is None:
                keys, values = layer.read(0, len(ids))
                return list(zip(keys.unbind(1), values.unbind(1), strict=True))[own]
            keys, values = layer.read()
        bounds = layer.rows.bounds_before(len(ids))
        if any(first == last for first, last in bounds):
            raise DataError(
                f"{path}: a head of layer {number} keeps none of the first {len(ids)} tokens, up to the end of the "
                f"text, because its compression selected tokens of the question; to ask again, compress with observes "
                f"= 'document'"
            )
        return [(keys[first:last, 0], values[first:last, 0]) for first, last in bounds[own]]

    return SharedPrefix(tuple(ids), (), heads=read, compression=compression)


def _own_heads(loaded: LoadedModel) -> tuple[int, int] | None:
    """First and last KV head, not included, that this rank has; None: all."""
    return None if loaded.part is None else loaded.part.own_kv_heads


def _opening(
    ids: Sequence[int], loaded: LoadedModel, open_stored: Callable[[], StoredPrompt]
) -> Callable[[int], WholeLayer | None]:
    """Find layers of a stored prompt, which is opened and looked at when the first is asked for."""
    opened: list[StoredPrompt] = []

    def open_layer(number: int) -> WholeLayer | None:
        if not opened:
            stored = open_stored()
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
