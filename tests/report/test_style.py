"""Numbers as people say them, and ticks at round ones."""

from __future__ import annotations

import pytest

from benchmarks.plots import log_ticks, token_ticks
from kvr_mpi.report.style import bytes_text, even_token_ticks, nice_ticks, percent_text, plain_number, tokens_text


def test_lengths_and_sizes_are_said_plainly() -> None:
    assert [tokens_text(n) for n in (512, 4096, 5682, 131072, 1 << 20)] == ["512", "4k", "5.5k", "128k", "1M"]
    sizes = {
        0: "0 B",
        1023: "1023 B",
        2048: "2 KiB",
        3.4 * 2**20: "3.4 MiB",
        12 << 30: "12 GiB",
        3.1 * 2**40: "3.1 TiB",
    }
    assert {size: bytes_text(size) for size in sizes} == sizes
    assert [percent_text(p) for p in (0, 0.004, 0.034, 1)] == ["0 %", "0.4 %", "3 %", "100 %"]
    assert [plain_number(n) for n in (0.5, 10, 4000)] == ["0.5", "10", "4,000"]


@pytest.mark.parametrize("high", [0.003, 0.7, 1, 9.99, 57.3, 1e3, 8.1e6])
def test_ticks_are_few_round_and_within(high: float) -> None:
    for ticks in (nice_ticks(0, high), log_ticks(high / 1000, high)):
        assert 2 <= len(ticks) <= 10 and ticks == sorted(ticks)
        assert -1e-12 <= ticks[0] and ticks[-1] <= high * 1.001
        assert all("e" not in plain_number(tick) or tick < 1e-4 for tick in ticks)
    assert [tokens_text(tick) for tick in token_ticks(900, 20_000)] == ["1k", "2k", "4k", "8k", "16k"]
    assert len(token_ticks(64, 1 << 24)) <= 9
    assert [tokens_text(tick) for tick in even_token_ticks(5900)] == ["0", "1k", "2k", "3k", "4k", "5k"]
