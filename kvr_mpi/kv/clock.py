"""Times of a rank's layers and waits, measured on its device.

A GPU executes work long after the host has queued it, so the host's clock would measure only the queueing. On a GPU a
timestamp is therefore an event in the stream, read after the stream has passed it.
"""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

import torch

from kvr_mpi.events import Span

Wait = Literal["wait", "send wait"]


class LayerTimes(NamedTuple):
    """What a `Clock` has measured, in seconds.

    spans : of layers and waits, on the clock of ``time.perf_counter``. On a GPU they are as far apart as there, from
        the time at which the first one was queued.
    layers_s : from the start of the first layer to that of each, without waits.
    wait_s, send_wait_s : time waited to receive, and to send.
    """

    spans: list[Span]
    layers_s: list[float]
    wait_s: float
    send_wait_s: float


class Clock:
    """Records the start of layers, and the start and end of waits, in order.

    On a GPU a wait begins when all work queued before it is done, and ends when the rank continues: time in which the
    GPU still computes does not count.

    device : of the work; None: host memory.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._is_gpu = device is not None and device.type == "cuda"
        self._queued_s = 0.0  # when the first mark was queued
        self._marks: list[tuple[Wait | Literal["layer", "continue"], Any, int, int]] = []

    def mark(self, what: Wait | Literal["layer", "continue"], layer_idx: int = -1, peer: int = -1) -> None:
        """Record the start of a layer, or the start or end of a wait, after the work queued so far."""
        moment: Any = time.perf_counter()
        if self._is_gpu:
            self._queued_s = self._queued_s or moment
            moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            moment.record()
        self._marks.append((what, moment, layer_idx, peer))

    def read(self, began_s: float = 0.0, ended_s: float = 0.0) -> LayerTimes:
        """Return what was measured; the stream must have passed all marks.

        began_s, ended_s : the first layer begins, and the last one ends, with the prefill.
        """

        def seconds(moment: Any) -> float:
            if not self._is_gpu:
                return float(moment)
            return self._queued_s + float(self._marks[0][1].elapsed_time(moment)) / 1e3

        times = [seconds(moment) for _, moment, _, _ in self._marks]
        waits, begun, waited_s = list[Span](), list[tuple[int, float, float]](), {"wait": 0.0, "send wait": 0.0}
        for at, (what, _, layer_idx, peer) in enumerate(self._marks):
            if what == "layer":
                begun.append((layer_idx, times[at], sum(waited_s.values())))
            elif what != "continue":  # the next mark ends the wait
                waited_s[what] += times[at + 1] - times[at]
                waits.append(Span(what, times[at], times[at + 1], layer=layer_idx, peer=peer))
        edges = [began_s, *(at_s for _, at_s, _ in begun[1:]), max(ended_s, times[-1] if times else 0.0)]
        layers = [
            Span("layer", edges[at], edges[at + 1], layer=layer_idx) for at, (layer_idx, _, _) in enumerate(begun)
        ]
        layers_s = [at_s - begun[0][1] - (before_s - begun[0][2]) for _, at_s, before_s in begun]
        return LayerTimes([*layers, *waits], layers_s, waited_s["wait"], waited_s["send wait"])
