"""Steps that are recorded and replayed; a stand-in records and replays what torch is told."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import rows
import torch
from chains import greedy
from rows import (
    Recording,
    alone,
    answer,
    batch_of,
    check_integrity,
    finish,
    other_prompt,
    pages_of,
    pages_read,
    ready,
    steps_recorded,
)

from kvr_mpi.decode import step_graph
from kvr_mpi.decode.step_graph import StepRecorder
from kvr_mpi.prefill.packed import prefill_packed


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recording]]:
    """Every graph that is recorded, as if on a GPU."""
    monkeypatch.setattr(rows, "NEW_TOKENS", 24)
    with pages_read(monkeypatch):
        yield steps_recorded(monkeypatch)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[StepRecorder]:
    """Every recorder that is made."""
    made: list[StepRecorder] = []
    begin = StepRecorder.__init__
    monkeypatch.setattr(StepRecorder, "__init__", lambda one, loaded: (begin(one, loaded), made.append(one))[0])
    return made


def answers(name: str, *, pages: int = 64) -> dict[str, tuple[int, ...]]:
    loaded = ready(name)
    return answer(loaded, pages_of(loaded, pages))


def truth(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    with monkeypatch.context() as patch:
        patch.setattr(step_graph, "STEPS_BEFORE", 1000)
        return answers(name)


@pytest.mark.parametrize(
    ("name", "pages"),
    [("llama-gqa", 12), ("llama-gqa", 64), ("mistral-window", 12), ("qwen2-some-windows", 64), ("gpt-oss-sinks", 64)],
)
def test_replayed_steps_answer_as_those_that_run(
    name: str, pages: int, graphs: list[Recording], recorders: list[StepRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents join and leave; some cross a page, or their window, while their steps are replayed."""
    expected = truth(name, monkeypatch)
    assert not graphs
    assert answers(name, pages=pages) == expected
    assert recorders[-1].why_not is None
    assert sum(graph.replays for graph in graphs) > 12, "most steps are not run anew"
    assert len(graphs) < 6, "others join and leave in the same slots"


def test_what_the_host_decides_is_not_recorded(
    graphs: list[Recording], recorders: list[StepRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft caps have no call for all documents; frequencies that depend on the length are the host's to choose."""
    expected = truth("gemma2-softcap", monkeypatch)
    assert answers("gemma2-softcap") == expected
    assert "does not attend by pages, but sequence by sequence" in str(recorders[-1].why_not)
    monkeypatch.setattr(step_graph, "depends_on_length", lambda model: "dynamic")
    answers("llama-gqa")
    assert "its rotary embedding (dynamic) depends on the length" in str(recorders[-1].why_not)
    assert not any(graph.replays for graph in graphs)


def test_a_replay_that_gives_something_else_is_found_and_none_is_used(
    graphs: list[Recording], recorders: list[StepRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = truth("llama-gqa", monkeypatch)
    monkeypatch.setattr(Recording, "replay", lambda graph: setattr(graph, "replays", graph.replays + 1))
    with pytest.warns(UserWarning, match="without CUDA graphs, which is slower: logits .* differ"):
        assert answers("llama-gqa") == expected
    assert "differ by" in str(recorders[-1].why_not)
    assert [graph.replays for graph in graphs] == [1]


@pytest.mark.parametrize(
    ("error", "goes_on"), [(torch.OutOfMemoryError("CUDA out of memory"), True), (RuntimeError("capturing"), False)]
)
def test_a_failed_recording_costs_no_answer(
    error: Exception, goes_on: bool, graphs: list[Recording], recorders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short of memory, other prompts' steps may be recorded all the same."""
    expected = truth("llama-gqa", monkeypatch)
    told = contextlib.nullcontext() if goes_on else pytest.warns(UserWarning, match="cannot be recorded: capturing")
    with monkeypatch.context() as patch, told:
        patch.setattr(step_graph, "run_step", Mock(side_effect=error))
        assert answers("llama-gqa") == expected
    assert graphs and (recorders[-1].why_not is None) == goes_on


def test_other_documents_in_the_same_slots_read_their_own_pages(
    graphs: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the graphs, those used last are kept: here two, of three numbers of slots."""
    monkeypatch.setattr(step_graph, "MOST_GRAPHS", 2)
    loaded, made = ready("llama-gqa"), list[int]()
    pool, batch, held = pages_of(loaded, 64), batch_of(loaded, 8), list[Any]()  # what is held frees no pages
    for lengths in ((30, 9), (28,), (27, 11), (5, 6, 8), (12, 10), (13,)):
        prompts = [other_prompt(tokens) for tokens in lengths]
        for ids, prefill in zip(prompts, prefill_packed(loaded, prompts, reserve_tokens=8, pool=pool), strict=True):
            batch.add(len(ids), prefill, ids, 0)
        held.append(found := finish(batch))
        for one in found.values():
            one.prefill.release()  # its pages are others' by now
        for ids in prompts:
            assert list(found[len(ids)].answer.token_ids) == greedy(loaded.model, alone(loaded, ids, 8), 8)
        made.append(len(graphs))
    assert made == [1, 2, 2, 3, 3, 4]


def test_answered_documents_are_not_kept_by_recorded_steps(graphs: list[Recording]) -> None:
    loaded, caches = ready("llama-gqa"), list[Any]()
    pool, batch = pages_of(loaded, 64), batch_of(loaded, 12)
    for tokens in (300, 250):
        (prefill,) = prefill_packed(loaded, [other_prompt(tokens)], reserve_tokens=12, pool=pool)
        caches.append(weakref.ref(prefill.cache))
        batch.add(tokens, prefill, other_prompt(tokens), 0)
        del prefill
    found = {}
    for one in finish(batch).values():
        assert one.answer is not None
        found[one.key] = len(one.answer.token_ids)
        one.prefill.release()
    del one
    gc.collect()
    check_integrity(pool)
    assert found == {300: 12, 250: 12} and graphs and graphs[0].replays
    assert not any(cache() for cache in caches)


def test_a_document_that_is_not_finite_stops_no_recording(
    graphs: list[Recording], recorders: list[StepRecorder]
) -> None:
    """It fails alone, also in a step in which the recording is compared."""
    loaded = ready("llama-gqa")
    pool, batch = pages_of(loaded, 64), batch_of(loaded, 12)
    for tokens in (30, 25):
        (prefill,) = prefill_packed(loaded, [other_prompt(tokens)], reserve_tokens=12, pool=pool)
        batch.add(tokens, prefill, other_prompt(tokens), 0)
    while not graphs:
        assert not batch.step()
    with torch.inference_mode():
        batch.prefills[0].cache.layers[1][0].values[:, :30] = float("nan")
    found = finish(batch)
    assert "not finite" in str(found[30].error)
    assert found[25].answer is not None and len(found[25].answer.token_ids) == 12
    assert recorders[-1].why_not is None
