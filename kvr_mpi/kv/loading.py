"""Keys and values that come from a file, layer by layer, while the model computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

# Layers to read ahead.
LAYERS_AHEAD = 3
# Layers to keep: the prompts of a packed row ask for a layer one after the other, a few layers ahead of computing.
LAYERS_KEPT = 8


class LoadedLayers:
    """The layers of a `SharedPrefix`: read on demand, with the next ones read ahead, and dropped afterwards.

    When the next prompt asks for an earlier layer again, that layer is read again.

    count : how many layers there are.
    load : reads a layer (tokens, elements of K and V of all heads), or returns None if it has none. A background thread
        calls it, one layer at a time; `__getitem__` raises its errors.
    device : where the caller copies the layers to. For a GPU, layers are in page-locked memory, from which copies are
        asynchronous: other copies would wait for all queued work, in every layer.
    """

    def __init__(
        self, count: int, load: Callable[[int], torch.Tensor | None], device: torch.device | None = None
    ) -> None:
        self._count = count
        gpu = device if device is not None and device.type == "cuda" else None
        self._load = load if gpu is None else partial(_load_locked, load)
        # A thread would use GPU 0, and create a context there.
        begin = (None, ()) if gpu is None else (torch.cuda.set_device, (gpu,))
        self._pool = ThreadPoolExecutor(1, "kvr-loading", *begin)
        self._layers: dict[int, Future[torch.Tensor | None]] = {}

    def __getitem__(self, at: int) -> torch.Tensor | None:
        """Return a layer's rows, waiting for them if needed."""
        for layer in range(at, min(at + 1 + LAYERS_AHEAD, self._count)):
            if layer not in self._layers:
                self._layers[layer] = self._pool.submit(self._load, layer)
        first, last = at - LAYERS_KEPT, at + LAYERS_AHEAD
        for layer in [layer for layer in self._layers if not first <= layer <= last]:
            self._layers.pop(layer).cancel()
        try:
            return self._layers[at].result()
        except BaseException:
            del self._layers[at]  # so that it can be read again: more memory may be free then
            raise


def _load_locked(load: Callable[[int], torch.Tensor | None], layer: int) -> torch.Tensor | None:
    """Read a layer into page-locked memory."""
    rows = load(layer)
    return None if rows is None else rows.pin_memory()
