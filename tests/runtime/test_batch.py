"""The loop over a corpus, as real runs: waves, packs, shards of a corpus, and stopping in time."""

from __future__ import annotations

import os
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

from kvr_mpi.store.results import open_results


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Path]:
    """Write a job over documents of these numbers of sentences, for a tiny model."""

    def write(sentences: Sequence[int], name: str = "job", new_tokens: int = 6) -> Path:
        rows = (f'{{"id": "d{n:03d}", "text": "Document {n}. {TEXT * count}"}}\n' for n, count in enumerate(sentences))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f"""
            [model]
            path = "{tiny_model_dir}"
            dtype = "float32"
            [documents]
            path = "{tmp_path / name}.jsonl"
            [prompt]
            template = "Summarise: {{text}} Summary:"
            [generation]
            max_new_tokens = {new_tokens}
            [parallel]
            partition = "even"
            [output]
            path = "{tmp_path / name}"
            """
        )
        return path

    return write


@pytest.mark.slow
def test_tiny_documents_are_packed_and_long_ones_go_over_the_chain(
    job: Any, tmp_path: Path, mpirun: Any, kvr_run: Path, run_here: Any
) -> None:
    path = job([0, 1, 12, 0, 2, 14, 1, 0, 0, 9] * 9)
    one = run_here(1, [path, *with_settings("parallel.strategy=single", f"output.path={tmp_path / 'one'}")])
    assert one.returncode == 0, one.stderr
    expected = answers(tmp_path / "one")
    assert len(expected) == 90
    for chain, ranks in (("all", 2), ("1", 3), ("2", 4)):
        command = [path, "--overwrite", *with_settings(f"parallel.ranks_per_chain={chain}")]
        run = mpirun(ranks, [kvr_run, *command]) if ranks == 4 else run_here(ranks, command)
        assert run.returncode == 0, run.stderr
        assert answers(tmp_path / "job") == expected
        assert "90 documents answered in" in run.stderr and "answers/hour" in run.stderr


@pytest.mark.slow
def test_what_all_prompts_begin_with_is_computed_once(job: Any, tmp_path: Path, run_here: Any) -> None:
    path = job([0, 3, 9, 1, 12, 7])
    template = (
        "prompt.template=" + "Read what follows with care, and say in one sentence what it is about. " * 3 + "{text}"
    )
    one = run_here(1, [path, *with_settings(template, "parallel.strategy=single")])
    assert one.returncode == 0, one.stderr
    expected = answers(tmp_path / "job")
    for ranks, partition in ((1, "even"), (2, "equal_time"), (3, "even")):
        run = run_here(ranks, [path, "--overwrite", *with_settings(template, f"parallel.partition={partition}")])
        assert run.returncode == 0, run.stderr
        assert answers(tmp_path / "job") == expected
        slices = [record.slices for record in open_results(tmp_path / "job")]
        assert all(bounds[0] == 0 for bounds in slices) and max(len(bounds) for bounds in slices) == ranks + 1


def test_memory_that_is_full_begins_a_new_wave(job: Any, tmp_path: Path, run_here: Any) -> None:
    path = job([10] * 7)  # 200 tokens each; 0.2 MB of keys and values
    free = run_here(2, [path, *with_settings(f"output.path={tmp_path / 'free'}")])
    assert free.returncode == 0, free.stderr
    tight = run_here(2, [path, *with_settings("parallel.memory_gib=0.0009")])
    assert tight.returncode == 0, tight.stderr
    assert answers(tmp_path / "job") == answers(tmp_path / "free")


def test_shards_of_a_corpus_are_all_of_it(job: Any, tmp_path: Path, run_here: Any) -> None:
    path = job([1] * 7)
    found: dict[str, tuple[int, ...]] = {}
    for shard in range(3):
        folder = tmp_path / f"shard-{shard}"
        settings = with_settings(f"documents.shard={shard}/3", f"output.path={folder}")
        run = run_here(1, [path, *settings])
        assert run.returncode == 0, run.stderr
        mine = answers(folder)
        assert len(mine) == len(range(shard, 7, 3)) and not found.keys() & mine.keys()
        found |= mine
    assert len(found) == 7


@pytest.mark.slow
def test_no_document_is_begun_that_would_not_end(job: Any, tmp_path: Path, mpirun: Any, kvr_run: Path) -> None:
    path = job([1] * 4)
    for limit in ("0", "0:10"):  # over before it begins, and meant so; and less than is kept for writing
        run = mpirun(2, [kvr_run, path, "--time-limit", limit])
        assert run.returncode == 75, run.stderr
        assert "the time limit is near" in run.stderr and "4 documents left" in run.stderr
        assert not (tmp_path / "job" / "results.h5").exists()
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}
    again = mpirun(2, [kvr_run, path, "--overwrite"], env=env)  # as SLURM repeats the command
    assert again.returncode == 0, again.stderr
    assert len(answers(tmp_path / "job")) == 4


def test_a_requeued_job_goes_on_with_its_own_runs_alone(
    job: Any, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = job([1] * 2), {name: tmp_path / name for name in ("old", "own")}
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    assert run_here(1, [path, *with_settings(f"output.path={out['old']}")]).returncode == 0
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert run_here(1, [path, *with_settings(f"output.path={out['own']}"), "--overwrite"]).returncode == 0
    before = {name: list(open_results(folder)) for name, folder in out.items()}
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for folder in out.values():
        assert run_here(1, [path, *with_settings(f"output.path={folder}"), "--overwrite"]).returncode == 0
    assert list(open_results(out["own"])) == before["own"]
    assert all(one != two for one, two in zip(open_results(out["old"]), before["old"], strict=True)), "they were old"
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert run_here(1, [path, *with_settings(f"output.path={out['own']}")]).returncode == 78


@pytest.mark.slow
def test_a_deadline_in_the_past_is_not_believed(job: Any, mpirun: Any, kvr_run: Path) -> None:
    run = mpirun(1, [kvr_run, job([1])], env={"SLURM_JOB_END_TIME": "1000000000"})
    assert run.returncode == 0, run.stderr
    assert "SLURM_JOB_END_TIME" in run.stderr and "ignored" in run.stderr


def running(process: subprocess.Popen[str], what: str, timeout_s: float = 300) -> str:
    """Read a process's log until a line with `what`, and return all of it."""
    assert process.stderr is not None
    text, until = "", time.monotonic() + timeout_s
    while what not in text:
        line = process.stderr.readline()
        assert line and time.monotonic() < until, text
        text += line
    return text


@pytest.mark.slow
@pytest.mark.parametrize("who", ["one", pytest.param("all", marks=pytest.mark.long)])
def test_a_signal_to_any_rank_stops_all_in_time(job: Any, tmp_path: Path, mpirun: Any, kvr_run: Path, who: str) -> None:
    path = job([12] * 60, new_tokens=0)  # so that each is finished when it is prefilled
    program = TESTS / "programs" / "slow_rank.py"
    launcher = str(Path(sys.executable).parent / "mpirun")
    command = [launcher, "-n", "2", sys.executable, str(program), str(path), str(tmp_path / "pids")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        text = running(process, " d000: ")
        pids = [int(file.name) for file in (tmp_path / "pids").iterdir()]
        assert len(pids) == 2
        for pid in pids if who == "all" else pids[:1]:
            os.kill(pid, signal.SIGUSR2)
        assert process.stderr is not None
        text += process.stderr.read()
        assert process.wait(60) == 75, text
    assert ("stopped by" in text or "another rank was stopped" in text) and "--resume continues" in text
    kept = answers(tmp_path / "job")
    assert 0 < len(kept) < 60
    again = mpirun(1, [kvr_run, path, "--resume"])
    assert again.returncode == 0, again.stderr
    assert f"{len(kept)} of them already done" in again.stderr
    after = answers(tmp_path / "job")
    assert len(after) == 60 and kept.items() <= after.items()
