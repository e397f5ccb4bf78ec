"""Time without waits, by a clock that the test turns."""

from __future__ import annotations

from typing import Any

from kvr_mpi.kv.clock import Clock


class Turned(Clock):
    """Shows what the test sets."""

    def __init__(self) -> None:
        super().__init__(None)
        self.at = 0.0

    def now(self) -> Any:
        return self.at


def test_waits_are_told_apart_and_left_out() -> None:
    clock, busy = Turned(), Turned()
    for layer_s, receive_s, send_s in ((2.0, 1.0, 0.0), (3.0, 0.5, 4.0), (2.0, 0.25, 0.0)):
        clock.begin_layers(1)
        with clock.waiting("receive"):
            clock.at += receive_s
        clock.at += layer_s
        with clock.waiting("send"):
            clock.at += send_s
        busy.at = clock.at
        busy.begin_layers(2)
    assert (clock.waited_s("receive"), clock.waited_s("send"), clock.waited_s()) == (1.75, 4.0, 5.75)
    assert clock.layer_times_s == [0.0, 2.0, 5.0]
    assert clock.layer_begins_s == [0.0, 3.0, 10.5]
    assert busy.layer_times_s == [0.0, 0.0, 7.5, 7.5, 9.75, 9.75] and busy.waited_s() == 0.0
    assert Turned().layer_times_s == []
