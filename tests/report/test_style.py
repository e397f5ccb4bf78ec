"""Numbers as people say them, and ticks at round ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvr_mpi.report.plots import plot_bench
from kvr_mpi.report.style import (
    bytes_text,
    even_token_ticks,
    log_ticks,
    nice_ticks,
    percent_text,
    plain_number,
    ramp,
    seconds_text,
    token_ticks,
    tokens_text,
)


def test_lengths_and_times_are_said_plainly() -> None:
    assert [tokens_text(n) for n in (512, 4096, 5682, 131072, 1 << 20)] == ["512", "4k", "5.5k", "128k", "1M"]
    assert [seconds_text(s) for s in (0.0042, 0.35, 0.9999, 1.25, 10, 119, 200, 7500)] == [
        "4.2 ms",
        "350 ms",
        "1 s",
        "1.2 s",
        "10 s",
        "119 s",
        "3 min 20 s",
        "2 h 5 min",
    ]
    assert [bytes_text(n) for n in (12, 2048, 3.4 * 2**20, 12 * 2**30)] == ["12 B", "2 KiB", "3.4 MiB", "12 GiB"]
    assert [percent_text(p) for p in (0, 0.004, 0.034, 1)] == ["0 %", "0.4 %", "3 %", "100 %"]
    assert [plain_number(n) for n in (0.5, 10, 4000)] == ["0.5", "10", "4,000"]


@pytest.mark.parametrize("high", [0.003, 0.7, 1, 9.99, 57.3, 1e3, 8.1e6])
def test_ticks_are_few_round_and_within(high: float) -> None:
    for ticks in (nice_ticks(0, high), log_ticks(high / 1000, high)):
        assert 2 <= len(ticks) <= 10 and ticks == sorted(ticks)
        assert -1e-12 <= ticks[0] and ticks[-1] <= high * 1.001
        assert all("e" not in plain_number(tick) or tick < 1e-4 for tick in ticks)


def test_ticks_of_lengths_are_powers_of_two() -> None:
    assert [tokens_text(tick) for tick in token_ticks(900, 20_000)] == ["1k", "2k", "4k", "8k", "16k"]
    assert len(token_ticks(64, 1 << 24)) <= 9
    assert [tokens_text(tick) for tick in even_token_ticks(5900)] == ["0", "1k", "2k", "3k", "4k", "5k"]


def test_shades_are_different() -> None:
    for count in (1, 2, 8, 64):
        assert len(set(ramp(count))) == len(set(ramp(count, dark=True))) == count


def test_a_plot_says_lengths_seconds_and_its_finding(tmp_path: Path) -> None:
    rows = [
        {"strategy": name, "size": 2, "context_tokens": tokens, "ttft_s": ttft, "ttft_min_s": ttft, "ttft_max_s": ttft}
        for name, factor in (("kvr", 1.0), ("ring", 1.5))
        for tokens, ttft in ((4096, 5 * factor), (8192, 15 * factor))
    ]
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        plot_bench(rows, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f">{label}<" in drawn for label in ("4k", "8k", "5", "10", "20"))
    assert "kvr is fastest at 8k tokens on 2 ranks: 50 % ahead of ring" in drawn
    assert drawn.index(">ring<") < drawn.index(">kvr<"), "ours in front, and last in the legend"
