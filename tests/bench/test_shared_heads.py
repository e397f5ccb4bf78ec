"""`fairkv`: every placement decodes the same documents, and what cannot be compared is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT
from made_jobs import spec_of, with_settings

from benchmarks.fairkv import LEAST_NEW_TOKENS, check_heads, efficiency
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, ConfigError

WAYS = ["whole, SHA", "whole, apart", "SHA", "best effort", "equal copies", "in proportion", "apart"]
SMALL = ["compress.method=ada-snapkv", "compress.window=16"]


def test_every_way_decodes_the_same_documents(run_bench: Any, job: Path, tmp_path: Path) -> None:
    settings = with_settings(*SMALL, "compress.budget=0.5", "generation.max_new_tokens=40")
    ran = run_bench(
        2, "fairkv", job, "--repeats", "1", *settings, "--budgets", "48,96", "--json", tmp_path / "rows.json"
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["way"] for row in rows] == 2 * WAYS and all(way in ran.stdout for way in WAYS)
    documents = int(re.findall(r"(\d) prompts of (\d+) to \d+ tokens, prefilled", ran.stderr)[0][0])
    for at, row in enumerate(rows):
        is_whole, is_apart = row["way"].startswith("whole"), row["way"].endswith("apart")
        whole = rows[at // len(WAYS) * len(WAYS)]
        assert row["same_answers"] == row["documents"] == documents >= 2 and row["ranks"] == 2
        # The shortest of five documents are no longer than the budget, and left out.
        assert row["kept_tokens"] == (row["tokens"] / documents if is_whole else (48, 96)[at // len(WAYS)])
        assert 0 < row["best_s"] <= row["step_s"] and 0 < row["forecast_s"] and 0 < row["attention_s"]
        assert row["tokens_per_s"] == pytest.approx(documents / row["step_s"])
        assert is_whole or sum(row["kv_bytes"]) < sum(whole["kv_bytes"])
        assert (row["predicted"] is None) == is_apart
        assert all(0.5 <= one <= 1 for said in (row["predicted"], row["measured"]) if said for one in said.values())
        for one, other in (("whole", "whole, SHA"), ("sha", "SHA")):
            for word in ("", "compute_"):
                ratio = row[f"{word}{one}_over_this"]
                assert ratio["low"] <= ratio["median"] <= ratio["high"] and ratio["pairs"] == 1
                assert row["way"] != other or ratio["median"] == 1
    found = {row["way"]: row for row in rows[: len(WAYS)]}
    assert found["in proportion"]["predicted"]["sync"] >= found["SHA"]["predicted"]["sync"]
    assert found["whole, SHA"]["heads"] == [1, 1] and found["apart"]["heads"] == [2, 2]


@pytest.mark.long
def test_real_ranks_and_a_real_model_agree(run_bench: Any, smollm: Any, tmp_path: Path) -> None:
    """Three ranks, a KV head each."""
    settings = with_settings(*SMALL, "compress.budget=100", "prompt.max_tokens=200", "prompt.too_long=keep-head")
    rows = tmp_path / "rows.json"
    ran = run_bench(3, "fairkv", ROOT / "jobs" / "demo.toml", "--repeats", "1", *settings, "--json", rows)
    assert ran.returncode == 0, ran.stderr
    found = {row["way"]: row for row in json.loads(rows.read_text())}
    assert all(row["same_answers"] == row["documents"] for row in found.values())
    assert found["in proportion"]["predicted"]["sync"] > found["SHA"]["predicted"]["sync"]


@pytest.mark.parametrize(
    ("ranks", "settings", "words"),
    [
        (1, ["compress.budget=64"], "start it on at least 2"),
        (2, None, "the job has no \\[compress\\]"),
        (2, ["compress.budget=64", "generation.max_new_tokens=9"], f"too few steps to time; .* {LEAST_NEW_TOKENS}"),
    ],
)
def test_what_cannot_be_timed_is_refused(job: Path, ranks: int, settings: list[str] | None, words: str) -> None:
    given = [] if settings is None else [*SMALL, "generation.max_new_tokens=40", *settings]
    with pytest.raises(ConfigError, match=words):
        check_heads(spec_of(job, *given), ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words", "said"),
    [
        ([], ["--budgets", "8"], "--budgets 8: less than the 16 tokens that every head keeps"),
        pytest.param([], ["--budgets", "many"], "'many': expected whole numbers", marks=pytest.mark.long),
        pytest.param([], ["--budgets", "400"], "longer than the budget", marks=pytest.mark.long),
        (["parallel.memory_gib=0.0001"], [], "choose fewer --documents"),
        pytest.param(["parallel.strategy=single"], [], "decodes from transformers' own cache", marks=pytest.mark.long),
    ],
)
def test_what_does_not_fit_the_job_is_refused(
    run_bench: Any, job: Path, settings: list[str], words: list[str], said: str
) -> None:
    given = with_settings(*SMALL, "compress.budget=64", "generation.max_new_tokens=40", *settings)
    ran = run_bench(2, "fairkv", job, "--repeats", "1", *given, *words)
    assert ran.returncode in (EXIT_BAD_DATA, EXIT_CONFIG) and said in ran.stderr, ran.stderr


def test_efficiency_is_of_layers_or_of_all_together() -> None:
    import numpy as np

    found = efficiency(np.array([[3.0, 1.0], [1.0, 3.0]]))
    assert found == {"sync": pytest.approx(4 / 6), "total": pytest.approx(1.0)}
