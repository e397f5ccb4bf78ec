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

from kvr_mpi.kv.arena import PAGE_ROWS, Arena
from kvr_mpi.kv.units import PageTable
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.self_check import why_not_packed
from kvr_mpi.report.log import Log
from kvr_mpi.runtime.batch import run_job
from kvr_mpi.runtime.options import Environment, RunOptions
from kvr_mpi.setup import arena as arenas
from kvr_mpi.setup import prepare
from kvr_mpi.setup.arena import open_arena
from kvr_mpi.setup.job_setup import Machine
from kvr_mpi.store.lock import this_process
from kvr_mpi.transport.local import run_local

PAGE_BYTES = PAGE_ROWS * 3 * 2 * 2 * 8 * 4  # three layers, keys and values of two heads, float32


def opened(said: list[str], device: str = "cuda", is_spread: bool = False, **options: Any) -> Any:
    given = {"free_bytes": 80 * PAGE_BYTES, "is_packed": True} | options
    spec: Any = SimpleNamespace(is_spread=is_spread)
    return open_arena(spec, replace(tiny("llama-gqa"), device=torch.device(device)), say=said.append, **given)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_pages_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loaded, said = tiny(name), list[str]()
    prepare_model(loaded.model, chain=True)
    trial = Arena(loaded.shape.layers, loaded.dtype, loaded.device, extent_bytes=0)
    assert why_not_packed(loaded, trial) is None and trial.extents, "it is in these that they were tried"
    write = PageTable.write
    monkeypatch.setattr(PageTable, "write", lambda table, keys, values, lengths: write(table, values, keys, lengths))
    assert "differ from each alone" in str(why_not_packed(loaded, trial))
    assert why_not_packed(loaded) is None
    monkeypatch.setattr(arenas, "why_not_packed", lambda loaded, arena: f"tried in {arena.spare_bytes} bytes")
    assert opened(said) is None and f"tried in {PAGE_BYTES} bytes" in said[0]


def test_pages_are_for_packed_documents_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(arenas, "why_not_packed", lambda loaded, arena: None)
    arena = opened(said)
    assert arena.page_bytes == PAGE_BYTES and arena.spare_bytes == 10 * PAGE_BYTES, "a share of the room"
    assert opened(said, free_bytes=0).spare_bytes == PAGE_BYTES
    for options in ({"device": "cpu"}, {"is_packed": False}, {"is_spread": True}):
        assert opened(said, **options) is None
    assert not said


def stored_arrays(path: Path) -> dict[str, bytes]:
    """Keys and values of every document, by their names in the file."""
    found: dict[str, bytes] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name.rpartition("/")[2] in ("keys", "values"):
            found[name] = item[()].tobytes()

    with h5py.File(path) as file:
        file.visititems(note)
    return found


def test_a_job_from_pages_gives_the_same_answers_and_stores_the_same(
    job: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, with so little memory that waves follow each other."""
    monkeypatch.setattr(prepare, "free_bytes", lambda device, sharers: 1_200_000)
    made: list[Arena] = []

    def open_pages(spec: Any, loaded: LoadedModel, free_bytes: int, say: Any, **options: Any) -> Arena:
        shapes = loaded.shape.layers
        made.append(Arena(shapes, loaded.dtype, loaded.device, extent_bytes=0))
        return made[-1]

    environment = Environment(Machine(cache_dir, cores=2, offline=True), this_process())

    def run(name: str) -> tuple[Any, dict[str, bytes]]:
        spec = spec_of(job, "output.kv=true", f"output.path={tmp_path / name}")
        work = partial(run_job, spec, RunOptions(), environment)
        codes = run_local(2, lambda rank: work(rank, Log(rank.rank, stream=io.StringIO())))
        assert codes == [0, 0]
        return answers(tmp_path / name), stored_arrays(tmp_path / name / "results.h5")

    own = run("own")
    monkeypatch.setattr(prepare, "open_arena", open_pages)
    found = run("pages")
    assert found == own and len(own[0]) == 5
    assert len(own[1]) == 5 * 3 * 2, "keys and values of three layers"
    assert len(made) == 2
    for arena in made:
        arena.collect()
        assert not arena.extents, "what has been answered and stored holds no pages"
