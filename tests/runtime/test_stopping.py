"""Stopping in time: signals, deadlines, and how limits are written."""

from __future__ import annotations

import os
import signal
from queue import SimpleQueue

import pytest

from kvr_mpi.runtime.leader import Pace
from kvr_mpi.runtime.stopping import LAST_S, MARGIN, WRITE_S, Stop, listening


def test_what_would_not_end_is_not_begun() -> None:
    now, endless = 1000.0, Stop()
    assert endless.has_time_for(1e9) and not endless.reason
    stop = Stop(now + 100 + WRITE_S, clock=lambda: now)
    assert stop.has_time_for(99 / MARGIN)
    assert not stop.has_time_for(101 / MARGIN)
    assert "time limit" in stop.reason and "115 s left" in stop.reason
    assert not stop.has_time_for(0), "once stopped, stopped"
    assert not stop.heard
    assert not endless.is_over, "at the very end what is begun is given up"
    assert not Stop(now + LAST_S + 1, clock=lambda: now).is_over
    assert Stop(now + LAST_S - 1, clock=lambda: now).is_over


def test_the_first_signal_stops_and_the_second_ends() -> None:
    stop, told, ended = Stop(), SimpleQueue[str](), []
    before = signal.getsignal(signal.SIGUSR2)
    with listening(stop, told.put, ended.append):
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.heard and stop.reason == "stopped by SIGUSR2" and not ended
        assert told.get(timeout=60).startswith("SIGUSR2: ")
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == ["SIGTERM while stopping: ending at once; finished documents are kept"]
    assert signal.getsignal(signal.SIGUSR2) is before
    stop = Stop(clock=lambda: 0.0)
    stop.ask("the time limit is near")
    with listening(stop, print, ended.append):
        os.kill(os.getpid(), signal.SIGUSR2)
    assert stop.heard and len(ended) == 1, "a signal ends nothing that only a deadline stopped"


# How long a document will take, judged by the waves before


def test_the_first_wave_is_judged_by_itself() -> None:
    pace = Pace(100.0)
    assert pace.seconds_for(1000, 100.0) == 0.0, "without evidence there is always time"
    pace.begin_wave(100.0)
    pace.add_work(10)
    # 5 s for 10, decoding yet to come: 1 s for each; 10 + 20 of them take 30 s, 5 s have gone.
    assert pace.seconds_for(20, 105.0) == pytest.approx(25.0)


def test_later_waves_are_judged_by_those_before() -> None:
    pace = Pace(0.0)
    pace.begin_wave(0.0)
    pace.add_work(10)
    pace.begin_wave(20.0)  # 2 s for each
    pace.add_work(5)
    assert pace.seconds_for(5, 21.0) == pytest.approx(2 * 10 - 1)
    assert pace.seconds_for(0, 1000.0) == 0.0
