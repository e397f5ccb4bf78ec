"""One stored prompt, and its beginning as a prefix whose keys and values are loaded when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvr_mpi.errors import DataError
from kvr_mpi.kv.loading import LoadedLayers
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LoadedModel
from kvr_mpi.store.hdf5 import explained, group_in, hold_open
from kvr_mpi.store.kv import StoredKV, open_whole_kv
from kvr_mpi.store.outputs import Record, read_record


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt in a file that is open as long as this is held.

    ids : its tokens, and those of its answer.
    text : bounds of the document's text among them.
    """

    file: Any
    record: Record
    kv: StoredKV
    ids: tuple[int, ...]
    text: tuple[int, int]


def open_prompt(path: Path, key: str) -> StoredPrompt:
    """Open a stored prompt.

    Raises
    ------
    DataError
        If it is not there, damaged, or does not say whose keys and values these are.
    """
    if not path.is_file():
        raise DataError(f"{path} was there when the batch began, and is gone: was the run merged meanwhile?")
    file = hold_open(path)
    with explained(path):
        group = group_in(group_in(file, "documents"), key)
        record, kv = read_record(group), open_whole_kv(group)
    if kv.tokens is None:
        raise DataError(f"{path}:/documents/{key} does not say whose keys and values it has")
    return StoredPrompt(file, record, kv, tuple(kv.tokens.ids), kv.tokens.text)


def prefix_of(
    ids: Sequence[int], loaded: LoadedModel, open_stored: Callable[[], StoredPrompt], path: Path
) -> SharedPrefix:
    """Make a prefix of what is stored; nothing is looked at before its first layer is asked for.

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
    opened: list[StoredPrompt] = []

    def read(number: int, first: int, last: int) -> torch.Tensor | None:
        if not opened:
            stored = open_stored()
            _check(stored, ids, loaded)
            opened.append(stored)
        layer = next((one for one in opened[0].kv.layers if one.number == number), None)
        if layer is None:
            return None
        with explained(path):
            keys, values = layer.read(first, last)
        return torch.cat([keys.flatten(1), values.flatten(1)], 1)

    layers = LoadedLayers(len(loaded.shape.layers), lambda number: read(number, 0, len(ids)))
    return SharedPrefix(tuple(ids), layers, read=read)


def _check(stored: StoredPrompt, ids: Sequence[int], loaded: LoadedModel) -> None:
    """Refuse keys and values of other tokens, or of another shape or type than the model's."""
    name = stored.record.id
    if stored.ids[: len(ids)] != tuple(ids):
        raise DataError(f"{name}: its stored prompt does not begin with these {len(ids)} tokens; did the run change?")
    tokens, found = len(stored.ids), {layer.number: layer for layer in stored.kv.layers}
    dtype = str(loaded.dtype).removeprefix("torch.")
    for number, shape in enumerate(loaded.shape.layers):
        if not shape.elements:
            continue
        layer, heads = found.get(number), shape.num_kv_heads
        has = None if layer is None else (layer.keys.shape, layer.values.shape, layer.keys.type_name)
        if has != ((tokens, heads, shape.key_dim), (tokens, heads, shape.value_dim), dtype):
            raise DataError(
                f"{name}: layer {number} has keys and values {has}; this model's are of {heads} heads, "
                f"{shape.key_dim} and {shape.value_dim} elements, {dtype}"
            )
