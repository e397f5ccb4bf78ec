"""A batch survives anything: see ``harness``. `make test` runs one case, `make test-all` six, and
``make test-long PARTS=faults SEEDS=1-1000`` those of these seeds, or ``SEEDS=17`` one.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import make_reference, run_case, write_job, write_questions
from made_jobs import answers

# "1-1000" or "3,17".
SEEDS = os.environ.get("KVR_TEST_SEEDS", "")
# Seeds of each kind of job: over texts; about stored documents; with keys and values that stay spread over the ranks,
# each of which writes its own; of a run that is extended.
CASES = {"texts": "1,4", "questions": "1,2", "sharded": "1", "extended": "1"}
QUICK = ("texts", 4)


def seeds(text: str) -> list[int]:
    """Read "1-1000" or "3,17"."""
    ends = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in ends for seed in range(int(first), int(last or first) + 1)]


@pytest.fixture(scope="module", autouse=True)
def start(warm_start: list[str]) -> None:
    """Let ranks be forked from a process that has imported everything."""
    harness.starter[:] = warm_start


class Jobs:
    """Jobs of each kind, each with what it comes to in peace; made when they are first asked for."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model

    @cached_property
    def texts(self) -> tuple[Path, Path]:
        job = write_job(self._folder / "texts", self._model)
        return job, make_reference(job, self._folder / "reference" / "out")

    @cached_property
    def questions(self) -> tuple[Path, Path]:
        """About stored documents, each held by all ranks together; the answers are those of ranks on their own."""
        alone, together = (self._folder / name for name in ("alone", "together"))
        for folder in (alone, together):
            folder.mkdir()
        job = write_questions(together, self._model, self.texts[1], sharded=True)
        found = make_reference(job, together / "out", well=0)
        each = make_reference(write_questions(alone, self._model, self.texts[1]), alone / "out", well=0)
        assert answers(found) == answers(each)
        return job, found

    @cached_property
    def sharded(self) -> tuple[Path, Path]:
        return write_job(self._folder / "sharded", self._model, kv="sharded"), self.texts[1]

    @cached_property
    def extended(self) -> tuple[Path, Path, Path]:
        """A job whose corpus has changed, what it is to come to, and its run before that."""
        folder = self._folder / "grown"
        job = write_job(folder, self._model)
        before, corpus = make_reference(job, folder / "before"), folder / "corpus"
        (corpus / "doc-01.txt").write_text("Another text about the harbour. " * 9)
        (corpus / "doc-02.txt").write_text("And one more. " * 20)
        (corpus / "doc-03.txt").unlink()
        (corpus / "new.txt").write_text("A new document. " * 12)
        return job, make_reference(job, folder / "after"), before


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("faults"), tiny_model_dir)


def cases() -> list[Any]:
    return [
        pytest.param(kind, seed, id=f"{kind}-seed{seed}", marks=pytest.mark.quick if (kind, seed) == QUICK else ())
        for kind, few in CASES.items()
        for seed in seeds(SEEDS or few)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), cases())
def test_nothing_is_lost_double_stale_different_or_unreadable(kind: str, seed: int, jobs: Jobs, tmp_path: Path) -> None:
    job, reference, *begun = getattr(jobs, kind)
    well = 0 if kind == "questions" else 65
    case = run_case(seed, job, reference, tmp_path, well=well, begun=begun[0] if begun else None)
    print("; ".join(case.story))
