"""Jobs that score continuations instead of writing answers: from a list, or from each row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from constants import Kvr
from made_jobs import TEXT, with_settings

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

SMALL_VOCABULARY = True

SCORED = 'generation.score=[" yes", " Nobody had seen it", " no"]'


def found_in(folder: Path) -> dict[str, Record]:
    return {record.id: record for record in open_results(folder)}


@pytest.fixture
def scoring(job: Path) -> Path:
    """A job that says nothing of new tokens."""
    job.write_text(job.read_text().replace("max_new_tokens = 8", ""))
    return job


@pytest.mark.slow
def test_continuations_of_a_list(scoring: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr) -> None:
    found = {}
    for ranks in (1, 3):
        out = tmp_path / str(ranks)
        run = run_here(ranks, [scoring, *with_settings(SCORED, f"output.path={out}")])
        assert run.returncode == EXIT_OK and "5 done, 0 failed" in run.stdout, run.stderr
        found[ranks] = found_in(out)
    for name, record in found[1].items():
        assert record.answer == "" and record.new_tokens == 0 and record.status == "done"
        assert [score["text"] for score in record.scored] == [" yes", " Nobody had seen it", " no"]
        for score, other in zip(record.scored, found[3][name].scored, strict=True):
            assert (
                score["logprob"]
                == pytest.approx(sum(score["token_logprobs"]))
                == pytest.approx(other["logprob"], abs=1e-3)
            )
            assert score["tokens"] == len(score["token_ids"]) == len(score["token_logprobs"]) > 0
            assert score["logprob_per_token"] == pytest.approx(score["logprob"] / score["tokens"])
    code, out, _ = run_kvr("export", tmp_path / "1", "--format", "jsonl")
    rows = {row["id"]: row for row in map(json.loads, out.splitlines())}
    assert code == EXIT_OK and rows.keys() == found[1].keys()
    assert all(row["scores"] == found[1][name].scored for name, row in rows.items())


def test_continuations_of_each_row_and_prompt(scoring: Path, tmp_path: Path, run_here: Any) -> None:
    rows = [
        {"id": "two", "text": TEXT, "choices": [" yes", " no"]},
        {"id": "one", "text": TEXT, "choices": " perhaps"},
        {"id": "none", "text": TEXT},
        {"id": "empty", "text": TEXT, "choices": ["a", ""]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = 'template = {p = "{text} p?", q = "{text} q?"}'
    text = scoring.read_text().replace(str(tmp_path / "corpus"), str(file))
    scoring.write_text(text.replace('template = "Summarise: {text} Summary:"', prompts))
    run = run_here(2, [scoring, *with_settings("generation.score=choices")])
    assert run.returncode == EXIT_BAD_DATA, run.stderr
    found = found_in(tmp_path / "out")
    assert len(found) == 8
    for prompt in ("p", "q"):
        assert [score["text"] for score in found[f"two#{prompt}"].scored] == [" yes", " no"]
        assert [score["text"] for score in found[f"one#{prompt}"].scored] == [" perhaps"]
        assert "'choices' (generation.score) is 'None'" in found[f"none#{prompt}"].error
        assert "expected a non-empty text" in found[f"empty#{prompt}"].error
    assert found["two#p"].scored[0]["logprob"] != found["two#q"].scored[0]["logprob"]


@pytest.mark.long
def test_stored_documents_are_scored(job: Path, scoring: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr) -> None:
    kv, out = tmp_path / "kv", tmp_path / "answers"
    options = with_settings(f"output.path={kv}", "output.kv=true", "documents.limit=2", "generation.max_new_tokens=2")
    assert run_here(1, [job, *options]).returncode == EXIT_OK
    ask = job.with_name("ask.toml")
    text = scoring.read_text().replace('template = "Summarise: {text} Summary:"', "").replace('partition = "even"', "")
    ask.write_text(text.replace(str(tmp_path / "corpus"), str(kv)) + '\n[questions]\nask = ["Who?"]\n')
    again = with_settings("prompt.template=Summarise: {text}\n\nWho?", "documents.limit=2", f"output.path={out}-again")
    for run in (
        run_here(1, [ask, *with_settings(SCORED, f"output.path={out}")]),
        run_here(1, [scoring, *with_settings(SCORED), *again]),
    ):
        assert run.returncode == EXIT_OK, run.stderr
    truth = found_in(Path(f"{out}-again"))
    for record in found_in(out).values():
        for one, other in zip(record.scored, truth[record.document].scored, strict=True):
            assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=2e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (['generation.score=[""]'], "an empty continuation has no probability"),
        ([SCORED, "generation.max_new_tokens=4"], "replaces the answer, but max_new_tokens = 4 asks for one"),
        (["generation.score=x"], "generation.score: no row has a field 'x'; text files have no fields"),
    ],
)
def test_what_cannot_be_meant_is_refused(scoring: Path, run_here: Any, settings: list[str], said: str) -> None:
    run = run_here(1, [scoring, *with_settings(*settings)])
    assert run.returncode == EXIT_CONFIG and said in run.stderr
    assert "loading" not in run.stderr
