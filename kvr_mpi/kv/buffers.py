"""Buffers for keys and values during prefill: token-major rows, one buffer per layer.

The rank that keeps all layers allocates one block for them at once: allocated layer by layer, buffers would alternate
with activations and fragment memory. The other ranks reuse the few buffers that are in flight. On a CPU, buffers are
memory maps outside the C library's heap, which is left to activations (see `setup.host_memory.keep_heap`); their pages
go back to the system when they are freed.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvr_mpi.model import LayerShape


@dataclass(eq=False)
class LayerBuffers:
    """Buffers (capacity, elements of K and V of all heads) for the layers of one prompt on one rank.

    shapes : of the layers that will be filled.
    capacity : tokens a buffer holds.
    keeps : whether this rank keeps all layers.
    """

    shapes: Sequence[LayerShape]
    capacity: int
    dtype: torch.dtype
    device: torch.device
    keeps: bool
    _free: list[tuple[torch.Tensor, Any]] = field(default_factory=list)  # with the event after which each is free
    _pages: mmap.mmap | None = None  # the memory of all kept layers, and its address
    _address: int = 0

    def take(self, shape: LayerShape) -> tuple[torch.Tensor, Any]:
        """Return an uninitialised buffer for a layer; on a GPU also the event after which no earlier work uses it."""
        if not self._free:
            sizes = [self.capacity * each.elements for each in self.shapes]
            block, self._pages = make_flat(sum(sizes) if self.keeps else max(sizes), self.dtype, self.device)
            self._address = block.data_ptr()
            parts = torch.split(block, sizes) if self.keeps else [block]  # kept layers are taken in order
            self._free = [(part, self._now()) for part in reversed(parts) if len(part)]
        flat, free = self._free.pop()
        return flat[: self.capacity * shape.elements].view(self.capacity, shape.elements), free

    def give_back(self, buffer: torch.Tensor) -> None:
        """Mark a buffer as free for reuse; on a CPU rank that keeps all layers, return its pages to the system.

        The contents of the buffer are undefined afterwards. On a GPU it is free when the work queued so far is done.
        """
        if not self.keeps:
            whole = self.capacity * max(shape.elements for shape in self.shapes)
            self._free.append((torch.as_strided(buffer, (whole,), (1,)), self._now()))
        elif self._pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            start = buffer.data_ptr() - self._address
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            last = (start + buffer.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)

    def scratch(self, rows: int, count: int) -> list[torch.Tensor]:
        """Allocate `count` buffers of `rows` rows of any layer, after freeing everything else."""
        self.clear()
        elements = max(shape.elements for shape in self.shapes)
        return list(torch.empty(count, rows * elements, dtype=self.dtype, device=self.device))

    def clear(self) -> None:
        """Drop all buffers; memory that no layer references goes back to the system."""
        self._pages = None
        self._free.clear()

    def _now(self) -> Any:
        """Record an event after the work queued so far; None on a CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


def make_flat(count: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, mmap.mmap | None]:
    """Allocate an uninitialised tensor (count,) whose memory goes back to the system when it is freed.

    On a CPU, also return the memory map that holds it.

    Raises `MemoryError` or `torch.OutOfMemoryError` if there is no memory for it.
    """
    if device.type != "cpu" or not count:
        return torch.empty(count, dtype=dtype, device=device), None
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {count * dtype.itemsize} bytes for keys and values: {error}") from error
    return torch.frombuffer(memory, dtype=dtype), memory
