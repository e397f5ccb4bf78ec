"""A batch survives anything: see ``harness``. `make test` runs one case, `make test-all` fifty, and
``make test-long PARTS=faults SEEDS=1-1000`` those of these seeds, or ``SEEDS=17`` one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import make_reference, run_case, run_extended_case, write_job, write_questions
from made_jobs import answers as answers_in
from warm import server

# "1-1000" or "3,17".
SEEDS = os.environ.get("KVR_TEST_SEEDS", "")
CASES, CASES_ASKING, CASES_SHARDED, CASES_ASKING_TOGETHER, CASES_EXTENDED = 14, 5, 5, 5, 5
QUICK = 4


def seeds(text: str) -> list[int]:
    """Read "1-1000" or "3,17"."""
    ends = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in ends for seed in range(int(first), int(last or first) + 1)]


@pytest.fixture(scope="module", autouse=True)
def start() -> Iterator[None]:
    """Let ranks be forked from a process that has imported everything."""
    with server() as starter:
        harness.starter[:] = starter
        yield


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, small_vocabulary_dir: Path) -> Path:
    return write_job(tmp_path_factory.mktemp("faults"), small_vocabulary_dir)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, job: Path) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "out"
    make_reference(job, folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory, small_vocabulary_dir: Path, reference: Path) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions"), small_vocabulary_dir, reference)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, questions: Path) -> Path:
    folder = tmp_path_factory.mktemp("answers") / "out"
    make_reference(questions, folder, well=0)
    return folder


@pytest.fixture(scope="module")
def questions_together(tmp_path_factory: pytest.TempPathFactory, small_vocabulary_dir: Path, reference: Path) -> Path:
    return write_questions(tmp_path_factory.mktemp("together"), small_vocabulary_dir, reference, sharded=True)


@pytest.fixture(scope="module")
def answers_together(tmp_path_factory: pytest.TempPathFactory, questions_together: Path) -> Path:
    folder = tmp_path_factory.mktemp("answers-together") / "out"
    make_reference(questions_together, folder, well=0)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, small_vocabulary_dir: Path) -> Path:
    return write_job(tmp_path_factory.mktemp("sharded"), small_vocabulary_dir, kv='"sharded"')


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory, small_vocabulary_dir: Path) -> tuple[Path, Path, Path]:
    """A job whose corpus has changed, its run before that, and what it is to come to."""
    folder = tmp_path_factory.mktemp("grown")
    job = write_job(folder, small_vocabulary_dir)
    make_reference(job, folder / "before")
    corpus = folder / "corpus"
    (corpus / "doc-01.txt").write_text("Another text about the harbour. " * 9)
    (corpus / "doc-02.txt").write_text("And one more. " * 20)
    (corpus / "doc-03.txt").unlink()
    (corpus / "new.txt").write_text("A new document. " * 12)
    make_reference(job, folder / "after")
    return job, folder / "before", folder / "after"


def cases(count: int, quick: int = 0) -> list[Any]:
    return [
        pytest.param(seed, id=f"seed{seed}", marks=pytest.mark.quick if seed == quick else ())
        for seed in seeds(SEEDS or f"1-{count}")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases(CASES, QUICK))
def test_nothing_is_lost_double_different_or_unreadable(seed: int, job: Path, reference: Path, tmp_path: Path) -> None:
    case = run_case(seed, job, reference, tmp_path)
    print("; ".join(case.story))


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases(CASES_ASKING))
def test_answers_about_stored_documents_are_not_lost_either(
    seed: int, questions: Path, answers: Path, tmp_path: Path
) -> None:
    case = run_case(seed, questions, answers, tmp_path, well=0)
    print("; ".join(case.story))


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases(CASES_SHARDED))
def test_parts_of_every_rank_are_not_lost_either(seed: int, sharded: Path, reference: Path, tmp_path: Path) -> None:
    """Keys and values stay spread over the ranks, each of which writes its own."""
    case = run_case(seed, sharded, reference, tmp_path)
    print("; ".join(case.story))


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases(CASES_ASKING_TOGETHER))
def test_answers_by_ranks_that_hold_documents_together_are_not_lost_either(
    seed: int, questions_together: Path, answers_together: Path, answers: Path, tmp_path: Path
) -> None:
    """They are those of ranks that each ask documents of their own, too."""
    assert answers_in(answers_together) == answers_in(answers)
    case = run_case(seed, questions_together, answers_together, tmp_path, well=0)
    print("; ".join(case.story))


@pytest.mark.slow
@pytest.mark.parametrize("seed", cases(CASES_EXTENDED))
def test_nothing_stale_is_left_when_a_run_is_extended(
    seed: int, grown: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    case = run_extended_case(seed, *grown, tmp_path)
    print("; ".join(case.story))
