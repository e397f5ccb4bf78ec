"""Profiles of heads, searched for and published: counts by their method's rule; and heads placed on ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from constants import Kvr
from hypothesis import given, settings
from hypothesis import strategies as st
from made_jobs import with_settings

from benchmarks.fairkv_placement import main as fairkv_placement
from benchmarks.placement import (
    place_best_with_copies,
    place_with_copies,
)
from kvr_mpi.compress.head_profile import counts_from_gates, counts_from_scores, read_profile
from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK, DataError
from kvr_mpi.fairkv.placement import (
    LayerPlacement,
    place_best_effort,
    place_in_proportion,
    place_layers,
    place_statically,
    place_with_equal_copies,
)


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


# `kvr search --heads`


METHOD = with_settings("compress.method=ada-snapkv", "compress.budget=48", "compress.window=16")


def test_a_profile_is_placed_and_compresses(job: Path, tmp_path: Path, run_kvr: Kvr, run_here: Any) -> None:
    output = tmp_path / "heads.json"
    (tmp_path / "corpus" / "doc-0.txt").write_text("Late.")
    groups = with_settings("parallel.tensor_parallel=2", "parallel.ranks_per_chain=4")  # of a job that will use it
    code, out, err = run_kvr("search", job, *METHOD, *groups, "--heads", output)
    assert code == EXIT_OK, err
    assert "3 layers of 2 KV heads" in out and "mean_centred" in out
    assert "skipped: doc-0.txt: shorter than the budget" in err
    found = json.loads(output.read_text())
    each = np.array(found["of_each_document"])
    assert found["documents"] == [f"doc-{n}.txt" for n in range(1, 5)] and each.shape == (4, 3, 2)
    assert (each.sum(2) == 2 * 48).all() and each.min() >= 16 + int(0.2 * 32) and len(np.unique(each)) > 1
    np.testing.assert_allclose(found["counts"], each.mean(0))
    assert found["compress"]["method"] == "ada-snapkv" and found["software"]["torch"] and found["created"]
    placed = CliRunner().invoke(fairkv_placement, [str(output), "--ranks", "2"])
    assert placed.exit_code == EXIT_OK and "ada-snapkv: budget 48" in placed.output
    headkv = with_settings("compress.method=headkv", f"compress.profile={output}", "compress.budget=48")
    done = run_here(1, [job, *headkv, *with_settings("compress.window=16", "generation.max_new_tokens=2")])
    assert done.returncode == EXIT_OK, done.stderr


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ([], "no [compress]"),
        (with_settings("compress.method=snapkv", "compress.budget=64"), "method = 'snapkv'"),
        ([*METHOD, *with_settings("compress.budget=500")], "none of 5 documents"),
        ([*METHOD, "--heads", "nowhere/heads.json"], "there is no folder nowhere"),
    ],
)
def test_what_gives_no_profile_is_refused(
    job: Path, tmp_path: Path, run_kvr: Kvr, settings: list[str], why: str
) -> None:
    code, _, err = run_kvr("search", job, "--heads", tmp_path / "heads.json", *settings)
    assert code == EXIT_CONFIG and why in err, err


# Heads on ranks: every head whole, copies within bounds, no rank with more than it must have


def check(found: LayerPlacement, loads: Sequence[float], copies: int) -> None:
    """Every head is somewhere, whole, on a rank at most once; copies are within bounds."""
    for head, load in enumerate(loads):
        pieces = [piece for piece in found.pieces if piece.head == head]
        assert pieces and sum(piece.load for piece in pieces) == pytest.approx(load, abs=1e-6 * (1 + sum(loads)))
        assert len({piece.rank for piece in pieces}) == len(pieces)
    assert all(0 <= piece.rank < found.ranks for piece in found.pieces)
    assert 0 <= found.copies <= copies
    assert found.heaviest >= sum(loads) / found.ranks * (1 - 1e-6)


LOADS = st.lists(st.floats(0, 10_000).map(lambda load: round(load, 2)), min_size=1, max_size=12)
Place = Callable[..., LayerPlacement]


@settings(max_examples=200)
@given(loads=LOADS, ranks=st.integers(1, 8), copies=st.integers(0, 7))
def test_every_placement_has_every_head(loads: list[float], ranks: int, copies: int) -> None:
    whole = place_best_effort(loads, ranks)
    even = place_with_equal_copies(loads, ranks, copies)
    free = place_in_proportion(loads, ranks)
    check(whole, loads, 0)
    check(even, loads, copies)
    check(free, loads, ranks - 1)
    assert free.heaviest <= even.heaviest * (1 + 2e-8) and even.heaviest <= whole.heaviest * (1 + 1e-8)
    assert free.heaviest == pytest.approx(sum(loads) / ranks, rel=1e-8, abs=1e-6), "all have exactly as much"
    if len(loads) % ranks == 0:
        assert whole.heaviest <= 4 / 3 * place_statically(loads, ranks).heaviest * (1 + 1e-9), "Graham's bound"


def test_ranks_are_renamed_so_that_all_hold_as_much() -> None:
    loads = np.array([[8.0, 4, 2, 1]] * 16)
    placed = place_layers(loads, 4, place_best_effort)
    totals = np.sum([layer.loads for layer in placed], axis=0)
    assert totals.max() / totals.min() < 1.1
    assert all(sorted(layer.loads) == [1, 2, 4, 8] for layer in placed), "what a layer's fullest rank has is the same"


def test_static_placement_is_tensor_parallelism() -> None:
    found = place_statically([1, 2, 3, 4], 2)
    assert [piece.rank for piece in found.pieces] == [0, 0, 1, 1] and found.loads.tolist() == [3, 7]
    assert place_statically([1, 2, 3, 4], 3).loads.tolist() == [3, 3, 4], "the first ranks have one more"
    assert place_statically([5, 7], 3).loads.tolist() == [5, 7, 0], "a rank without a head"


@settings(max_examples=60)
@given(
    loads=st.lists(st.integers(1, 1000), min_size=2, max_size=6),
    ranks=st.integers(2, 5),
    copies=st.integers(0, 4),
)
def test_searching_is_never_worse(loads: list[int], ranks: int, copies: int) -> None:
    quick, exact = place_with_copies(loads, ranks, copies), place_best_with_copies(loads, ranks, copies)
    for found in (quick, exact):
        check(found, loads, copies)
    assert (
        exact.heaviest
        <= quick.heaviest * (1 + 1e-9)
        <= place_with_equal_copies(loads, ranks, copies).heaviest * (1 + 1e-8)
    )
