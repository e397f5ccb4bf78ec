"""Plans of a corpus: prompts counted as they will be made, forecasts of whole documents, and one plan for all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_jobs import TEXT, load

from kvr_mpi.costs.costmodel import single_seconds
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.documents import Document
from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.documents.prompts import Frame, split_text
from kvr_mpi.schedule.assignment import count_tokens, plan_documents, prompt_tokens, written_seconds
from kvr_mpi.schedule.forecast import Forecast, forecast_measured
from kvr_mpi.transport.local import run_local

COSTS = Costs(4, 1e-5, 3e-5, 1e-8, 0.0, 1e-4, 1024.0, 1e9, 1e-5, head_s=0.0096, kept_token_s=2.5e-7)
FORECAST = Forecast(source="invented", costs=COSTS, frame=Frame((1, 2), (3,), 1000), new_tokens=11)
STEP_S, ROW_S, TOKEN_S = 0.01, 4 * 4e-5, 1e-6


@pytest.mark.parametrize("overlap", [0, 50])
def test_prompts_are_counted_as_they_will_be_made(job: Path, tokenizer: Any, overlap: int) -> None:
    frame, ids = Frame((1, 2), (3,), 200, overlap=overlap), encode_text(tokenizer, TEXT * 60)
    prompts = {name: load(job, f"prompt.too_long={name}").prompt for name in ("error", "keep-tail", "split")}
    counted = {name: prompt_tokens(prompt, frame, len(ids)) for name, prompt in prompts.items()}
    made = split_text(tokenizer, frame, ids)
    assert len(ids) > 1000 and counted == {"error": 0, "keep-tail": 200, "split": sum(part.tokens for part in made)}
    assert [prompt_tokens(prompts["error"], frame, tokens) for tokens in (0, 1, 197, 198)] == [0, 4, 200, 0]
    parts = replace(FORECAST, frame=frame).parts(1000)[:-1]
    assert max(parts) <= 200 and sum(parts) >= 1000 + overlap * (len(parts) - 1)


def test_more_prompts_about_a_document_go_on_from_its_keys() -> None:
    two, apart = replace(FORECAST, more=(20,)), replace(FORECAST, apart=1)
    one_s = FORECAST.document_s(800, 1)
    assert apart.document_s(800, 1) == pytest.approx(2 * one_s) and apart.saved_s(800, 1) == 0
    assert two.document_s(800, 1) == pytest.approx(2 * one_s - two.saved_s(800, 1))
    assert 0.5 * FORECAST.ttft_s(800, 1) < two.saved_s(800, 1) < FORECAST.ttft_s(800, 1)
    assert two.document_s(5000, 2) == pytest.approx(2 * FORECAST.document_s(5000, 2)), "parts are not shared"


def test_a_job_says_how_its_prompts_are_cut_and_whether_over_chains(job: Path) -> None:
    uneven = replace(COSTS, speeds=(1.0, 0.5))
    even, timed = (
        forecast_measured(load(job, f"parallel.partition={name}"), uneven, FORECAST.frame, "")
        for name in ("even", "equal_time")
    )
    assert even.slices(960, 3).lengths == (320, 320, 320)
    assert timed.slices(960, 3).lengths[0] > 320 and timed.costs == COSTS, "of ranks that are all alike"
    texts = [("long", 900), ("short", 5)]
    assert plan_documents(load(job), texts, 4, FORECAST).chain_lengths != (1,)
    assert plan_documents(load(job, "parallel.strategy=single"), texts, 4, FORECAST).chain_lengths == (1,)


def test_the_plan_is_of_the_chain_length_that_the_job_names(job: Path) -> None:
    """If that is impossible, chain lengths are planned as with "auto"."""
    texts = [(f"{number}", 100 + 90 * number) for number in range(9)]
    plans = {
        length: plan_documents(load(job, f"parallel.ranks_per_chain={length}"), texts, 4, FORECAST)
        for length in ("auto", "all", "1", "2", "3")
    }
    for length, ranks in (("all", 4), ("1", 1), ("2", 2)):
        assert {place.ranks for place in plans[length].placements} == {ranks}
        assert plans[length].makespan_s == dict(plans["auto"].fixed_s)[ranks]
        assert plans[length].makespan_s == written_seconds(
            load(job, f"parallel.ranks_per_chain={length}"), plans[length]
        )
    assert plans["3"] == plans["auto"]
    assert written_seconds(load(job, "parallel.ranks_per_chain=3"), plans["3"]) is None


def test_ranks_share_the_counting(tokenizer: Any) -> None:
    documents = [Document(f"{number}", TEXT * number, error=None if number else "bad") for number in range(7)]
    counts = run_local(3, lambda rank: count_tokens(tokenizer, documents[rank.rank :: 3], rank))
    truth = {document.id: len(encode_text(tokenizer, document.text)) for document in documents}
    assert counts == [truth] * 3 and truth["0"] == 0


def test_a_document_in_parts_takes_as_long_as_its_prompts() -> None:
    assert FORECAST.parts(1000) == [1000]
    prompts = FORECAST.parts(5000)
    assert len(prompts) > 6 and max(prompts) <= 1000 and sum(prompts[:-1]) >= 5000
    assert prompts[-1] == 3 + 11 * (len(prompts) - 1), "the template and the parts' answers"
    whole = FORECAST.document_s(5000, 2)
    assert whole == pytest.approx(sum(FORECAST.document_s(prompt, 2) for prompt in prompts))
    assert FORECAST.document_s(800, 1) == pytest.approx(FORECAST.ttft_s(800, 1) + 10 * (STEP_S + 800 * TOKEN_S))
    many = replace(FORECAST, load=8.0)  # eight for each rank: a step serves eight, on both ranks of a chain
    assert many.document_s(800, 2) == pytest.approx(
        FORECAST.ttft_s(800, 2) + 10 * ((STEP_S + 7 * ROW_S) / 8 + 800 * TOKEN_S) / 2
    )
    assert replace(FORECAST, load=0.25).document_s(800, 2) == FORECAST.document_s(800, 2), "nobody to share a step with"
    assert FORECAST.ttft_s(3, 4) == FORECAST.ttft_s(3, 1), "fewer tokens than ranks"
    plain = replace(FORECAST, is_plain=True)
    assert plain.ttft_s(800, 1) == single_seconds(COSTS, 800)
    assert FORECAST.ttft_s(800, 1) == pytest.approx(single_seconds(COSTS, 800) - 1e-8 * 800**2 / 2), "the last layer"
    assert FORECAST.slices(900, 3).lengths[0] > 300


def test_documents_near_the_longest_prompt_are_not_taken_for_cut_ones(job: Path) -> None:
    """Up to 1000 tokens a document is one prompt and one answer; one token more, and it is several of each."""
    around = FORECAST.frame.max_tokens - FORECAST.frame.text_budget
    texts = [(f"{tokens}", tokens - around) for tokens in (*range(600, 1001), *range(1001, 5000, 7))]
    plan = plan_documents(load(job, "prompt.too_long=split"), texts, 1, FORECAST)
    forecast = replace(FORECAST, load=float(len(texts)))
    for place in plan.placements:
        took = place.end_s - place.start_s
        assert took == pytest.approx(forecast.document_s(place.tokens, 1), rel=2e-3)


def test_memory_decides_what_fits() -> None:
    tight = replace(FORECAST, peak_bytes=lambda tokens, ranks: tokens * 10.0 / ranks, memory_bytes=2000.0)
    assert tight.fits(200, 1) and not tight.fits(201, 1) and tight.fits(201, 2) and tight.memory(200, 1) == 2000
    assert tight.fits(100_000, 5), "answered in parts, none of them longer than a prompt may be"
    assert FORECAST.fits(10**9, 1) and replace(FORECAST, memory_bytes=1.0).fits(5, 1), "unknown: not refused"
