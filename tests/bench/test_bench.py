"""`first-token` as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT

from benchmarks.first_token import STRATEGIES
from kvr_mpi.errors import EXIT_CONFIG


@pytest.mark.slow
def test_bench_measures_every_strategy(tmp_path: Path, tiny_model_dir: Path, mpirun: Any) -> None:
    rows_file, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    command = [sys.executable, "-m", "benchmarks", "first-token"]
    words = ["--model", tiny_model_dir, "--contexts", "128,256", "--repeats", "2", "--roofline"]
    run = mpirun(2, [*command, *words, "--json", rows_file, "--plot", plot], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    rows = json.loads(rows_file.read_text())
    assert [(row["strategy"], row["context_tokens"]) for row in rows] == [
        (s, n) for n in (128, 256) for s in STRATEGIES
    ]
    for row in rows:
        # Ours runs beside each of the others.
        is_ours = row["strategy"] == row["ours"] == "kvr-s"
        assert row["size"] == 2 and (row["repeats"], row["pairs"]) == (
            (2 * (len(STRATEGIES) - 1), 0) if is_ours else (2, 2)
        )
        assert row["times_ours_low"] <= row["times_ours"] <= row["times_ours_high"] and not row["is_told_apart"]
        assert 0 < row["ttft_min_s"] <= row["ttft_s"] <= row["ttft_max_s"]
        assert 0 <= row["wait_s"] <= row["ttft_max_s"] and 0 < row["least_s"] < row["ttft_min_s"]
        single = next(r for r in rows if r["strategy"] == "single" and r["context_tokens"] == row["context_tokens"])
        assert row["speedup_over_single"] == pytest.approx(single["times_ours"] / row["times_ours"])
        if row["strategy"].startswith("kvr"):
            first, second = map(int, row["slices"].split("+"))
            assert first + second == row["context_tokens"]
            # Only the first rank sends, and only its own slice: 3 layers, K and V of 2 heads of 8, float32.
            assert row["link_bytes"] == first * 3 * 2 * 2 * 8 * 4
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert all(strategy in run.stdout for strategy in STRATEGIES)
    assert run.stdout.count("products with weights") == 2 and "the best runs reach" in run.stdout
    wrong = mpirun(2, [*command, *words, "--strategies", "kvr-x"], cwd=ROOT)
    assert wrong.returncode == EXIT_CONFIG and "'kvr-x': expected some of single" in wrong.stderr
