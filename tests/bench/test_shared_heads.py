"""`fairkv`: every placement decodes the same documents, and what cannot be compared is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT
from made_jobs import with_settings

WAYS = ["whole, SHA", "whole, apart", "SHA", "best effort", "equal copies", "in proportion", "apart"]
SMALL = ["compress.method=ada-snapkv", "compress.window=16"]


def test_every_way_decodes_the_same_documents(mpirun: Any, job: Path, tmp_path: Path) -> None:
    settings = with_settings(*SMALL, "compress.budget=0.5", "generation.max_new_tokens=40")
    words = [job, "--repeats", "1", *settings, "--budgets", "48,96", "--json", tmp_path / "rows.json"]
    ran = mpirun(2, [sys.executable, "-m", "benchmarks", "fairkv", *words], cwd=ROOT)
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
