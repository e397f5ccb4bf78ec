"""Computations taken down as CUDA graphs: launched again as a whole, on the same tensors.

A kernel is launched by the host, one by one; where kernels are short, launching them takes longer than running them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

# Runs before a capture: kernels are loaded and chosen, and libraries take their memory, when they run first.
WARM_UPS = 2

Compute = Callable[[], torch.Tensor]
Replay = Callable[[], object]


class Capture(Protocol):
    """How a computation is taken down."""

    def __call__(self, compute: Compute) -> tuple[Replay, torch.Tensor]:
        """Run it; return what runs it again, on the same tensors, and the result that is written then."""


class GraphCapture:
    """Take computations down as CUDA graphs of one GPU, which share their memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> tuple[Replay, torch.Tensor]:
        """Capture on a stream of its own, after some runs there.

        Not by ``torch.cuda.graph``, which waits for the whole GPU, transfers included that wait for other ranks. What
        other threads do meanwhile (writers copy, forwarders send) is theirs: ``thread_local``.
        """
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    compute()
                result = self._captured(graph, compute)
        finally:  # what failed is let go of, and its memory used again here
            current.wait_stream(self._stream)
        return graph.replay, result

    def _captured(self, graph: Any, compute: Compute) -> torch.Tensor:
        """Capture on the current stream; leave it, and the allocator, as they were if that fails."""
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            result = compute()
            graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it says again that the capture has failed
                graph.capture_end()
            self._end_allocations()
            raise
        return result

    def _end_allocations(self) -> None:
        """Tell torch's allocator that a capture is over, which one that fails leaves undone.

        Until it is told it gives no memory back: ``empty_cache`` fails, and memory that runs out is not looked for.
        """
        try:
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        except RuntimeError:  # it was told: the capture ended well, and what came then failed
            return
        torch._C._cuda_releasePool(self._device.index, self._pool)


def call_again(compute: Compute) -> tuple[Replay, torch.Tensor]:
    """Take nothing down: where there are no graphs the computation itself is run again."""
    result = compute()
    return lambda: result.copy_(compute()), result
