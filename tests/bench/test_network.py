"""The bench on slow links, and the hosts it makes: they are apart, their links are slow, and nothing of them stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from constants import ROOT, TESTS

from benchmarks.hosts import hosts, run_mpi, shape, why_not
from kvr_mpi.store.results import open_results

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def able() -> None:
    """Skip where hosts cannot be made."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def test_noisy_hosts_are_compared_with_quiet_ones(tiny_model_dir: Path, tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    words = ["--context", "256", "--repeats", "1", "--json", found, "--cases", "4-1gbit-noisy"]
    command = [sys.executable, "-m", "benchmarks", "network", "--model", tiny_model_dir, *words]
    bench = subprocess.Popen([*command, "--strategies", "kvr-s,ring"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    output, _ = bench.communicate(timeout=300)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert bench.returncode == 0 and f"kvr-{bench.pid}-" not in listed, output
    quiet, noisy = (rows := json.loads(found.read_text()))[:2], rows[2:]
    assert [row["strategy"] for row in quiet] == [row["strategy"] for row in noisy] == ["kvr-s", "ring"]
    for before, after in zip(quiet, noisy, strict=True):
        assert before["strategy"] in output and before["ttft_s"] > 0 and before["noise_loss"] is None
        assert after["noise_loss"] == pytest.approx(after["ttft_s"] / before["ttft_s"] - 1)
    assert noisy[1]["times_kvr_s"] == pytest.approx(noisy[1]["ttft_s"] / noisy[0]["ttft_s"])


def test_links_are_slow_in_both_directions(tmp_path: Path) -> None:
    found = tmp_path / "speed.json"
    program = [sys.executable, TESTS / "programs" / "mpi_link_speed.py", found, str(2 * 10**6)]
    with hosts(2) as group:
        for rate, is_slow in ((None, False), (16_000_000, True), (None, False)):  # a second; one slow end is enough
            shape(group[0], rate)
            done = run_mpi(group, program, timeout_s=60)
            assert done.returncode == 0, done.stdout
            report = json.loads(found.read_text())
            assert report["names"] == ["host1", "host2"] and report["on_this_host"] == 1
            assert (min(report["seconds"]) > 0.8) == is_slow


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
