"""The bench on slow links, and the hosts it makes: they are apart, their links are slow, and nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT, TESTS

from benchmarks.hosts import Host, hosts, run_mpi, shape, why_not
from kvr_mpi.store.results import open_results

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def able() -> None:
    """Skip where hosts cannot be made."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def left_by(pid: int) -> list[str]:
    """Namespaces of a process's hosts that still exist."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"kvr-{pid}-")]


class Bench:
    """The bench as a user starts it, and what it left."""

    def __init__(self, *arguments: str | Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks", "network", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pid = self._process.pid

    def wait_for(self, word: str) -> None:
        """Read output up to a line with this word."""
        assert self._process.stdout is not None
        assert any(word in line for line in self._process.stdout), f"it ended without {word!r}"

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        """Wait, and return exit status and output."""
        try:
            output, _ = self._process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            self.terminate()
            output, _ = self._process.communicate()
        return self._process.returncode, output


def run_bench(model: Path, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the bench to its end, and return its rows."""
    found = tmp_path / "rows.json"
    bench = Bench("--model", model, "--context", "256", "--repeats", "1", "--json", found, *arguments)
    code, output = bench.end()
    assert code == 0, output
    assert left_by(bench.pid) == []
    rows: list[dict[str, Any]] = json.loads(found.read_text())
    for row in rows:
        assert row["strategy"] in output
        assert row["ttft_s"] > 0
    return rows


def test_two_hosts(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = run_bench(tiny_model_dir, tmp_path, "--cases", "2-1gbit", "--strategies", "kvr-e,ring")
    assert [row["strategy"] for row in rows] == ["kvr-e", "ring"]
    assert rows[0]["slices"] == "128+128"
    assert rows[0]["noise_loss"] is None and rows[0]["times_kvr_s"] is None


def test_noisy_hosts_are_compared_with_quiet_ones(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = run_bench(tiny_model_dir, tmp_path, "--cases", "4-1gbit-noisy", "--strategies", "kvr-s,ring")
    quiet, noisy = rows[:2], rows[2:]
    assert [row["strategy"] for row in quiet] == [row["strategy"] for row in noisy] == ["kvr-s", "ring"]
    for before, after in zip(quiet, noisy, strict=True):
        assert after["noise_loss"] == pytest.approx(after["ttft_s"] / before["ttft_s"] - 1)
    assert noisy[1]["times_kvr_s"] == pytest.approx(noisy[1]["ttft_s"] / noisy[0]["ttft_s"])


def test_a_bench_that_fails_inside_leaves_nothing(tiny_model_dir: Path) -> None:
    bench = Bench("--model", tiny_model_dir, "--context", "1024", "--cases", "2-unshaped")
    code, output = bench.end()
    assert code == 1
    assert "the model's context" in output
    assert left_by(bench.pid) == []


def test_a_terminated_bench_leaves_nothing(tiny_model_dir: Path) -> None:
    bench = Bench("--model", tiny_model_dir, "--context", "256", "--cases", "2-1gbit", "--repeats", "100000")
    bench.wait_for("searched")
    assert left_by(bench.pid)
    bench.terminate()
    code, output = bench.end()
    assert code == 128 + signal.SIGTERM, output
    assert left_by(bench.pid) == []


def link_seconds(group: Sequence[Host], megabytes: int, folder: Path) -> list[float]:
    """Time some bytes from host 1 to host 2 and back."""
    found = folder / "speed.json"
    program = TESTS / "programs" / "mpi_link_speed.py"
    done = run_mpi(group, [sys.executable, program, found, str(megabytes * 10**6)], timeout_s=60)
    assert done.returncode == 0, done.stdout
    report = json.loads(found.read_text())
    assert report["names"] == ["host1", "host2"]
    assert report["on_this_host"] == 1
    return list(report["seconds"])


def test_links_are_slow_in_both_directions(tmp_path: Path) -> None:
    with hosts(2) as group:
        assert min(link_seconds(group, 2, tmp_path)) < 0.8
        shape(group[0], 16_000_000)  # one slow end is enough
        assert all(seconds > 0.8 for seconds in link_seconds(group, 2, tmp_path))  # one second
        shape(group[0], None)
        assert min(link_seconds(group, 2, tmp_path)) < 0.8


def test_counters_answer_between_hosts_while_their_owner_computes() -> None:
    with hosts(2) as group:
        run = run_mpi(group, [sys.executable, TESTS / "programs" / "mpi_counters.py"], timeout_s=60)
    assert run.returncode == 0, run.stdout
    found = json.loads(run.stdout)
    assert sorted(number for drawn, _, _ in found for number in drawn) == list(range(200))
    assert all(drawn for drawn, _, _ in found)


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


def test_what_does_not_end_is_ended() -> None:
    with hosts(2) as group:
        with pytest.raises(subprocess.TimeoutExpired, match="2 seconds"):
            run_mpi(group, ["tail", "-f", "/dev/null"], timeout_s=2)
        for host in group:
            pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, check=True)
            assert pids.stdout == b""
    assert left_by(os.getpid()) == []


def test_an_unknown_case_is_refused() -> None:
    code, output = Bench("--cases", "5-hosts").end()
    assert code == 2
    assert "2-100mbit" in output
