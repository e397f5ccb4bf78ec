"""Jobs whose stages are several ranks answer as jobs whose ranks have the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_jobs import answers, with_settings

from kvr_mpi.store.folder import read_run

TOKENS = "generation.max_new_tokens=32"


@pytest.fixture
def answered(job: Path, tmp_path: Path, run_here: Any) -> Callable[..., tuple[dict[str, tuple[int, ...]], str]]:
    """Run the job with these settings on some ranks; return its answers and its log."""
    (tmp_path / "corpus" / "doc-short.txt").write_text("It is late.")

    def run(ranks: int, *settings: str) -> tuple[dict[str, tuple[int, ...]], str]:
        folder = tmp_path / f"out-{ranks}-{abs(hash(settings))}"
        done = run_here(ranks, [job, *with_settings(f"output.path={folder}", TOKENS, *settings)])
        assert done.returncode == 0, done.stderr
        records = list(read_run(folder))
        assert len({record.id for record in records}) == len(records) == 6
        return answers(folder), done.stderr

    return run


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_of_two_ranks_give_the_answers_of_one_process(answered: Any, stages: int) -> None:
    wanted, _ = answered(1)
    found, log = answered(2 * stages, "parallel.ranks_per_stage=2")
    assert found == wanted and all(len(tokens) == 32 for tokens in found.values())
    assert f"1 chain(s) of {stages} stage(s) of 2 ranks" in log
