"""Buffers for keys and values during prefill: token-major rows, one buffer per layer.

A rank reuses the few buffers that are in flight. On a CPU, buffers are memory maps outside the C library's heap, which
is left to activations (see `runtime.host_memory.keep_heap`); their pages go back to the system when they are freed.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any

import torch

from kvr_mpi.model import LayerShape


@dataclass(eq=False)
class LayerBuffers:
    """Buffers (capacity, elements of K and V of all heads) for the layers of one prompt on one rank.

    elements : of K and V of all heads, in the largest layer.
    capacity : tokens a buffer holds.
    """

    elements: int
    capacity: int
    dtype: torch.dtype
    device: torch.device
    _free: list[tuple[torch.Tensor, Any]] = field(default_factory=list)  # with the event after which each is free

    def take(self, shape: LayerShape) -> tuple[torch.Tensor, Any]:
        """Return an uninitialized buffer for a layer; on a GPU also the event after which no earlier work uses it."""
        if not self._free:
            self._free.append((make_flat(self.capacity * self.elements, self.dtype, self.device), self._now()))
        flat, free = self._free.pop()
        return flat[: self.capacity * shape.elements].view(self.capacity, shape.elements), free

    def give_back(self, buffer: torch.Tensor) -> None:
        """Mark a buffer as free for reuse; on a GPU it is free when the work queued so far is done."""
        self._free.append((torch.as_strided(buffer, (self.capacity * self.elements,), (1,)), self._now()))

    def scratch(self, rows: int) -> torch.Tensor:
        """Allocate memory for `rows` rows of any layer, after freeing everything else."""
        self.clear()
        return torch.empty(rows * self.elements, dtype=self.dtype, device=self.device)

    def clear(self) -> None:
        """Drop all buffers; memory that no layer references goes back to the system."""
        self._free.clear()

    def _now(self) -> Any:
        """Record an event after the work queued so far; None on a CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


def make_flat(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialized tensor (count,) whose memory goes back to the system when it is freed.

    Raises `MemoryError` or `torch.OutOfMemoryError` if there is no memory for it.
    """
    if device.type != "cpu" or not count:
        return torch.empty(count, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {count * dtype.itemsize} bytes for keys and values: {error}") from error
    return torch.frombuffer(memory, dtype=dtype)
