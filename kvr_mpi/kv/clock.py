"""Times of a rank's layers and waits, measured on its device.

A GPU executes work long after the host has queued it, so the host's clock would measure only the queueing. On a GPU a
timestamp is therefore an event in the stream, read after the stream has passed it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Wait = Literal["receive", "send"]


@dataclass(slots=True)
class Clock:
    """Records the start of layers and of waits, and the end of waits, in order.

    On a GPU a wait begins when all work queued before it is done, and ends when the rank continues: time in which the
    GPU still computes does not count.

    device : of the work; None: host memory.
    """

    device: torch.device | None
    _marks: list[tuple[Wait | Literal["layer", "go on"], Any]] = field(default_factory=list)

    def mark(self, what: Wait | Literal["layer", "go on"], count: int = 1) -> None:
        """Record the start of `count` layers, or the start or end of a wait, after the work queued so far."""
        moment: Any = time.perf_counter()
        if self.device is not None and self.device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            moment.record()
        self._marks += [(what, moment)] * count

    def read(self) -> tuple[list[float], list[float], float, float]:
        """Return times in seconds; the stream must have passed all marks.

        Returns the start of each layer, on the clock of time.perf_counter (empty on a GPU, which runs asynchronously);
        the time from the start of the first layer to that of each, without waits; the time waited to receive, and to
        send.
        """
        layers, waited_s = list[tuple[Any, float]](), {"receive": 0.0, "send": 0.0}
        is_gpu = self.device is not None and self.device.type == "cuda"

        def seconds(first: Any, last: Any) -> float:
            return float(first.elapsed_time(last)) / 1e3 if is_gpu else last - first

        for at, (what, moment) in enumerate(self._marks):
            if what == "layer":
                layers.append((moment, sum(waited_s.values())))
            elif what != "go on":  # the next mark ends the wait
                waited_s[what] += seconds(moment, self._marks[at + 1][1])
        return (
            [] if is_gpu else [moment for moment, _ in layers],
            [seconds(layers[0][0], moment) - (before_s - layers[0][1]) for moment, before_s in layers],
            waited_s["receive"],
            waited_s["send"],
        )
