"""Jobs that see a part of a document: with a rolling cache, and what every record says of its coverage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from constants import Kvr
from made_jobs import with_settings

from kvr_mpi.cli.plan import plan as plan_command

ROLLING = ("cache.kind=rolling", "cache.tokens=40", "parallel.chunk_tokens=16")
APPROXIMATE = ("cache.kind=streaming-llm", *ROLLING[1:])


def test_an_approximation_is_asked_for_by_name_and_recorded(run_job: Any, run_kvr: Kvr) -> None:
    """And a run goes on with the same cache only."""
    refused = run_job(1, *ROLLING, code=78).log
    assert "layer 0 sees all tokens" in refused and "'streaming-llm'" in refused
    whole, found = run_job(1), run_job(1, *APPROXIMATE, to="out")
    name = "rolling cache of 40 + 16 tokens (streaming-llm, 4 sinks)"
    assert {record.cache for record in found.records.values()} == {name}
    longer = [each for each, record in whole.records.items() if record.prompt_tokens > 60]
    assert any(found.tokens[each] != whole.tokens[each] for each in longer), "or else nothing was dropped"
    assert f"answers by a {name}" in run_kvr("inspect", found.folder)[1]
    assert f"{'cache':21} {name}" in run_kvr("inspect", found.folder, "doc-4.txt")[1]
    (line, *_) = run_kvr("export", found.folder, "--format", "jsonl")[1].splitlines()
    assert json.loads(line)["cache"] == name
    other = run_job(1, *APPROXIMATE, "cache.tokens=41", to="out", words=["--resume"], code=78)
    assert "cache was" in other.log


def test_plans_know_that_memory_does_not_grow(job: Path, model_of: Callable[[str], Path]) -> None:
    settings = with_settings(f"model.path={model_of('mistral-window')}")
    command = [str(job), "--ranks", "1", "--hardware", "h200", *settings]

    def plan(*more: str, ranks: int = 1) -> Any:
        words = [*command, "--ranks", str(ranks), "--json", *with_settings(*more)]
        return json.loads(CliRunner().invoke(plan_command, words, catch_exceptions=False).stdout)

    whole, held = plan(), plan(*ROLLING)
    assert held["cache"] == "rolling cache of 40 + 16 tokens (exact)" and whole["cache"] == "whole"
    assert len({document["memory_bytes"] for document in held["documents"]}) == 1
    assert len({document["memory_bytes"] for document in whole["documents"]}) > 1
    by_length = sorted(held["documents"], key=lambda document: document["tokens"])
    times = [document["ttft_s"] for document in by_length]
    assert times == sorted(times) and times[-1] > 3 * times[0] > 0, "a step for every so many tokens"
    assert {document["ranks"] for document in plan(*ROLLING, ranks=4)["documents"]} == {1}
    refused = CliRunner().invoke(plan_command, [*command, *with_settings(*ROLLING, "cache.tokens=14")])
    assert "sees a window of 16 tokens" in str(refused.exception)


# No answer hides that it has seen only a part of its document


TEXT = "The ferry left at seven and the harbour was quiet. "


@pytest.fixture
def run(documents: Any, run_job: Any) -> Callable[..., Any]:
    """Run a job over a short and a long document with some settings."""
    settings = documents({"short.txt": TEXT, "long.txt": TEXT * 20}), "output.max_failed=1"
    return lambda *more, ranks=1: run_job(ranks, *settings, *more)


CUT = ("prompt.too_long=keep-head", "prompt.max_tokens=100")
ROLLED = ("cache.kind=streaming-llm", "cache.tokens=96", "parallel.chunk_tokens=16")


def test_it_is_the_fraction_of_a_document_that_the_answer_has_seen(run: Any) -> None:
    """And is told of where it is less than all of it."""
    whole = run().records["long.txt"]
    for keep in ("head", "tail", "middle"):
        ran = run(f"prompt.too_long=keep-{keep}", CUT[1])
        assert "1 of 2 answers are based on only a part" in ran.log and "%" in ran.out
        cut = ran.records
        record = cut["long.txt"]
        assert record.text_tokens + record.dropped_tokens == whole.text_tokens and record.dropped_tokens > 100
        assert record.coverage == record.text_tokens / whole.text_tokens < 0.5
        assert cut["short.txt"].coverage == whole.coverage == 1
    for ranks in (1, 2):
        record = run("compress.method=streaming-llm", "compress.budget=64", ranks=ranks).records["long.txt"]
        assert record.coverage == record.retained_tokens / record.prompt_tokens < 0.5
    rolled = run(*ROLLED).records
    assert rolled["long.txt"].coverage == 96 / rolled["long.txt"].prompt_tokens and rolled["short.txt"].coverage == 1
    assert run("prompt.too_long=split", CUT[1]).records["long.txt"].coverage == 1


@pytest.mark.parametrize("settings", [CUT, ROLLED])
def test_below_the_least_coverage_a_document_is_an_error_record(run: Any, settings: tuple[str, ...]) -> None:
    found = run("prompt.min_coverage=0.8", *settings).records
    failed = found["long.txt"]
    assert found["short.txt"].status == "done" and failed.status == "error"
    assert "prompt.min_coverage" in failed.error and not failed.answer and failed.coverage == 0
