"""Buffers for keys and values during prefill: token-major rows, one buffer per layer.

The rank that keeps all layers allocates one block for them at once: allocated layer by layer, buffers would alternate
with activations and fragment memory. The other ranks reuse the few buffers that are in flight. On a CPU, buffers are
memory maps outside the C library's heap, which is left to activations (see `setup.host_memory.keep_heap`); their pages
go back to the system when they are freed.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch

from kvr_mpi.model import LayerShape


class LayerBuffers:
    """Buffers (capacity, elements of K and V of all heads) for the layers of one prompt on one rank.

    Parameters
    ----------
    shapes : sequence of LayerShape
        Of the layers that will be filled.
    capacity : int
        Tokens a buffer holds.
    keeps : bool
        Whether this rank keeps all layers.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        capacity: int,
        *,
        keeps: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes, self._capacity, self._dtype, self._device = shapes, capacity, dtype, device
        self._free: list[tuple[torch.Tensor, Any]] = []  # with the event after which each is free
        self._keeps = keeps
        self._all: torch.Tensor | None = None
        self._pages: mmap.mmap | None = None  # the map of the last allocation: with `keeps`, of all layers
        self._whole_free: Any = None  # the event after which `_all` is free
        self._taken = 0  # elements of `_all` in use

    def take(self, shape: LayerShape) -> tuple[torch.Tensor, Any]:
        """Return an uninitialised buffer for a layer; on a GPU also the event after which no earlier work uses it."""
        size = self._capacity * shape.elements
        if self._keeps:
            if self._all is None:
                self._all, self._whole_free = self._make(sum(shape.elements for shape in self._shapes)), self._now()
            self._taken += size
            flat, free = self._all[self._taken - size : self._taken], self._whole_free
        elif self._free:
            flat, free = self._free.pop()
        else:
            flat, free = self._make(max(shape.elements for shape in self._shapes)), self._now()
        return flat[:size].view(self._capacity, shape.elements), free

    def give_back(self, buffer: torch.Tensor) -> None:
        """Mark a buffer as free for reuse; on a CPU rank that keeps all layers, return its pages to the system.

        The contents of the buffer are undefined afterwards. On a GPU it is free when the work queued so far is done.
        """
        if self._keeps:
            self._discard(buffer)
            return
        whole = self._capacity * max(shape.elements for shape in self._shapes)
        self._free.append((torch.as_strided(buffer, (whole,), (1,)), self._now()))

    def scratch(self, rows: int, count: int) -> list[torch.Tensor]:
        """Allocate `count` buffers of `rows` rows of any layer, after freeing everything else."""
        self.clear()
        elements = max(shape.elements for shape in self._shapes)
        return list(torch.empty(count, rows * elements, dtype=self._dtype, device=self._device))

    def clear(self) -> None:
        """Drop all buffers; memory that no layer references goes back to the system."""
        self._all = self._pages = None
        self._free.clear()

    def _now(self) -> Any:
        """Record an event after the work queued so far; None on a CPU."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def _discard(self, buffer: torch.Tensor) -> None:
        """Return the pages of one kept layer to the system before the whole allocation is freed."""
        if self._pages is None or self._all is None:
            return
        start = buffer.data_ptr() - self._all.data_ptr()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + buffer.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _make(self, elements: int) -> torch.Tensor:
        flat, self._pages = _make_flat(self._capacity * elements, self._dtype, self._device)
        return flat


def make_flat(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialised tensor (count,) whose memory goes back to the system when it is freed.

    Raises
    ------
    MemoryError, torch.OutOfMemoryError
        If there is no memory for it.
    """
    return _make_flat(count, dtype, device)[0]


def _make_flat(count: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, mmap.mmap | None]:
    """Allocate a tensor (count,); on a CPU also return the memory map that backs it."""
    if device.type != "cpu" or not count:
        return torch.empty(count, dtype=dtype, device=device), None
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {count * dtype.itemsize} bytes for keys and values: {error}") from error
    return torch.frombuffer(memory, dtype=dtype), memory
