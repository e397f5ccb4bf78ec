"""When it pays to keep keys and values: what is measured, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvr_mpi.errors import OutputError
from kvr_mpi.stored.break_even import ReadSpeed, StoredLength, describe_break_even, measure_reading


def lengths(load_s: float, prefill_s: float) -> list[StoredLength]:
    """Loading in proportion to the tokens, prefilling in proportion to their square."""
    return [
        StoredLength(tokens, tokens * 1000, tokens * load_s, 2 * tokens * load_s, tokens**2 * prefill_s)
        for tokens in (64, 128, 256, 512)
    ]


def test_the_shortest_length_that_pays_is_named() -> None:
    speed = ReadSpeed(2e9, 1e9)
    told = describe_break_even(lengths(100.0, 1.0), speed)
    assert told[0].count("2.00 GB/s from memory") and told[0].count("1.00 GB/s from disk")
    assert told[1].endswith("again from 128 tokens on") and told[2].endswith("again from 256 tokens on")
    assert all(line.endswith("at every length") for line in describe_break_even(lengths(0.1, 1.0), speed)[1:3])
    assert all("do not store them" in line for line in describe_break_even(lengths(1000.0, 1.0), speed)[1:3])


def test_reading_is_measured_where_the_results_will_be(tmp_path: Path) -> None:
    speed = measure_reading(tmp_path / "not" / "there")
    assert speed.warm > 0 and speed.cold > 0 and not list(tmp_path.iterdir())
    with pytest.raises(OutputError, match="cannot be written"):
        measure_reading(Path("/proc/none"))


def test_a_plan_says_when_it_pays(job: Path, tmp_path: Path, run_kvr: Any) -> None:
    told = ("plan", job, "--ranks", "2", "--hardware", "h200", "--set", f"output.path={tmp_path / 'none'}")
    code, out, _ = run_kvr(*told)
    assert code == 0 and "asking again" not in out
    code, out, _ = run_kvr(*told, "--set", "output.kv=true")
    assert code == 0 and "asking again" in out and "from the disk: " in out
    code, out, _ = run_kvr(*told, "--set", "output.kv=true", "--json")
    stored = json.loads(out)["stored"]
    code, small, _ = run_kvr(*told, "--set", "output.kv=true", "--set", "output.kv_dtype=int8", "--json")
    assert all(one["bytes"] > two["bytes"] for one, two in zip(stored, json.loads(small)["stored"], strict=True))
    assert [one["tokens"] for one in stored] == sorted({one["tokens"] for one in stored})
    assert not (tmp_path / "none").exists()
