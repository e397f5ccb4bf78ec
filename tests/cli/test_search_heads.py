"""`kvr search --heads`: a profile that says where it is from, and that placement and HeadKV read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from constants import Kvr
from made_jobs import with_settings

from benchmarks.fairkv_placement import main as fairkv_placement
from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK

METHOD = with_settings("compress.method=ada-snapkv", "compress.budget=48", "compress.window=16")


def test_a_profile_is_placed_and_compresses(job: Path, tmp_path: Path, run_kvr: Kvr, run_here: Any) -> None:
    output = tmp_path / "heads.json"
    (tmp_path / "corpus" / "doc-0.txt").write_text("Late.")
    groups = with_settings("parallel.tensor_parallel=2", "parallel.ranks_per_chain=4")  # of a job that will use it
    code, out, err = run_kvr("search", job, *METHOD, *groups, "--heads", output)
    assert code == EXIT_OK, err
    assert "3 layers of 2 KV heads" in out and "mean_centred" in out
    assert "left out: doc-0.txt: shorter than the budget" in err
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
