"""Times of a rank's layers and waits, measured on its device.

A GPU executes work long after the host has queued it, so the host's clock would measure only the queueing. On a GPU a
timestamp is therefore an event in the stream, read after the stream has passed it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Kind = Literal["receive", "send"]


class Clock:
    """Records when a rank began each layer of a prompt, and when and why it waited.

    On a GPU a wait begins when all work queued before it is done, and ends when the rank continues: time in which the
    GPU still computes does not count.

    Parameters
    ----------
    device : torch.device or None
        None: host memory.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._is_gpu = device is not None and device.type == "cuda"
        self._layers: list[tuple[Any, int]] = []  # when each began, and after how many waits
        self._waits: list[tuple[Kind, Any, Any]] = []

    def now(self) -> Any:
        """Record an event after the work queued so far."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def begin_layers(self, count: int) -> None:
        """Record one start for `count` layers; layers without keys and values start with the next that has them."""
        self._layers += [(self.now(), len(self._waits))] * count

    @contextmanager
    def waiting(self, kind: Kind) -> Iterator[None]:
        """Count the time of a block as waiting."""
        began = self.now()
        yield
        self._waits.append((kind, began, self.now()))

    def waited_s(self, kind: Kind | None = None, count: int | None = None) -> float:
        """Seconds waited for one kind or all, in the first `count` waits or all; the stream must have passed them."""
        waits = self._waits[:count]
        return sum((self._between_s(began, ended) for of, began, ended in waits if kind in (None, of)), 0.0)

    @property
    def layer_begins_s(self) -> list[float]:
        """Start of each layer on the clock of time.perf_counter; empty on a GPU, which runs asynchronously."""
        return [] if self._is_gpu else [moment for moment, _ in self._layers]

    @property
    def layer_times_s(self) -> list[float]:
        """Seconds from the start of the first layer to that of each, without waits."""
        if not self._layers:
            return []
        first, waited_s = self._layers[0][0], [self.waited_s(count=count) for _, count in self._layers]
        return [
            self._between_s(first, moment) - (waited - waited_s[0])
            for (moment, _), waited in zip(self._layers, waited_s, strict=True)
        ]

    def _between_s(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3 if self._is_gpu else last - first
