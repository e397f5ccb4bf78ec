"""Keys and values that come from a file, layer by layer, while the model computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import overload

import torch

# Layers read before they are asked for.
LAYERS_AHEAD = 3
# Layers kept: prompts of one row go through the layers together, each a few layers ahead of its computing.
LAYERS_KEPT = 8


class LoadedLayers(Sequence["torch.Tensor | None"]):
    """The layers of a `SharedPrefix`, read when they are needed, the next ones meanwhile, and forgotten afterwards.

    Asking for an earlier layer again, for the next prompt, begins anew.

    Parameters
    ----------
    count : int
        How many layers there are.
    load : callable
        Reads a layer (tokens, elements of K and V of all heads), or gives None if it keeps none; called in a thread of
        its own, one layer at a time. What it raises comes out where the layer is asked for.
    device : torch.device, optional
        Where the layers are copied to. For a GPU they come in page-locked memory, out of which it copies by itself: any
        other copy waits for all that the GPU was told before, in every layer.
    """

    def __init__(
        self, count: int, load: Callable[[int], torch.Tensor | None], device: torch.device | None = None
    ) -> None:
        self._count = count
        gpu = device if device is not None and device.type == "cuda" else None
        self._load = load if gpu is None else partial(_load_locked, load)
        self._pool = ThreadPoolExecutor(1, "kvr-loading", initializer=_begin_thread, initargs=(gpu,))
        self._layers: dict[int, Future[torch.Tensor | None]] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> torch.Tensor | None: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[torch.Tensor | None]: ...

    def __getitem__(self, at: int | slice) -> torch.Tensor | None | Sequence[torch.Tensor | None]:
        """Return a layer's rows, waiting for them if need be."""
        if isinstance(at, slice):
            return [self[layer] for layer in range(*at.indices(self._count))]
        if not 0 <= at < self._count:
            raise IndexError(at)
        for layer in range(at, min(at + 1 + LAYERS_AHEAD, self._count)):
            if layer not in self._layers:
                self._layers[layer] = self._pool.submit(self._load, layer)
        first, last = at - LAYERS_KEPT, at + LAYERS_AHEAD
        for layer in [layer for layer in self._layers if not first <= layer <= last]:
            self._layers.pop(layer).cancel()
        try:
            return self._layers[at].result()
        except BaseException:
            del self._layers[at]  # whoever asks again may have more luck: with memory, for one
            raise


def _begin_thread(gpu: torch.device | None) -> None:
    """Let a thread have its rank's GPU: otherwise that is GPU 0, with a context of its own there."""
    if gpu is not None:
        torch.cuda.set_device(gpu)


def _load_locked(load: Callable[[int], torch.Tensor | None], layer: int) -> torch.Tensor | None:
    """Read a layer into page-locked memory."""
    rows = load(layer)
    return None if rows is None else rows.pin_memory()
