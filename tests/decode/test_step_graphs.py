"""Steps that are captured and replayed give the answers of steps that are run; a stand-in repeats what was captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import tiny
from paged_rows import LENGTHS, NEW_TOKENS, Watched, answer, arena_of, pages_read, ready
from recorded_graph import record
from rows import long_rope, one_thread, other_prompt

from kvr_mpi.decode import graphs as stepping
from kvr_mpi.decode import group as groups
from kvr_mpi.decode.graphs import StepGraphs, why_not_captured
from kvr_mpi.kv.decode_cache import DecodeCache
from kvr_mpi.kv.paged import PAGE_TOKENS, PagedArena
from kvr_mpi.kv.paged_row import PaddedCache, PaddedLayer
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.graph_capture import call_again
from kvr_mpi.prefill.packed import decode_packed, prefill_packed

__all__ = ["one_thread"]  # a fixture of every test here

Computation = Callable[[], torch.Tensor]


@pytest.fixture(autouse=True)
def reads_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(stepping, "ROWS", (1, 2, 4))
    with pages_read(monkeypatch) as watched:
        yield watched


@functools.cache
def truth_of(name: str, ends: bool = False) -> dict[str, tuple[int, ...]]:
    """Answers from memory of their own; one of them may end early."""
    return answer(ready(name), None, truth_of(name)["250"][4] if ends else None)


def graphs_of(loaded: LoadedModel, said: list[str], capture: Any = record, patience: int = 0) -> StepGraphs:
    return StepGraphs(loaded, said.append, capture=capture, patience=patience)


@pytest.mark.parametrize(
    ("name", "extent_pages", "capture"),
    [
        ("llama-gqa", 8, call_again),
        ("llama-gqa", 3, record),
        ("mistral-window", 8, record),
        pytest.param("llama-gqa", 8, record, marks=pytest.mark.long),
        pytest.param("llama-gqa", 3, call_again, marks=pytest.mark.long),
        pytest.param("qwen2-some-windows", 8, record, marks=pytest.mark.long),
    ],
)
def test_captured_steps_change_no_answer(name: str, extent_pages: int, capture: Any) -> None:
    """Documents join and leave; with three pages to an extent there are several of them."""
    loaded, said = ready(name), list[str]()
    end, truth = truth_of(name)["250"][4], truth_of(name, ends=True)
    arena = arena_of(loaded, extent_pages, has_scrap=True)
    graphs = graphs_of(loaded, said, capture)
    assert answer(loaded, arena, end, graphs) == truth and len(truth) == len(LENGTHS)
    assert not said and graphs.captured >= 3 and graphs.replayed >= 5
    arena.collect()
    assert not arena.extents, "what has been captured holds no memory of documents"


def test_sinks_are_part_of_a_captured_step() -> None:
    loaded, said = ready("gpt-oss-sinks"), list[str]()
    graphs = graphs_of(loaded, said, call_again)
    assert answer(loaded, arena_of(loaded, 8, has_scrap=True), None, graphs) == truth_of("gpt-oss-sinks")
    assert graphs.replayed and not said


def test_steps_are_captured_when_their_size_has_come_often() -> None:
    loaded, said = ready("llama-gqa"), list[str]()
    graphs = graphs_of(loaded, said, patience=3)
    caches, _ = documents(loaded, arena_of(loaded, 8, has_scrap=True), 5)
    found = []
    for _ in range(5):
        step(graphs, loaded, caches)
        found.append((graphs.captured, graphs.replayed))
    assert found == [(0, 0), (0, 0), (0, 0), (1, 0), (1, 1)]


def documents(loaded: LoadedModel, arena: PagedArena, reserve: int) -> tuple[list[Any], list[list[int]]]:
    prompts = [other_prompt(tokens) for tokens in (5, 250, 30)]
    return [each.cache for each in prefill_packed(loaded, prompts, reserve_tokens=reserve, arena=arena)], prompts


@torch.inference_mode()
def step(graphs: StepGraphs, loaded: LoadedModel, caches: list[Any]) -> torch.Tensor:
    tokens = [7 + at for at in range(len(caches))]
    return graphs.step(caches, tokens, lambda: decode_packed(loaded, DecodeCache(caches), tokens))


@torch.inference_mode()
def test_a_row_writes_a_token_of_each_document_and_the_scrap_page() -> None:
    """Four rows for three documents: of all other memory not a byte changes."""
    loaded = ready("llama-gqa")
    arena = arena_of(loaded, 8, has_scrap=True)
    caches, _ = documents(loaded, arena, 3)
    graphs = graphs_of(loaded, [])
    step(graphs, loaded, caches)
    (extent,) = arena.extents
    assert extent.scrap == 8 and extent.layers[0].shape[0] == 9 * PAGE_TOKENS
    for layer in extent.layers:
        layer[extent.scrap * PAGE_TOKENS :].fill_(float("nan"))
    before = [layer.clone() for layer in extent.layers]
    step(graphs, loaded, caches)
    assert graphs.replayed == 1
    places = {cache.run.first * PAGE_TOKENS + cache.length - 1 for cache in caches}
    for old, new in zip(before, extent.layers, strict=True):
        changed = {int(row) for row in (old.view(torch.int32) != new.view(torch.int32)).any(1).nonzero()}
        assert changed == places | {extent.scrap * PAGE_TOKENS}
        assert not new[: extent.scrap * PAGE_TOKENS].isnan().any()


def test_no_document_is_given_the_scrap_page() -> None:
    arena = arena_of(ready("llama-gqa"), 3, has_scrap=True)
    runs = [arena.take(1) for _ in range(4)]
    assert [run.first for run in runs] == [0, 1, 2, 0] and len(arena.extents) == 2
    assert arena.take(3 * PAGE_TOKENS).extent.scrap is None, "a document with an extent of its own"
    assert arena.spare_bytes == 4 * arena.page_bytes


def test_a_number_of_the_host_in_a_captured_step_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: lengths that are not read from the row's tensors stay those of the capture."""
    loaded = ready("llama-gqa")
    truth, begin = truth_of("llama-gqa"), PaddedCache.begin

    def begin_by_hand(cache: PaddedCache) -> None:
        begin(cache)
        cache.row.begin(torch.tensor(lengths_of[id(cache)]))

    lengths_of: dict[int, list[int]] = {}
    fill = PaddedCache.fill

    def fill_by_hand(cache: PaddedCache, *args: Any) -> None:
        fill(cache, *args)
        lengths_of[id(cache)] = cache.lengths[0].tolist()

    monkeypatch.setattr(PaddedCache, "begin", begin_by_hand)
    monkeypatch.setattr(PaddedCache, "fill", fill_by_hand)
    arena = arena_of(loaded, 8, has_scrap=True)
    assert answer(loaded, arena, None, graphs_of(loaded, [], call_again)) == truth
    assert answer(loaded, arena, None, graphs_of(loaded, [])) != truth


def refuses(compute: Computation) -> Any:
    compute()
    raise RuntimeError("operation not permitted when stream is capturing\nand so on")


def differs(compute: Computation) -> Any:
    replay, result = call_again(compute)
    return lambda: (replay(), result.neg_()), result


def reads_back(compute: Computation) -> Any:
    return record(lambda: compute() * (1 if bool((compute() == 0).nonzero().numel()) else 1))


@pytest.mark.parametrize(
    ("capture", "said"),
    [
        (refuses, "RuntimeError: operation not permitted when stream is capturing"),
        (differs, "a replayed step's logits differ from those of the step itself by"),
        (reads_back, "RuntimeError: operation not permitted when stream is capturing: aten.nonzero"),
    ],
)
def test_a_step_that_cannot_be_captured_is_run_as_it_is(capture: Any, said: str) -> None:
    loaded, lines = ready("llama-gqa"), list[str]()
    graphs = graphs_of(loaded, lines, capture)
    assert answer(loaded, arena_of(loaded, 8, has_scrap=True), None, graphs) == truth_of("llama-gqa")
    assert len(lines) == 1 and "kernels one by one, not as CUDA graphs" in lines[0] and said in lines[0]
    assert graphs.captured == graphs.replayed == 0


def test_what_a_wrong_capture_wrote_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, lines = ready("llama-gqa"), list[str]()
    update = PaddedLayer.update
    monkeypatch.setattr(PaddedLayer, "update", lambda layer, keys, values, *args: update(layer, values, keys, *args))
    graphs = graphs_of(loaded, lines)
    assert answer(loaded, arena_of(loaded, 8, has_scrap=True), None, graphs) == truth_of("llama-gqa")
    assert "logits differ" in lines[0]


def test_graphs_go_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, lines = ready("llama-gqa"), list[str]()
    truth, run = truth_of("llama-gqa"), groups.decode_packed
    fails = iter([False, True, *[False] * 100])

    def short(*args: Any) -> torch.Tensor:
        if next(fails):
            raise MemoryError("no more")
        return run(*args)

    monkeypatch.setattr(groups, "decode_packed", short)
    graphs = graphs_of(loaded, lines)
    assert answer(loaded, arena_of(loaded, 8, has_scrap=True), None, graphs) == truth
    assert len(lines) == 1 and "memory is short" in lines[0] and not graphs._steps


def test_steps_of_an_extent_that_is_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ready("llama-gqa")
    monkeypatch.setattr(stepping, "KEPT_GRAPHS", 2)
    graphs = graphs_of(loaded, [], call_again)
    arena = arena_of(loaded, 8, has_scrap=True)
    caches, _ = documents(loaded, arena, 9)
    for some in (caches, caches[:2], caches[:1], caches[1:], caches[2:]):
        step(graphs, loaded, some)
    assert (len(graphs._steps), graphs.captured, graphs.replayed) == (2, 3, 2)
    del caches, some
    arena.collect()
    caches, _ = documents(loaded, arena, 9)
    step(graphs, loaded, caches)
    assert len(graphs._steps) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama-gqa", None),
        ("gpt-oss-sinks", None),
        ("gemma2-softcap", "layer 0 attends to documents one by one"),
        ("llama4-chunks", "attends to documents one by one"),
        ("phi3", None),
        ("long-rope", "its rotary embedding (longrope) is chosen on the host"),
    ],
)
def test_what_can_be_captured_is_tried_before_a_job(name: str, why: str | None) -> None:
    loaded = long_rope() if name == "long-rope" else ready(name)
    found = why_not_captured(loaded, arena_of(loaded, 2, has_scrap=True), call_again)
    assert found is None if why is None else why in str(found)


def test_a_trial_finds_what_only_a_replay_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replay is of the tokens that were captured; the second is not."""
    loaded = ready("llama-gqa")
    arena = arena_of(loaded, 2, has_scrap=True)

    def stale(compute: Computation) -> Any:
        result = compute()
        return (lambda: None), result

    assert why_not_captured(loaded, arena, record) is None
    assert "logits differ" in str(why_not_captured(loaded, arena, stale))
    assert "TypeError" in str(why_not_captured(loaded, arena, lambda compute: compute() + "not a tensor"))


def test_a_full_document_is_refused_as_ever() -> None:
    loaded = ready("llama-gqa")
    caches, _ = documents(loaded, arena_of(loaded, 8, has_scrap=True), 2)
    graphs = graphs_of(loaded, [])
    step(graphs, loaded, caches)
    step(graphs, loaded, caches)
    with pytest.raises(ValueError, match="is full"):
        step(graphs, loaded, caches)
    assert tiny("llama-gqa").shape == loaded.shape and NEW_TOKENS > 2


def test_graphs_hold_no_more_than_is_left_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors: the logits of so many rows; and no step of more rows than were counted with is captured."""
    for name, value in (("KEPT_ROWS", 6), ("MOST_ROWS", 4), ("GRAPH_BYTES", 0)):
        monkeypatch.setattr(stepping, name, value)
    loaded = ready("llama-gqa")
    graphs, vocab = graphs_of(loaded, [], call_again), loaded.shape.vocab_size
    caches, _ = documents(loaded, arena_of(loaded, 8, has_scrap=True), 9)
    rows = []
    for some in (caches, caches[:2], caches[:1], caches):
        step(graphs, loaded, some)
        rows.append(graphs.rows)
        held = sum(each.logits.nbytes for each in graphs._steps.values())
        assert held == 4 * graphs.rows * vocab <= stepping.held_bytes(0, vocab) - 8 * 4 * vocab
    assert rows == [4, 6, 3, 5] and graphs.captured == 4, "those not used for longest have gone"
    monkeypatch.setattr(stepping, "MOST_ROWS", 3)
    step(graphs, loaded, caches)
    assert (graphs.captured, graphs.replayed) == (4, 0)
