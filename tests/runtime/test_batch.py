"""The loop over a corpus, as real runs: waves, packs, shards, stopping in time, and the loss of a rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from constants import TESTS
from made_jobs import TEXT, answers, with_settings

DISTURBED = TESTS / "programs" / "disturbed_rank.py"


@pytest.fixture
def of_sentences(documents: Any) -> Callable[[Sequence[int]], str]:
    """Documents of these numbers of sentences."""
    return lambda counts: documents({f"d{n:03d}": f"Document {n}. {TEXT * count}" for n, count in enumerate(counts)})


@pytest.mark.slow
def test_tiny_documents_are_packed_and_long_ones_go_over_the_chain(
    of_sentences: Any, job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, run_job: Any
) -> None:
    """And what all their prompts begin with is computed once."""
    words = "Read what follows with care, and say in one sentence what it is about. " * 3
    many = of_sentences([0, 1, 12, 0, 2, 11, 1, 0, 0, 9] * 4)
    job.write_text(job.read_text().replace("Summarise:", words))
    expected = run_job(1, many, "parallel.strategy=single").tokens
    assert len(expected) == 40
    for chain, ranks in (("all", 2), ("1", 3)):
        run = run_job(ranks, many, f"parallel.ranks_per_chain={chain}")
        assert run.tokens == expected and "40 documents answered in" in run.log and "answers/hour" in run.log
    four = mpirun(4, [kvr_run, job, *with_settings(many, "parallel.ranks_per_chain=2")])
    assert four.returncode == 0 and answers(tmp_path / "out") == expected, four.stderr


def test_documents_come_in_the_order_that_the_job_names(
    of_sentences: Any, run_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvr_mpi.report.progress.LINE_S", 0.0)
    settings, answers = [of_sentences([2, 15, 7]), "generation.max_new_tokens=0"], {}
    for order, expected in (("longest", "120"), ("shortest", "021"), ("given", "012")):
        for ranks in ("1", "auto"):
            named = [f"documents.order={order}"] * (order != "longest")  # which is the default
            run = run_job(1, *settings, *named, f"parallel.ranks_per_chain={ranks}")
            assert re.findall(r" (?:\d/3|prefilled) d00(\d): ", run.log) == [*expected], "each is told of once"
            answers[order, ranks] = {record.id: record.prompt_sha256 for record in run.records.values()}
    assert all(each == answers["given", "1"] for each in answers.values())


@pytest.mark.slow
def test_no_document_is_begun_that_would_not_end(run_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("0", "0:10"):  # over before it begins, and meant so; and less than is kept for writing
        run = run_job(2, words=["--time-limit", limit], to="out", code=75)
        assert "the time limit is near" in run.log and "5 documents left" in run.log
        assert not (run.folder / "results.h5").exists()
    for name, value in (("JOB_ID", "7"), ("RESTART_COUNT", "1"), ("JOB_END_TIME", "1000000000")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    again = run_job(2, words=["--overwrite"], to="out")  # as SLURM repeats the command
    assert len(again.records) == 5
    assert "SLURM_JOB_END_TIME" in again.log and "ignoring" in again.log, "a deadline in the past is not believed"
    monkeypatch.setenv("KVR_END_TIME", "18:00")
    assert "KVR_END_TIME is not a Unix time" in run_job(2, to="out").log


def test_a_requeued_job_goes_on_with_its_own_runs_alone(run_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, limit, overwrite = {}, "documents.limit=2", {"words": ["--overwrite"]}
    for number, name in enumerate(("old", "own")):
        monkeypatch.setenv("SLURM_JOB_ID", str(6 + number))
        before[name] = list(run_job(1, limit, to=name, **overwrite).records.values())
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    after = {name: list(run_job(1, limit, to=name, **overwrite).records.values()) for name in before}
    assert after["own"] == before["own"]
    assert all(one != two for one, two in zip(after["old"], before["old"], strict=True)), "they were old"
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert run_job(1, limit, to="own", words=[]).records != {}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["one", pytest.param("all", marks=pytest.mark.long)])
def test_a_signal_to_any_rank_stops_all_in_time(
    job: Path, of_sentences: Any, tmp_path: Path, mpirun: Any, warm_start: list[str], kvr_run: Path, who: str
) -> None:
    corpus = of_sentences([12] * 40).partition("=")[2]
    text = job.read_text().replace(str(tmp_path / "corpus"), corpus)
    job.write_text(text.replace("= 8", "= 0"))  # so that each is finished when it is prefilled
    launcher = str(Path(sys.executable).parent / "mpirun")
    command = [launcher, "-n", "2", *warm_start, str(DISTURBED), "slow", str(job), str(tmp_path / "pids")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        text, until = "", time.monotonic() + 300
        while " d000: " not in text:
            line = process.stderr.readline()
            assert line and time.monotonic() < until, text
            text += line
        pids = [int(file.name) for file in (tmp_path / "pids").iterdir()]
        assert len(pids) == 2
        for pid in pids if who == "all" else pids[:1]:
            os.kill(pid, signal.SIGUSR2)
        text += process.stderr.read()
        assert process.wait(60) == 75, text
    assert ("stopped by" in text or "another rank was stopped" in text) and "--resume continues" in text
    kept = answers(tmp_path / "out")
    assert 0 < len(kept) < 40
    again = mpirun(1, [kvr_run, job, "--resume"])
    assert again.returncode == 0, again.stderr
    assert f"{len(kept)} of them already done" in again.stderr
    after = answers(tmp_path / "out")
    assert len(after) == 40 and kept.items() <= after.items()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "killed"])
def test_an_exception_on_one_rank_or_its_death_ends_all_and_it_says_why(
    job: Path, mpirun: Any, tmp_path: Path, how: str
) -> None:
    run = mpirun(3, [sys.executable, DISTURBED, how, job, tmp_path / "pids"])
    assert run.returncode != 0 and (how == "killed" or "broken on purpose" in run.stderr)
    broken_at = float((tmp_path / "pids" / "broken").read_text())
    assert time.time() - broken_at < 60, "the others end soon after it"
