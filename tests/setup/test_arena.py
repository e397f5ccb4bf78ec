"""Which documents are kept in pages, and how much memory that is taken to need."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest
import torch
from made_jobs import answers, spec_of
from models import tiny

from kvr_mpi.compress.decode_settings import DecodeSettings
from kvr_mpi.decode.graphs import KEPT_GRAPHS, MOST_ROWS, StepGraphs, held_bytes
from kvr_mpi.kv.paged import PAGE_TOKENS, PagedArena
from kvr_mpi.kv.paged_row import PagedRow
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.graph_capture import call_again
from kvr_mpi.prefill.memory_budget import footprint_of
from kvr_mpi.prefill.self_check import why_not_packed
from kvr_mpi.report.log import Log
from kvr_mpi.runtime.batch import run_job
from kvr_mpi.runtime.options import Environment, RunOptions
from kvr_mpi.setup import arena as arenas
from kvr_mpi.setup import prepare
from kvr_mpi.setup.arena import TRIAL_PAGES, graph_bytes, open_arena, open_graphs
from kvr_mpi.setup.job_ranks import JobRanks
from kvr_mpi.setup.job_setup import Machine
from kvr_mpi.store.lock import this_process
from kvr_mpi.transport.local import LocalTransport, run_local

SPEC: Any = type("Spec", (), {"is_spread": False, "compress": None, "decode": DecodeSettings()})
WITHOUT_GRAPHS: Any = type("Spec", (SPEC,), {"decode": DecodeSettings(cuda_graphs="off")})
PAGE_BYTES = PAGE_TOKENS * 3 * 2 * 2 * 8 * 4  # three layers, keys and values of two heads, float32


def opened(loaded: Any, said: list[str], spec: Any = SPEC, **options: Any) -> Any:
    return open_arena(spec, loaded, options.pop("free_bytes", 80 * PAGE_BYTES), said.append, is_packed=True, **options)


def on_gpu() -> Any:
    return replace(tiny("llama-gqa"), device=torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_pages_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loaded, said = tiny(name), list[str]()
    prepare_model(loaded.model, chain=True)
    trial = PagedArena(loaded.shape.layers, loaded.dtype, loaded.device, extent_pages=TRIAL_PAGES)
    assert why_not_packed(loaded, trial) is None and trial.extents, "it is in these that they were tried"
    write = PagedRow.write
    monkeypatch.setattr(PagedRow, "write", lambda row, at, keys, values: write(row, at, values, keys))
    assert "differ from each alone" in str(why_not_packed(loaded, trial))
    assert why_not_packed(loaded) is None
    monkeypatch.setattr(arenas, "why_not_packed", lambda loaded, arena: f"tried in {arena.extent_pages} pages")
    assert opened(on_gpu(), said) is None and "tried in 2 pages" in said[0]


def test_an_extent_is_a_share_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "why_not_packed", lambda loaded, arena: None)
    arena, without = opened(on_gpu(), []), opened(on_gpu(), [], WITHOUT_GRAPHS)
    assert arena.page_bytes == PAGE_BYTES and (arena.extent_pages, without.extent_pages) == (9, 10)
    assert arena.has_scrap and not without.has_scrap
    assert arena.spare_bytes == without.spare_bytes == 10 * PAGE_BYTES
    assert opened(on_gpu(), [], free_bytes=0).extent_pages == 1


def test_memory_is_left_for_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What prompts may take is less by that; where it would be too much of it, none is captured, and that is said."""
    loaded, said, plenty = on_gpu(), list[str](), 80 << 30
    footprint = footprint_of(loaded.model.config, loaded.dtype)
    needs = graph_bytes(SPEC, loaded, footprint, plenty, said.append)
    assert needs == held_bytes(footprint.activation_bytes(MOST_ROWS), loaded.shape.vocab_size) > KEPT_GRAPHS << 20
    assert graph_bytes(SPEC, loaded, footprint, 8 * needs, said.append) == needs and not said
    monkeypatch.setattr(prepare, "free_bytes", lambda device, sharers: plenty)
    monkeypatch.setattr(prepare, "ranks_on_device", lambda world, device: 1)
    spec: Any = type("Spec", (SPEC,), {"parallel": SimpleNamespace(memory_gib=None)})
    ranks = JobRanks(LocalTransport(), LocalTransport())
    (with_them,), captures = prepare._room(spec, loaded, ranks, None, footprint, said.append)
    (without,), captures_none = prepare._room(spec, loaded, ranks, None, None, said.append)
    assert without - with_them == needs and captures and not captures_none and not said
    assert graph_bytes(SPEC, loaded, footprint, 8 * needs - 8, said.append) == 0
    assert len(said) == 1 and "not as CUDA graphs: those may come to hold" in said[0]
    monkeypatch.setattr(arenas, "why_not_packed", lambda loaded, arena: None)
    assert not opened(loaded, said, captures=False).has_scrap


def test_no_memory_is_left_where_no_step_is_captured() -> None:
    loaded, said = on_gpu(), list[str]()
    footprint = footprint_of(loaded.model.config, loaded.dtype)
    others = [type("Spec", (SPEC,), {name: value}) for name, value in (("is_spread", True), ("compress", object()))]
    for spec in (WITHOUT_GRAPHS, *others):
        assert graph_bytes(spec, loaded, footprint, 80 << 30, said.append) == 0
    assert graph_bytes(SPEC, tiny("llama-gqa"), footprint, 80 << 30, said.append) == 0
    assert graph_bytes(SPEC, loaded, None, 80 << 30, said.append) == 0 and not said


def test_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    loaded = tiny("llama-gqa")
    assert opened(loaded, said) is None
    monkeypatch.setattr(arenas, "why_not_packed", lambda loaded, arena: None)
    assert opened(on_gpu(), said) is not None
    assert open_arena(SPEC, on_gpu(), 1 << 30, said.append, is_packed=False) is None
    for name, value in (("is_spread", True), ("compress", object())):
        spec = type("Spec", (SPEC,), {name: value})
        assert opened(on_gpu(), said, spec) is None
    assert not said


def test_steps_are_captured_if_that_is_wished_and_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, said = tiny("llama-gqa"), list[str]()
    arena, without = (
        PagedArena(loaded.shape.layers, loaded.dtype, loaded.device, extent_pages=2, has_scrap=has_scrap)
        for has_scrap in (True, False)
    )
    prepare_model(loaded.model, chain=True)
    assert open_graphs(loaded, None, said.append) is None and open_graphs(loaded, without, said.append) is None
    assert not said
    assert open_graphs(loaded, arena, said.append) is None, "no flash attention is here"
    assert "one by one, not as CUDA graphs: ModelError: layer 0 attends to documents one by one" in said[0]
    monkeypatch.setattr(arenas, "why_not_captured", lambda loaded, arena: None if arena.has_scrap else "no scrap page")
    assert open_graphs(loaded, arena, said.append) is not None and len(said) == 1


def test_a_job_from_pages_gives_the_same_answers_and_stores_the_same(
    job: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, with so little memory that waves follow each other."""
    monkeypatch.setattr(prepare, "free_bytes", lambda device, sharers: 1_200_000)
    made, said = list[PagedArena](), list[str]()

    def open_pages(spec: Any, loaded: LoadedModel, free_bytes: int, say: Any, **options: Any) -> PagedArena:
        shapes = loaded.shape.layers
        made.append(PagedArena(shapes, loaded.dtype, loaded.device, extent_pages=2, has_scrap=True))
        return made[-1]

    def open_steps(loaded: LoadedModel, arena: PagedArena | None, say: Any) -> StepGraphs:
        assert arena is not None and arena.has_scrap
        return StepGraphs(loaded, said.append, capture=call_again, patience=0)

    environment = Environment(Machine(cache_dir, cores=2, offline=True), this_process())

    def run(name: str) -> tuple[Any, dict[str, bytes]]:
        spec = spec_of(job, "output.kv=true", f"output.path={tmp_path / name}")
        work = partial(run_job, spec, RunOptions(), environment)
        codes = run_local(2, lambda rank: work(rank, Log(rank.rank, rank.size, io.StringIO())))
        assert codes == [0, 0]
        return answers(tmp_path / name), stored_arrays(tmp_path / name / "results.h5")

    own = run("own")
    monkeypatch.setattr(prepare, "open_arena", open_pages)
    monkeypatch.setattr(prepare, "open_graphs", open_steps)
    found = run("pages")
    assert found == own and len(own[0]) == 5
    assert len(own[1]) == 5 * 3 * 2, "keys and values of three layers"
    assert len(made) == 2
    assert len(said) == 2 and all("layer 0 attends to documents one by one" in line for line in said), "no GPU is here"
    for arena in made:
        arena.collect()
        assert not arena.extents, "what has been answered and stored holds no pages"


def stored_arrays(path: Path) -> dict[str, bytes]:
    """Keys and values of every document, by their names in the file."""
    found: dict[str, bytes] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name.rpartition("/")[2] in ("keys", "values"):
            found[name] = item[()].tobytes()

    with h5py.File(path) as file:
        file.visititems(note)
    return found
