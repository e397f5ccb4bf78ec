"""Time without waits, by a clock that the test turns."""

from __future__ import annotations

from typing import Any

from kvr_mpi.kv.clock import Clock, Waits, times_without_waits


class Turned(Clock):
    """Shows what the test sets."""

    def __init__(self) -> None:
        super().__init__(None)
        self.at = 0.0

    def now(self) -> Any:
        return self.at


def test_waits_are_told_apart_and_left_out() -> None:
    clock = Turned()
    waits, marks = Waits(clock), []
    for layer_s, receive_s, send_s in ((2.0, 1.0, 0.0), (3.0, 0.5, 4.0), (2.0, 0.25, 0.0)):
        marks.append((clock.now(), len(waits)))
        with waits.waiting("receive"):
            clock.at += receive_s
        clock.at += layer_s
        with waits.waiting("send"):
            clock.at += send_s
    assert (waits.seconds("receive"), waits.seconds("send"), waits.seconds()) == (1.75, 4.0, 5.75)
    assert times_without_waits(marks, clock, waits) == [0.0, 2.0, 5.0]
    assert times_without_waits(marks, clock, None) == [0.0, 3.0, 10.5]
    assert times_without_waits([], clock, waits) == []
