"""Stopping in time: signals, deadlines, and how limits are written."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import pytest
from made_logs import logger_to

from kvr_mpi.cli.log_lines import show_log
from kvr_mpi.duration import duration_text, parse_duration
from kvr_mpi.errors import ConfigError
from kvr_mpi.logs import RankLogger
from kvr_mpi.runtime.leader import Pace
from kvr_mpi.runtime.stopping import LAST_S, MARGIN, WRITE_S, Stop, stopped_by_signals


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


def wait_for(holds: Callable[[], object]) -> None:
    while not holds():
        time.sleep(0.01)


def test_the_first_signal_stops_and_the_second_ends() -> None:
    stop, told, ended = Stop(), list[str](), SimpleQueue[str]()
    before = signal.getsignal(signal.SIGUSR2)
    with stopped_by_signals(stop, logger_to(told), ended.put):
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.heard and stop.reason == "stopped by SIGUSR2" and ended.empty()
        wait_for(lambda: told and told[0].startswith("SIGUSR2: "))
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.get(timeout=60).startswith("SIGTERM while stopping: ")
    assert signal.getsignal(signal.SIGUSR2) is before
    stop = Stop(clock=lambda: 0.0)
    stop.ask("the time limit is near")
    with stopped_by_signals(stop, logger_to(told), ended.put):
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for(lambda: len(told) == 2)
    assert stop.heard and ended.empty(), "a signal ends nothing that only a deadline stopped"


def test_signals_may_come_while_a_line_is_written_to_a_full_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    ended = SimpleQueue[str]()
    logger = RankLogger()
    show_log()

    def kill_twice() -> None:
        for _ in range(2):
            time.sleep(0.2)  # the main thread has filled the pipe
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        while os.read(reading, 1 << 16):
            pass

    killer = threading.Thread(target=kill_twice)
    with os.fdopen(writing, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with stopped_by_signals(Stop(), logger, lambda why: (logger.info(why), ended.put(why))[1]):
            killer.start()
            logger.info("x" * (1 << 20))
            assert ended.get(timeout=60)
        monkeypatch.undo()
    killer.join()
    os.close(reading)


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


# Durations, as people and SLURM write them


READ = {"90m": 5400, "2h30m": 9000, "45S": 45, "7d": 604800, "1d12h": 129600, "1-12:00:00": 129600}
READ |= {" 5 ": 300, "90": 5400, "1:30": 90, "2:00:05": 7205, "1-12": 129600, "1-2:03": 93780, "1-0:0:1": 86401}
REFUSED = ["", "x", "1:2:3:4", "1-2:3:4:5", "-5", "1-", "1.5", "a-1:00", "\u0663", "90\n", "30m2h", "2h30", "m", "1w"]
WRITTEN = {
    **{-1: "0 s", 0.0042: "4.2 ms", 0.35: "350 ms", 0.9999: "1.00 s", 1.254: "1.25 s", 10: "10.0 s"},
    **{99.99: "1 min 40 s", 120: "2 min", 7500: "2 h 5 min", 3599.6: "1 h", 100800: "1 d 4 h"},
}


def test_durations_are_read_with_units_and_as_sbatch_reads_them() -> None:
    assert {text: parse_duration(text) for text in READ} == READ
    assert [parse_duration("30", plain=unit) for unit in "sd"] == [30, 30 * 86400]
    assert parse_duration("1:30", plain="d") == 90, "only a number without a unit is of days"


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_duration(text)


def test_durations_are_written_with_their_units() -> None:
    assert {seconds: duration_text(seconds) for seconds in WRITTEN} == WRITTEN
