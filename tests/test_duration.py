"""Durations are read as people and SLURM write them, and written in one way."""

from __future__ import annotations

import pytest

from kvr_mpi.duration import duration_text, parse_duration
from kvr_mpi.errors import ConfigError

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
