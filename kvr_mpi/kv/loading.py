"""Keys and values that come from a file, layer by layer, while the model computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial

import torch

from kvr_mpi.kv.sequence import StoredRows

# Layers to read ahead.
LAYERS_AHEAD = 3
# Layers to keep: the prompts of a packed row ask for a layer one after the other, a few layers ahead of computing.
LAYERS_KEPT = 8


class LoadedLayers:
    """The layers of a stored sequence: read on demand, with the next ones read ahead, and dropped afterwards.

    When the next prompt asks for an earlier layer again, that layer is read again.

    count : how many layers there are.
    load : reads a layer (`StoredRows`). A background thread
        calls it, one layer at a time; `__getitem__` raises its errors.
    device : where the caller copies the layers to. For a GPU, layers are in page-locked memory, from which copies are
        asynchronous: other copies would wait for all queued work, in every layer.
    """

    def __init__(self, count: int, load: Callable[[int], StoredRows], device: torch.device | None = None) -> None:
        self._count = count
        gpu = device if device is not None and device.type == "cuda" else None
        self._load = load if gpu is None else partial(_load_locked, load)
        self._gpu = gpu
        self._layers: dict[int, Future[StoredRows]] = {}

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # A thread would use GPU 0, and create a context there.
        begin = (None, ()) if self._gpu is None else (torch.cuda.set_device, (self._gpu,))
        return ThreadPoolExecutor(1, "kvr-loading", *begin)

    def __getitem__(self, at: int) -> StoredRows:
        """Return a layer's rows, waiting for them if needed."""
        for layer in range(at, min(at + 1 + LAYERS_AHEAD, self._count)):
            if layer not in self._layers:
                self._layers[layer] = self._threads.submit(self._load, layer)
        first, last = at - LAYERS_KEPT, at + LAYERS_AHEAD
        for layer in [layer for layer in self._layers if not first <= layer <= last]:
            self._layers.pop(layer).cancel()
        try:
            return self._layers[at].result()
        except BaseException:
            del self._layers[at]  # so that it can be read again: more memory may be free then
            raise


def _load_locked(load: Callable[[int], StoredRows], layer: int) -> StoredRows:
    """Read a layer into page-locked memory."""
    rows = load(layer)
    if rows is None or isinstance(rows, torch.Tensor):
        return None if rows is None else rows.pin_memory()
    return [(keys.pin_memory(), values.pin_memory()) for keys, values in rows]
