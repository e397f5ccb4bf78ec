"""How long a document will take, judged by the waves before."""

from __future__ import annotations

import pytest

from kvr_mpi.runtime.pace import Pace


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
