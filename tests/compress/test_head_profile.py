"""Profiles of heads: published scores become counts by their method's rule, and what is none is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvr_mpi.compress.head_profile import counts_from_gates, counts_from_scores, read_profile
from kvr_mpi.errors import DataError


def scores_file(path: Path, layers: int = 4, heads: int = 8) -> np.ndarray[Any, Any]:
    scores = np.random.default_rng(0).gamma(0.5, size=(layers, heads))
    path.write_text(json.dumps({f"{n}-{h}": [score, 0, 2 * score] for (n, h), score in np.ndenumerate(scores)}))
    return scores


def test_headkvs_budget_is_of_kv_heads_and_keeps_its_mean(tmp_path: Path) -> None:
    scores = scores_file(tmp_path / "heads.json")
    found = read_profile(tmp_path / "heads.json", budget=512)
    assert found.counts.shape == (4, 2) and "budget 512" in found.source
    assert found.counts.mean() == pytest.approx(512) and found.counts.min() >= 8 + (512 - 8) * (1 - 1 / 1.2) - 1e-9
    grouped = scores.reshape(4, 2, 4).mean(2)
    assert np.argmax(found.counts) == np.argmax(grouped) and np.argmin(found.counts) == np.argmin(grouped)
    assert read_profile(tmp_path / "heads.json", kv_heads=8).counts.shape == (4, 8)


def test_duoattentions_upper_half_keeps_everything(tmp_path: Path) -> None:
    gates = np.random.default_rng(0).random((6, 4))
    np.savetxt(tmp_path / "gates.tsv", gates, delimiter="\t")
    found = read_profile(tmp_path / "gates.tsv")
    assert sorted(set(found.counts.ravel())) == [384, 8192] and (found.counts == 8192).sum() == 12
    assert gates[found.counts == 8192].min() >= gates[found.counts == 384].max()
    assert (counts_from_gates(np.ones((2, 4))) == 8192).sum() == 4, "gates that are alike, too"


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", "5", '{"0-0": []}', '{"0-0": [1], "5-0": [1]}', '{"a-b": [1]}', '{"0-0": "x"}', '{"0-0": [-1]}',
        '{"counts": []}', '{"counts": [[1], [2, 3]]}', '{"counts": [[-1]]}', '{"counts": [["x"]]}', '{"counts": 3}',
        '{"counts": [[NaN]]}', '{"0-0": [0], "0-1": [0], "0-2": [0], "0-3": [0]}', "[" * 100_000,
        '{"0-0": [1], "999999999-999999999": [1]}',
    ],
)  # fmt: skip
def test_what_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "heads.json"
    path.write_text(content)
    with pytest.raises(DataError, match="heads"):
        read_profile(path)


def test_budgets_and_heads_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(DataError, match="no larger than the window"):
        counts_from_scores(np.ones((2, 8)), 2, 8)
    with pytest.raises(DataError, match="cannot be divided"):
        counts_from_scores(np.ones((2, 8)), 3, 512)
