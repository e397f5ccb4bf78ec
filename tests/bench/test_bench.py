"""`first-token` and `corpus` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_token import STRATEGIES
from kvr_mpi.errors import EXIT_CONFIG


@pytest.mark.slow
def test_bench_measures_every_strategy(tmp_path: Path, tiny_model_dir: Path, run_bench: Any) -> None:
    rows_file, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    words = ["--model", tiny_model_dir, "--contexts", "128,256", "--repeats", "2", "--roofline"]
    run = run_bench(2, "first-token", *words, "--json", rows_file, "--plot", plot)
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
    wrong = run_bench(2, "first-token", *words, "--strategies", "kvr-x")
    assert wrong.returncode == EXIT_CONFIG and "'kvr-x': expected some of single" in wrong.stderr


@pytest.mark.long
def test_a_whole_corpus_in_every_way(tmp_path: Path, tiny_model_dir: Path, run_bench: Any) -> None:
    rows = (json.dumps({"id": f"d{n}", "text": "The ferry left at seven. " * (1 + 9 * n)}) for n in range(5))
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    (tmp_path / "job.toml").write_text(
        f"""
        model.path = "{tiny_model_dir}"
        model.dtype = "float32"
        documents.path = "{tmp_path / "corpus.jsonl"}"
        prompt.too_long = "keep-head"
        generation.max_new_tokens = 9
        output.path = "{tmp_path / "out"}"
        """
    )
    command = ["corpus", tmp_path / "job.toml", "--repeats", "1", "--batch-size", "2"]
    run = run_bench(2, *command, "--json", tmp_path / "rows.json")
    assert run.returncode == 0, run.stderr
    found = {row["way"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(found) == ["auto", "chains", "data-parallel", "generate", "padded"]
    # What one way answers is what the others do; left padding may tip a near tie in a model that knows nothing.
    assert len({row["new_tokens"] for way, row in found.items() if way != "padded"}) == 1
    for row in found.values():
        assert row["documents"] == 5 and row["documents_per_hour"] > 0 and len(row["speedup"]) == 4
        assert 0 < row["busy_in_prefill"] <= 1.05
    assert "documents/h" in run.stdout and not list((tmp_path / "out").iterdir()), "nothing is left behind"
