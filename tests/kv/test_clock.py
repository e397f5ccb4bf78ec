"""Time without waits, by a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvr_mpi.kv.clock import Clock


def test_waits_are_told_apart_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    at = 0.0
    monkeypatch.setattr("kvr_mpi.kv.clock.time", SimpleNamespace(perf_counter=lambda: at))
    clock, busy = Clock(None), Clock(None)
    for layer_s, receive_s, send_s in ((2.0, 1.0, 0.0), (3.0, 0.5, 4.0), (2.0, 0.25, 0.0)):
        clock.mark("layer")
        clock.mark("receive")
        at += receive_s
        clock.mark("go on")
        at += layer_s
        clock.mark("send")
        at += send_s
        clock.mark("go on")
        busy.mark("layer", 2)
    assert clock.read() == ([0.0, 3.0, 10.5], [0.0, 2.0, 5.0], 1.75, 4.0)
    assert busy.read() == ([3.0, 3.0, 10.5, 10.5, 12.75, 12.75], [0.0, 0.0, 7.5, 7.5, 9.75, 9.75], 0.0, 0.0)
    assert Clock(None).read() == ([], [], 0.0, 0.0)
