"""Jobs in which one rank sees something else than the rest: an unreadable file, another text, none, another time.

Whatever a rank sees, a document has the right answer or an error record, or the job ends with a reason; it has never a
wrong answer, a hang, or a traceback. Right is what an undisturbed job answers about the text that the record names by
its hash. ``KVR_TEST_SEEDS=1-300`` runs other cases than those of every run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import Case, end, launch, make_reference, write_job, write_questions
from made_jobs import TEXT, with_settings
from test_faults import seeds, start

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK, KvrError
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

__all__ = ["start"]  # of ranks, here too
SEEDS = os.environ.get("KVR_TEST_SEEDS") or "1-4"
OTHER = "A train came late at night and the station was empty. Somebody at the gate had lost a red bag. "
KINDS = ("read-error", "content", "missing", "clock")
# Settings of jobs over texts; of those that use a run with stored keys and values; and of questions about it.
MODES: Mapping[str, tuple[str, ...]] = {
    "chain": (),
    "auto": ("parallel.ranks_per_chain=auto", "output.kv=false"),
    "sharded": ("output.kv=sharded",),
    "tensor-parallel": ("parallel.tensor_parallel=2",),
    "reuse": ("documents.reuse={run}",),
    "ask": (),
    "ask sharded": ("parallel.ranks_per_chain=all", "output.kv=false"),
}
# Answers by document and by hash of its text.
Answers = dict[tuple[str, str], Record]


def answers(run: Path) -> Answers:
    return {(record.id, record.document_sha256): record for record in open_results(run) if record.status == "done"}


@dataclass(frozen=True)
class Place:
    """A corpus and another of the same names, a run about each, questions about the first; and what is right."""

    corpus: Path
    other: Path
    job: Path
    questions: Path
    right: Answers
    right_of_questions: Answers


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Place:
    folder, right = tmp_path_factory.mktemp("views"), Answers()
    for name, text in (("other", OTHER), ("corpus", TEXT)):
        job = write_job(folder / name, tiny_model_dir, text=text)
        right |= answers(make_reference(job, folder / name / "run"))
    questions = write_questions(folder, tiny_model_dir, folder / "corpus" / "run")
    found = answers(make_reference(questions, folder / "answers", well=0))
    return Place(folder / "corpus", folder / "other", job, questions, right, found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_no_answer_is_wrong_whatever_one_rank_sees(seed: int, place: Place, tmp_path: Path) -> None:
    chance = random.Random(seed)
    mode, kind = list(MODES)[seed % len(MODES)], chance.choice(KINDS)
    asks = mode.startswith("ask")
    seen = f"corpus/doc-{chance.randrange(7):02d}.txt"
    if (asks or mode == "reuse") and chance.random() < 0.7:
        seen = "run/results.h5"
    view = {
        "rank": chance.randrange(2),
        "kind": kind,
        "name": f"corpus/{seen}",
        "first": chance.choice([0, 0, 1, 2, 3]),
        "times": chance.choice([1, 1, 10**6]),
        "other": str(place.other / seen),
    }
    output, job, right = tmp_path / "out", place.job, place.right
    if asks:
        job, right = place.questions, place.right_of_questions
    words = with_settings(*(one.format(run=place.corpus / "run") for one in MODES[mode]))
    code, log = end(launch(job, output, 2, words=words, view=view), Case(seed, [f"{mode} {view}"]))
    story = f"{mode} {view}; exit code {code}\n{log[-4000:]}"
    assert "Traceback" not in log and code in (EXIT_OK, EXIT_BAD_DATA, EXIT_CONFIG), story
    assert f"exit code {code}: " in log, f"no reason: {story}"
    try:
        records = list(open_results(output))
    except KvrError:
        assert code != EXIT_OK, story
        return
    for record in records:
        if record.status == "done":
            wanted = right.get((record.id, record.document_sha256))
            assert wanted is not None, f"{record.id} has an answer about a text of no corpus: {story}"
            assert record.prompt_sha256 == wanted.prompt_sha256, f"{record.id}: another prompt: {story}"
            assert record.token_ids == wanted.token_ids, f"{record.id}: a wrong answer: {story}"
        else:
            assert record.error, f"{record.id} failed without a reason: {story}"
    ids = [record.id for record in records]
    assert len(set(ids)) == len(ids), f"a document has two records: {sorted(ids)}: {story}"
    # A job that cannot read its source at all ends before the first document, with a reason.
    if code == EXIT_OK or f"exit code {code}: done" in log:
        assert {name for name, _ in right} <= {*ids}, f"some are missing: {story}"
        affected = len(ids) if "results.h5" in seen else 2 if asks else 1
        failed = sum(record.status != "done" and record.id != "empty.txt" for record in records)
        assert failed <= affected, f"one file cost {failed} documents: {story}"
