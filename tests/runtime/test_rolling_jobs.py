"""Jobs with a rolling cache: the plain job's answers where windows fit, else refused, or said to be others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
