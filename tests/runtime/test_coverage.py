"""No answer hides that it has seen only a part of its document."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from kvr_mpi import Results, open_results
from kvr_mpi.cli import group

SMALL_VOCABULARY = True

TEXT = "The ferry left at seven and the harbour was quiet. "
Run = Callable[..., Results]


@pytest.fixture
def run(documents: Any, run_job: Any) -> Run:
    """Run a job over a short and a long document with some settings."""
    settings = documents({"short.txt": TEXT, "long.txt": TEXT * 20}), "output.max_failed=1"
    return lambda *more, ranks=1: open_results(run_job(ranks, *settings, *more, to="out", words=["--overwrite"]).folder)


CUT = ("prompt.too_long=keep-head", "prompt.max_tokens=100")
ROLLED = ("cache.kind=streaming-llm", "cache.tokens=96", "parallel.chunk_tokens=16")


def test_it_is_the_fraction_of_a_document_that_the_answer_has_seen(run: Run) -> None:
    whole = run()["long.txt"]
    for keep in ("head", "tail", "middle"):
        cut = run(f"prompt.too_long=keep-{keep}", CUT[1])
        record = cut["long.txt"]
        assert record.text_tokens + record.dropped_tokens == whole.text_tokens and record.dropped_tokens > 100
        assert record.coverage == record.text_tokens / whole.text_tokens < 0.5
        assert cut["short.txt"].coverage == whole.coverage == 1
    for ranks in (1, 2):
        record = run("compress.method=streaming-llm", "compress.budget=64", ranks=ranks)["long.txt"]
        assert record.coverage == record.retained_tokens / record.prompt_tokens < 0.5
    rolled = run(*ROLLED)
    assert rolled["long.txt"].coverage == 96 / rolled["long.txt"].prompt_tokens and rolled["short.txt"].coverage == 1
    assert run("prompt.too_long=split", CUT[1])["long.txt"].coverage == 1


@pytest.mark.parametrize("settings", [CUT, ROLLED])
def test_below_the_least_coverage_a_document_is_an_error_record(run: Run, settings: tuple[str, ...]) -> None:
    found = run("prompt.min_coverage=0.8", *settings)
    assert found.ids("done") == ["short.txt"] and found.ids("error") == ["long.txt"]
    failed = found["long.txt"]
    assert "prompt.min_coverage" in failed.error and not failed.answer and failed.coverage == 0


def test_it_is_shown_and_exported(documents: Any, run_job: Any) -> None:
    ran = run_job(1, documents({"short.txt": TEXT, "long.txt": TEXT * 20}), *CUT)
    assert "1 of 2 answers are based on only a part" in ran.log and " %" in ran.out
    expected = ran.records["long.txt"].coverage
    assert dict(open_results(ran.folder).to_pandas().set_index("id").coverage)["long.txt"] == expected
    made = CliRunner().invoke(group, ["export", str(ran.folder), "--format", "jsonl"])
    rows = [json.loads(line) for line in made.output.splitlines()]
    assert next(row for row in rows if row["id"] == "long.txt")["coverage"] == expected
    shown = CliRunner().invoke(group, ["inspect", str(ran.folder), "long.txt"])
    assert f"coverage              {expected:.4g}" in shown.output
