"""No answer hides that it has seen only a part of its document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
        assert "1 of 2 answers are based on only a part" in ran.log and " %" in ran.out
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
