"""Steps that are recorded and replayed; a stand-in records and replays what torch is told."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import rows
import torch
from chains import greedy, make_folder
from models import prompt, tiny
from rows import (
    Numbers,
    Recording,
    Watched,
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
from kvr_mpi.kv.table import PageTable
from kvr_mpi.model import load_model
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.fused import fuse_functions
from kvr_mpi.model.kernels import give_kernel
from kvr_mpi.model.tp_group import TensorParallelGroup
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.transport import gather_json, share_json
from kvr_mpi.transport.local import LocalTransport, run_local


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


def test_only_recorded_steps_use_fused_functions(graphs: list[Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    """They launch nothing of their own when they are replayed."""
    loaded = ready(replace(tiny("llama-gqa"), model=copy.deepcopy(tiny("llama-gqa").model)))
    fused, found, step = (
        fuse_functions(loaded.model, prompt(8), "eager"),
        list[tuple[int, bool]](),
        step_graph.run_inputs,
    )
    for module, kernel in fused.items():
        give_kernel(module, kernel)

    def run_step(*given: Any) -> torch.Tensor:
        found.append((len(graphs), all(kernel.function.is_recorded for kernel in fused.values())))
        return step(*given)

    monkeypatch.setattr(step_graph, "run_inputs", run_step)
    answer(loaded, pages_of(loaded, 64))
    assert found == [(count + 1, True) for count in range(len(graphs))]
    assert not any(kernel.function.is_recorded for kernel in fused.values())


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
        patch.setattr(step_graph, "run_inputs", Mock(side_effect=error))
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


# Sums of a tensor-parallel group in recorded steps: a graph of each rank, which waits for the others'


OWN = threading.local()  # of a rank: its transport, and whether it records


@torch.library.custom_op("kvr_tests::sum_over_ranks", mutates_args={"total"})
def sum_over_ranks(total: torch.Tensor) -> None:
    """NCCL's sum: recorded, it does not run, and so waits for nobody."""
    if not OWN.group._is_recording:
        OWN.ranks.all_reduce(total)


def on_group(folder: Path, work: Callable[[Any], Any]) -> list[Any]:
    """Do something on two ranks, which are threads, with the parts of a model; its sums can be recorded."""

    def rank(ranks: LocalTransport) -> Any:
        def tell(word: int) -> list[int]:
            return [int(each) for each in share_json(ranks, gather_json(ranks, word))]

        how: Any = (sum_over_ranks, tell, is_out_of_memory, lambda: False, OWN.__dict__.setdefault("graphs", []).append)
        OWN.ranks, OWN.group = ranks, TensorParallelGroup(ranks.rank, ranks.size, *how)
        loaded = load_model(str(folder), tp_group=OWN.group, device="cpu", cache_dir=folder)
        prepare_model(loaded.model, chain=True)
        with Watched():
            return work(replace(loaded, tokenizer=Numbers()))

    return run_local(2, rank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("group"), "llama")[0]


def whole_answers(folder: Path) -> dict[str, tuple[int, ...]]:
    loaded = load_model(str(folder), device="cpu", cache_dir=folder)
    prepare_model(loaded.model, chain=True)
    return answer(replace(loaded, tokenizer=Numbers()), pages_of(loaded, 64))


@pytest.mark.parametrize("sizes_differ", [False, True])
def test_the_steps_of_a_tensor_parallel_group_are_recorded_with_their_sums(
    sizes_differ: bool, folder: Path, graphs: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where compressed heads of one rank keep more pages than those of the other, which need not agree."""
    with monkeypatch.context() as patch:
        patch.setattr(step_graph, "STEPS_BEFORE", 1000)
        truth = whole_answers(folder)
    sizes = PageTable.sizes_for

    def own_sizes(sequences: Any) -> tuple[int, bool]:
        pages, is_complete = sizes(sequences)
        return (9 * pages, False) if sizes_differ and OWN.group.rank else (pages, is_complete)

    monkeypatch.setattr(PageTable, "sizes_for", own_sizes)
    assert on_group(folder, lambda loaded: answer(loaded, pages_of(loaded, 64))) == [truth] * 2
    assert len(graphs) < 12 and sum(graph.replays for graph in graphs) > 24, "most steps are not run anew"


@pytest.mark.parametrize(
    ("error", "goes_on"), [(torch.OutOfMemoryError("CUDA out of memory"), True), (RuntimeError("capturing"), False)]
)
def test_a_step_that_one_rank_of_a_group_cannot_record_is_recorded_by_none(
    error: Exception, goes_on: bool, folder: Path, graphs: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has recorded it. Short of memory, both try again."""
    with monkeypatch.context() as patch:
        patch.setattr(step_graph, "STEPS_BEFORE", 1000)
        truth = whole_answers(folder)
    failing, run_step = [1] if goes_on else [1] * 1000, step_graph.run_inputs

    def fail(*given: Any) -> torch.Tensor:
        if OWN.group.rank == 1 and failing:
            failing.pop()
            raise error
        return run_step(*given)

    monkeypatch.setattr(step_graph, "run_inputs", fail)
    told = contextlib.nullcontext() if goes_on else pytest.warns(UserWarning, match="cannot be recorded")
    with told:
        assert on_group(folder, lambda loaded: answer(loaded, pages_of(loaded, 64))) == [truth] * 2
    assert any(graph.replays for graph in graphs) == goes_on


def test_graphs_of_a_group_are_void_after_a_failure(folder: Path, graphs: list[Recording]) -> None:
    """Their sums were those of an aborted communicator: they are not replayed again, and others are recorded."""

    @torch.inference_mode()
    def work(loaded: Any) -> list[int]:
        recorder, pool = StepRecorder(loaded), pages_of(loaded, 4)
        (prefill,) = prefill_packed(loaded, [other_prompt(20)], reserve_tokens=11, pool=pool)
        row = rows.row.Row([prefill.cache])
        for at in range(2 * (step_graph.STEPS_BEFORE + 2)):
            if at == step_graph.STEPS_BEFORE + 2:
                with pytest.raises(MemoryError), OWN.group.guarded():
                    if OWN.group.rank:
                        raise MemoryError("no room")
            recorder.run(row, [at])
        return [graph.replays for graph in OWN.graphs]

    assert on_group(folder, work) == [[2, 2]] * 2
