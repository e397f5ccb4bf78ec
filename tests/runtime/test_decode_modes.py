"""Jobs with [decode]: ranks that share heads answer as ranks that decode each their own, and say what they do."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from constants import TESTS
from made_jobs import TEXT, answers, last_line, with_settings

from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

SMALL_VOCABULARY = True

SMALL = ("compress.method=ada-snapkv", "compress.budget=64", "compress.window=16")
SHARED = "decode.mode=head-parallel"


@pytest.fixture
def answered(job: Path, tmp_path: Path, run_here: Any) -> Any:
    """Run the job with these settings on some ranks; return its records and its log."""
    (tmp_path / "corpus" / "doc-short.txt").write_text("It is late.")

    def run(ranks: int, *settings: str) -> tuple[dict[str, Record], str]:
        folder = tmp_path / f"out-{ranks}-{abs(hash(settings))}"
        done = run_here(ranks, [job, *with_settings(f"output.path={folder}", *settings)])
        assert done.returncode == 0, done.stderr
        return {record.id: record for record in open_results(folder)}, done.stderr

    return run


def tokens(records: dict[str, Record]) -> dict[str, tuple[int, ...]]:
    return {name: record.token_ids for name, record in records.items()}


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_shared_heads_give_the_answers_of_ranks_apart(answered: Any, ranks: int) -> None:
    wanted, _ = answered(1, *SMALL)
    found, log = answered(ranks, *SMALL, SHARED)
    assert tokens(found) == tokens(wanted)
    assert f"decoded by {ranks} ranks that share heads (proportional, up to {ranks - 1} copies a layer" in log
    for name, record in found.items():
        assert record.compression == wanted[name].compression
        assert record.retained_bytes == wanted[name].retained_bytes and record.finish_reason == "length"


def test_one_rank_has_nobody_to_share_with(answered: Any) -> None:
    wanted, _ = answered(1)
    found, log = answered(1, SHARED)
    assert tokens(found) == tokens(wanted) and "there is only one rank" in log


@pytest.mark.slow
def test_parts_settings_of_rows_and_bad_documents(job: Path, tmp_path: Path, run_here: Any) -> None:
    """A text in parts, its own lengths and ways to choose, and a document that fails: all as ranks apart have it."""
    (job.parent / "corpus" / "long.txt").write_text(TEXT * 40)
    (job.parent / "corpus" / "empty.txt").write_text("")
    split = ("prompt.too_long=split", "prompt.max_tokens=300", "generation.repetition_penalty=1.5")
    found = {}
    for mode in ("data-parallel", "head-parallel"):
        out = tmp_path / mode
        settings = (*SMALL, *split, f"output.path={out}", f"decode.mode={mode}")
        done = run_here(2, [job, *with_settings(*settings)])
        assert done.returncode == 65 and last_line(done.stderr).count("1 of 7 documents failed"), done.stderr
        found[mode] = {record.id: (record.token_ids, record.parts, record.error) for record in open_results(out)}
    assert found["data-parallel"] == found["head-parallel"]
    assert found["head-parallel"]["long.txt"][1] > 2 and found["head-parallel"]["empty.txt"][2]


@pytest.mark.long
def test_requests_with_settings_of_their_own(job: Path, tmp_path: Path, run_here: Any) -> None:
    """Some greedy, some sampled, one with log-probabilities, of several lengths, in one wave."""
    bodies = [{"max_tokens": 3 + number, "prompt": f"{number} " + TEXT} for number in range(4)]
    bodies[1] |= {"temperature": 0.9, "seed": 5}
    rows = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": {"model": "any", **body}}
        for at, body in enumerate(bodies)
    ]
    more = {"model": "any", "prompt": TEXT, "max_tokens": 3, "logprobs": 2}
    rows.append({"custom_id": "more", "method": "POST", "url": "/v1/completions", "body": more})
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job.write_text(job.read_text().replace("[prompt]", "").replace('template = "Summarise: {text} Summary:"', ""))
    found = []
    for mode in ("data-parallel", "head-parallel"):
        told = (f"documents.path={path}", "documents.format=openai-batch", f"output.path={tmp_path / mode}")
        done = run_here(2, [job, *with_settings(*told, f"decode.mode={mode}")])
        assert done.returncode == 0, done.stderr
        found.append({record.id: record.token_ids for record in open_results(tmp_path / mode)})
    assert found[0] == found[1]
    assert all(len(found[0][str(at)]) == 3 + at for at in range(4)) and len(found[0]["more"]) == 3


@pytest.mark.slow
def test_a_run_goes_on_in_either_way(job: Path, tmp_path: Path, run_here: Any) -> None:
    """Answers are the same, so one mode goes on with what another has begun."""
    wanted = tmp_path / "wanted"
    assert run_here(1, [job, *with_settings(*SMALL, f"output.path={wanted}")]).returncode == 0
    assert run_here(2, [job, *with_settings(*SMALL, SHARED, "documents.shard='0/2'")]).returncode == 0
    assert len(answers(tmp_path / "out")) == 3
    again = run_here(3, [job, "--resume", *with_settings(*SMALL, "decode.mode=auto")])
    assert again.returncode == 0 and "3 of them already done" in again.stderr
    assert again.stderr.count("decode.mode = 'auto': ") == 1 and "a step is forecast to take" in again.stderr
    assert answers(tmp_path / "out") == answers(wanted)


@pytest.mark.long
def test_heads_are_placed_by_a_profile_of_this_model(job: Path, tmp_path: Path, run_here: Any) -> None:
    profile = tmp_path / "heads.json"
    profile.write_text(json.dumps({"counts": [[20, 60], [30, 40], [90, 16]]}))
    told = (*SMALL, SHARED, f"decode.profile={profile}", "decode.placement=best-effort")
    assert run_here(1, [job, *with_settings(*SMALL, f"output.path={tmp_path / 'wanted'}")]).returncode == 0
    done = run_here(2, [job, *with_settings(*told)])
    assert done.returncode == 0 and f"(best-effort, by {profile})" in done.stderr, done.stderr
    assert answers(tmp_path / "out") == answers(tmp_path / "wanted")
    profile.write_text(json.dumps({"counts": [[20, 60]]}))
    other = run_here(2, [job, *with_settings(*told), "--overwrite"])
    assert other.returncode == 78 and "is for 1 layers of 2 KV heads" in other.stderr and str(profile) in other.stderr


@pytest.mark.slow
def test_a_model_whose_heads_are_not_shared_out(job: Path, run_here: Any, model_of: Any) -> None:
    told = (f"model.path={model_of('mistral-window')}", "documents.limit=1")
    refused = run_here(2, [job, *with_settings(*told, SHARED)])
    assert refused.returncode == 78 and "not all its layers see all tokens" in refused.stderr
    assert "choose mode = 'data-parallel'" in refused.stderr
    left = run_here(2, [job, *with_settings(*told, "decode.mode=auto")])
    assert left.returncode == 0 and "decode.mode = 'auto': data-parallel, since not all its layers" in left.stderr


@pytest.mark.long
def test_a_rank_that_fails_while_heads_are_shared_ends_all(job: Path, mpirun: Any) -> None:
    """The others wait for its part of a sum."""
    run = mpirun(3, [sys.executable, TESTS / "programs" / "failing_step.py", job])
    assert run.returncode == 1 and "broken on purpose" in run.stderr
    failed_at = float(run.stdout.split("failing at ")[1].split()[0])
    assert time.time() - failed_at < 60
