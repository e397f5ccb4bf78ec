"""When a rank did what, as its device sees it.

A GPU is told what to do long before it does it: between two moments of the host there is what it was told meanwhile,
not what it did. So on a GPU a moment is an event in its stream, and time is read when the stream has passed it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

Kind = Literal["receive", "send"]


class Clock:
    """Moments of a device, and the time between them.

    Parameters
    ----------
    device : torch.device or None
        None: host memory.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._is_gpu = device is not None and device.type == "cuda"

    def now(self) -> Any:
        """Mark where the device has come to with what it was told so far."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """Time between two moments; on a GPU its stream must have passed both."""
        return float(first.elapsed_time(last)) / 1e3 if self._is_gpu else last - first


class Waits:
    """When a rank waited, for what.

    On a GPU: from the moment at which it has done all it was told before the rank waited, to that at which it goes on.
    A rank that waits while its GPU still computes costs nothing.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._spans: list[tuple[Kind, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._spans)

    @contextmanager
    def waiting(self, kind: Kind) -> Iterator[None]:
        """Count the block as waiting."""
        began = self.clock.now()
        yield
        self._spans.append((kind, began, self.clock.now()))

    def seconds(self, kind: Kind | None = None, count: int | None = None) -> float:
        """Time waited, for one kind or all, in the first `count` waits or all."""
        spans = self._spans[:count]
        return sum(self.clock.seconds(began, ended) for of, began, ended in spans if kind in (None, of))


def times_without_waits(marks: Sequence[tuple[Any, int]], clock: Clock, waits: Waits | None) -> list[float]:
    """Seconds from the first of some moments to each of them, excluding wait time.

    Parameters
    ----------
    marks : sequence of (moment, int)
        And how many waits were over then.
    """
    if not marks:
        return []
    times, before = [], 0.0 if waits is None else waits.seconds(count=marks[0][1])
    for moment, count in marks:
        waited_s = 0.0 if waits is None else waits.seconds(count=count) - before
        times.append(clock.seconds(marks[0][0], moment) - waited_s)
    return times
