"""Jobs with a rolling cache: the plain job's answers where windows fit, else refused, or said to be others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from constants import Kvr
from made_jobs import TEXT, answers, last_line, with_settings

from kvr_mpi.cli.plan import plan as plan_command
from kvr_mpi.errors import ConfigError
from kvr_mpi.job import load_job
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

ROLLING = ("cache.kind=rolling", "cache.tokens=40", "parallel.chunk_tokens=16")
APPROXIMATE = ("cache.kind=streaming-llm", *ROLLING[1:])


@pytest.fixture
def run(job: Path, tmp_path: Path, run_here: Any) -> Callable[..., dict[str, Record]]:
    """Run the job with these settings on some ranks, each with documents of its own; return its records."""

    def launch(name: str, *settings: str, ranks: int = 1) -> dict[str, Record]:
        folder = tmp_path / name
        words = with_settings(f"output.path={folder}", *settings)
        done = run_here(ranks, [job, *words])
        assert done.returncode == 0, done.stderr
        return {record.id: record for record in open_results(folder)}

    return launch


@pytest.mark.parametrize("in_parts", [False, pytest.param(True, marks=pytest.mark.long)])
def test_windows_that_fit_are_answered_as_by_the_plain_job(
    run: Any, model_of: Callable[[str], Path], tmp_path: Path, in_parts: bool
) -> None:
    """Also of prompts in parts, and what is sampled."""
    settings = [f"model.path={model_of('mistral-window')}", "generation.logprobs=0"]
    if in_parts:
        settings += ["generation.temperature=1.0", "prompt.too_long=split", "prompt.max_tokens=200"]
    whole, held = run("whole", *settings), run("rolling", *settings, *ROLLING, ranks=2)
    assert {each: record.token_ids for each, record in held.items()} == answers(tmp_path / "whole")
    assert max(record.prompt_tokens for record in held.values()) > 200
    for each, record in held.items():
        assert record.cache == "rolling cache of 40 + 16 tokens (exact)" and not whole[each].cache
        assert record.logprobs == pytest.approx(whole[each].logprobs, abs=1e-4)
        assert record.parts == whole[each].parts and record.computed_tokens == record.prompt_tokens
    assert any(record.parts > 1 for record in held.values()) == in_parts


def test_an_approximation_is_asked_for_by_name_and_recorded(
    run: Any, job: Path, tmp_path: Path, run_here: Any, run_kvr: Kvr
) -> None:
    refused = run_here(1, [job, *with_settings(*ROLLING)])
    assert refused.returncode == 78
    assert "layer 0 sees all tokens" in refused.stderr and "'streaming-llm'" in refused.stderr
    whole, found = run("whole"), run("approximate", *APPROXIMATE)
    name = "rolling cache of 40 + 16 tokens (streaming-llm, 4 sinks)"
    assert {record.cache for record in found.values()} == {name}
    longer = [each for each, record in whole.items() if record.prompt_tokens > 60]
    assert any(found[each].token_ids != whole[each].token_ids for each in longer), "or else nothing was dropped"
    assert f"answers by a {name}" in run_kvr("inspect", tmp_path / "approximate")[1]
    assert f"{'cache':21} {name}" in run_kvr("inspect", tmp_path / "approximate", "doc-4.txt")[1]
    (line, *_) = run_kvr("export", tmp_path / "approximate", "--format", "jsonl")[1].splitlines()
    assert json.loads(line)["cache"] == name


def test_a_rolling_job_is_resumed_with_the_same_cache_only(job: Path, tmp_path: Path, run_here: Any) -> None:
    def go(*settings: str) -> Any:
        return run_here(1, [job, "--resume", *with_settings(*settings)])

    assert run_here(1, [job, *with_settings(*APPROXIMATE)]).returncode == 0
    first = answers(tmp_path / "out")
    again = go(*APPROXIMATE, "cache.tokens=41")
    assert again.returncode != 0 and "cache was" in again.stderr, last_line(again.stderr)
    assert "5 of them already done" in go(*APPROXIMATE).stderr and answers(tmp_path / "out") == first


@pytest.mark.long
def test_memory_for_prompts_is_that_of_the_cache(run: Any, job: Path) -> None:
    """As much as a short prompt takes is enough for a long one; and what it is not enough for says so."""
    (job.parent / "corpus" / "long.txt").write_text(TEXT * 18)
    mib = 3 / 1024
    found = run("little", *APPROXIMATE, f"parallel.memory_gib={mib}")
    assert found["long.txt"].status == "done" and found["long.txt"].prompt_tokens > 350
    assert {record.status for record in found.values()} == {"done"}


@pytest.mark.long
def test_too_little_memory_is_an_error_record(job: Path, tmp_path: Path, run_here: Any) -> None:
    done = run_here(1, [job, *with_settings(*APPROXIMATE, "parallel.memory_gib=0.00001")])
    assert done.returncode == 65
    for record in open_results(tmp_path / "out"):
        assert record.error.startswith("a rolling cache of 40 + 16 tokens") and "cache.tokens" in record.error


@pytest.mark.long
def test_no_memory_for_a_step_is_one_documents_error(
    run: Any, job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that fails leaves the others as they are, and is resumed; a token that fails is tried again."""
    from kvr_mpi.kv.rolling import RollingLayer

    truth, update, failed = run("truth", *APPROXIMATE), RollingLayer.update, []

    def scarce(layer: RollingLayer, keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = layer.cache.prompt_tokens
        if layer.layer_idx == 1 and tokens == truth["doc-3.txt"].prompt_tokens and layer.length > 100:
            raise torch.OutOfMemoryError("a prompt's")
        out = update(layer, keys, *args, **kwargs)
        if layer.layer_idx == 1 and layer.length == tokens + 3 and tokens > 100 and tokens not in failed:
            failed.append(tokens)
            raise torch.OutOfMemoryError("a token's")
        return out

    with monkeypatch.context() as patched:
        patched.setattr(RollingLayer, "update", scarce)
        found = run("scarce", *APPROXIMATE, "output.max_failed=1")
    assert found["doc-3.txt"].error.startswith(f"a prompt of {truth['doc-3.txt'].prompt_tokens} tokens: there is no")
    done = {name: record.token_ids for name, record in found.items() if record.status == "done"}
    assert len(done) == 4 and len(failed) == 3, "each of them but the shortest lost a token, and wrote it again"
    assert done == {name: truth[name].token_ids for name in done}
    again = with_settings(*APPROXIMATE, f"output.path={tmp_path / 'scarce'}")
    run_here(1, [job, "--resume", "--retry-failed", *again])
    assert answers(tmp_path / "scarce") == {name: record.token_ids for name, record in truth.items()}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("cache.tokens=40",), "cache.tokens is for rolling caches"),
        (("cache.kind=rolling", "cache.tokens=4"), "cache.tokens = 4"),
        (("cache.kind=rolling", "parallel.chunk_tokens=0"), "parallel.chunk_tokens = 0"),
        (("cache.kind=moving",), "cache.kind = 'moving'"),
    ],
)
def test_settings_that_make_no_sense(job: Path, settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(job, settings, {})
    assert words in str(caught.value)


def test_plans_know_that_memory_does_not_grow(job: Path, model_of: Callable[[str], Path]) -> None:
    settings = with_settings(f"model.path={model_of('mistral-window')}")
    command = [str(job), "--ranks", "1", "--hardware", "h200", *settings]

    def plan(*more: str, ranks: int = 1) -> Any:
        words = [*command, "--ranks", str(ranks), "--json", *with_settings(*more)]
        return json.loads(CliRunner().invoke(plan_command, words, catch_exceptions=False).stdout)

    whole, held = plan(), plan(*ROLLING)
    assert held["cache"] == "rolling cache of 40 + 16 tokens (exact)" and whole["cache"] == "whole"
    assert {document["ranks"] for document in held["documents"]} == {1}
    assert len({document["memory_bytes"] for document in held["documents"]}) == 1
    assert len({document["memory_bytes"] for document in whole["documents"]}) > 1
    by_length = sorted(held["documents"], key=lambda document: document["tokens"])
    times = [document["ttft_s"] for document in by_length]
    assert times == sorted(times) and times[-1] > 3 * times[0] > 0, "a step for every so many tokens"
    assert {document["ranks"] for document in plan(*ROLLING, ranks=4)["documents"]} == {1}
    shown = CliRunner().invoke(plan_command, [*command, *with_settings(*ROLLING)], catch_exceptions=False).stdout
    assert "cache      rolling cache of 40 + 16 tokens (exact)" in shown
    refused = CliRunner().invoke(plan_command, [*command, *with_settings(*ROLLING, "cache.tokens=14")])
    assert "sees a window of 16 tokens" in str(refused.exception)
