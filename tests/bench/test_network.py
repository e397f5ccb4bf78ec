"""The bench on slow links, and the hosts it makes: they are apart, their links are slow, and nothing of them stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.hosts import hosts, run_mpi, why_not
from kvr_mpi.store.results import open_results

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def able() -> None:
    """Skip where hosts cannot be made."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def test_a_job_runs_on_two_hosts(tiny_model_dir: Path, tmp_path: Path, kvr_run: Path) -> None:
    rows = (json.dumps({"id": f"d{n}", "text": "The ferry left at seven. " * (2 + 7 * (n % 6))}) for n in range(24))
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    (tmp_path / "job.toml").write_text(
        f"""
        model.path = "{tiny_model_dir}"
        model.dtype = "float32"
        documents.path = "{tmp_path / "corpus.jsonl"}"
        generation.max_new_tokens = 6
        output.path = "{tmp_path / "out"}"
        """
    )
    found = {}
    for way in ("parallel.ranks_per_chain=all", "parallel.ranks_per_chain=1", "parallel.strategy=single"):
        with hosts(2) as group:
            run = run_mpi(group, [kvr_run, tmp_path / "job.toml", "--overwrite", "--set", way], timeout_s=120)
        assert run.returncode == 0, run.stdout
        found[way] = {record.id: record.token_ids for record in open_results(tmp_path / "out")}
    assert all(answers == found["parallel.strategy=single"] and len(answers) == 24 for answers in found.values())
