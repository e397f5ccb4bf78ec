"""Jobs with [compress]: the same answers on any number of ranks, and records that say what was dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from constants import Kvr
from made_jobs import TEXT, answers, last_line, with_settings
from made_tables import a_table, an_entry, fitting

from kvr_mpi.compress.registry import METHODS, Method, evenly
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.tuning.table import save_table

SMALL = ("compress.method=ada-snapkv", "compress.budget=64", "compress.window=16")


@pytest.fixture
def compressed(job: Path, tmp_path: Path, run_here: Any) -> Any:
    """Run the job with these settings on some ranks, and return its records by document; one is below the budget."""
    (tmp_path / "corpus" / "doc-short.txt").write_text("It is late.")

    def run(ranks: int, *settings: str) -> dict[str, Record]:
        folder = tmp_path / f"out-{ranks}-{abs(hash(settings))}"
        done = run_here(ranks, [job, *with_settings(f"output.path={folder}", *settings)])
        assert done.returncode == 0, done.stderr
        return {record.id: record for record in open_results(folder)}

    return run


def tokens(records: dict[str, Record]) -> dict[str, tuple[int, ...]]:
    return {name: record.token_ids for name, record in records.items()}


@pytest.mark.slow
def test_answers_do_not_depend_on_the_number_of_ranks(
    compressed: Any, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = compressed(1, *SMALL)
    whole = compressed(1)
    assert tokens(compressed(3, *SMALL)) == tokens(truth)
    assert tokens(compressed(2, *SMALL, "parallel.strategy=ring")) == tokens(truth)
    bounds = [(0, tokens * 30 // 31, tokens) for tokens in (64, 4096)]
    table = a_table().model_copy(update={"entries": tuple(map(an_entry, bounds))})
    save_table(fitting(table, tiny_model_dir), tmp_path / "table.json")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the table says
    uneven = compressed(2, *SMALL, f"parallel.partition={tmp_path / 'table.json'}")
    assert tokens(uneven) == tokens(truth)
    longest = max(uneven.values(), key=lambda record: record.prompt_tokens)
    assert longest.slices[2] - longest.slices[1] == 16, "the last slice was shorter than the window"
    assert tokens(whole) != tokens(truth), "or else nothing was compressed"
    for name, record in truth.items():
        if record.prompt_tokens <= 64:
            assert record.compression == "" and record.token_ids == whole[name].token_ids
            continue
        assert record.compression.startswith("ada-snapkv: budget 64") and "observes question" in record.compression
        assert record.retained_tokens == 64 and record.retained_bytes == 64 * 3 * 2 * (8 + 8) * 4
    assert {record.compression == "" for record in truth.values()} == {True, False}
    assert all(record.compression == "" and not record.retained_bytes for record in whole.values())


def test_a_budget_above_all_prompts_changes_nothing(compressed: Any) -> None:
    whole, kept = compressed(2), compressed(2, *SMALL[:1], "compress.budget=511")
    assert tokens(whole) == tokens(kept)


def test_what_the_document_observes_is_kept_beside_the_question(compressed: Any) -> None:
    found = compressed(2, *SMALL, "compress.observes=document")
    assert tokens(found) == tokens(compressed(1, *SMALL, "compress.observes=document"))
    beside = {record.retained_tokens - 64 for record in found.values() if record.compression}
    assert len(beside) == 1 and beside.pop() > 0, "the words after the text, and what the chat template puts there"


@pytest.mark.parametrize(
    "settings",
    [
        ("compress.method=streaming-llm", "compress.budget=0.5"),
        ("compress.method=pyramidkv", "compress.budget=0.5", "compress.window=8"),
    ],
)
def test_a_share_is_what_is_kept(compressed: Any, settings: tuple[str, ...]) -> None:
    for record in compressed(2, *settings).values():
        assert record.retained_tokens == pytest.approx(record.prompt_tokens - record.prompt_tokens // 2)


@pytest.mark.slow
def test_parts_of_a_text_are_compressed_each(compressed: Any, job: Path) -> None:
    (job.parent / "corpus" / "long.txt").write_text(TEXT * 40)
    split = ("prompt.too_long=split", "prompt.max_tokens=300", "documents.limit=7")
    found = compressed(2, *SMALL, *split)
    record = found["long.txt"]
    assert record.parts > 2 and tokens(found) == tokens(compressed(1, *SMALL, *split))
    assert 64 < record.retained_tokens <= 64 * record.parts


def test_another_budget_is_another_run(job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr) -> None:
    done = run_here(1, [job, *with_settings(*SMALL, "documents.limit=1")])
    assert done.returncode == 0, done.stderr
    assert "compress  method ada-snapkv, budget 64," in run_kvr("inspect", tmp_path / "out")[1]
    for change in ("compress.budget=65", "compress.observes=document"):
        again = run_here(1, [job, "--resume", *with_settings(*SMALL, change, "documents.limit=1")])
        assert again.returncode != 0 and "compress was" in again.stderr, last_line(again.stderr)
    plain = run_here(1, [job, "--resume", *with_settings("documents.limit=1")])
    assert plain.returncode != 0 and "compress was" in plain.stderr
    assert len(answers(tmp_path / "out")) == 1


def test_a_profile_is_known_by_what_it_says(job: Path, tmp_path: Path, run_here: Any) -> None:
    profile, limit = tmp_path / "heads.json", "documents.limit=1"
    settings = ("compress.method=headkv", f"compress.profile={profile}", "compress.budget=40", "compress.window=16")
    profile.write_text(json.dumps({"counts": [[20, 60], [30, 40], [90, 16]]}))
    assert run_here(1, [job, *with_settings(*settings, limit)]).returncode == 0
    profile.write_text(json.dumps({"counts": [[60, 20], [30, 40], [90, 16]]}))
    again = run_here(1, [job, "--resume", *with_settings(*settings, limit)])
    assert again.returncode != 0 and "compress was" in again.stderr
    profile.write_text(json.dumps({"counts": [[20, 60]]}))
    other = run_here(1, [job, "--overwrite", *with_settings(*settings, limit)])
    assert other.returncode != 0 and "is for 1 layers of 2 KV heads" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["data-parallel", pytest.param("head-parallel", marks=pytest.mark.long)])
def test_no_memory_to_compress_is_one_documents_error(
    job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A method that asks for more than any machine has, of torch or of numpy, for two of the documents."""

    def demanding(scores: torch.Tensor, each: int) -> torch.Tensor:
        if scores.shape[1] > 250:
            torch.empty(1 << 58)
        elif scores.shape[1] > 180:
            np.empty(1 << 58)
        return torch.full((len(scores),), each, device=scores.device)

    about = ("window",)
    monkeypatch.setitem(METHODS, "demanding", Method("demanding", "", "", evenly, about, compete=demanding))
    monkeypatch.setitem(METHODS, "content", Method("content", "", "", evenly, about))
    found = {}
    for method in ("demanding", "content"):
        settings = (f"compress.method={method}", *SMALL[1:], f"decode.mode={mode}", f"output.path={tmp_path / method}")
        done = run_here(2, [job, *with_settings(*settings)])
        assert done.returncode == (65 if method == "demanding" else 0), done.stderr
        found[method] = {record.id: record for record in open_results(tmp_path / method)}
    failed = {name for name, record in found["demanding"].items() if record.status == "error"}
    assert failed == {"doc-3.txt", "doc-4.txt"}
    for name, record in found["demanding"].items():
        if name in failed:
            assert "out of memory" in record.error and "allocate" in record.error and not record.answer
        else:
            assert record.token_ids == found["content"][name].token_ids


def test_a_row_may_ask_for_more_new_tokens_than_the_job(job: Path, tmp_path: Path, run_here: Any) -> None:
    """There is room for them in what its heads keep."""
    body = {"model": "any", "prompt": TEXT * 6, "max_tokens": 20}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request))
    job.write_text(job.read_text().replace("[prompt]", "").replace('template = "Summarise: {text} Summary:"', ""))
    told = (f"documents.path={tmp_path / 'requests.jsonl'}", "documents.format=openai-batch")
    done = run_here(1, [job, *with_settings(*SMALL, *told)])
    assert done.returncode == 0, done.stderr
    (found,) = open_results(tmp_path / "out")
    assert found.compression and len(found.token_ids) == 20
