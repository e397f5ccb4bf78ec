"""Which documents are kept in pages, and how much memory that is taken to need."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs_together import kept_differences, keys_and_values, open_pages
from made_jobs import answers, spec_of
from models import tiny

from kvr_mpi.kv.arena import PAGE_ROWS, Arena
from kvr_mpi.kv.units import PageTable
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


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_pages_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loaded = tiny(name)
    prepare_model(loaded.model, chain=True)
    trial = Arena(loaded.shape.layers, loaded.dtype, loaded.device, extent_bytes=0)
    assert why_not_packed(loaded, trial) is None and trial.extents, "it is in these that they were tried"
    write = PageTable.write
    monkeypatch.setattr(PageTable, "write", lambda table, keys, values, lengths: write(table, values, keys, lengths))
    assert "differ from each alone" in str(why_not_packed(loaded, trial))
    assert why_not_packed(loaded) is None


def test_pages_are_for_packed_documents_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(arenas, "why_not_packed", lambda loaded, arena: None)

    def opened(device: str = "cuda", is_spread: bool = False, **options: Any) -> Any:
        given = {"free_bytes": 80 * PAGE_BYTES, "is_packed": True} | options
        loaded, spec = replace(tiny("llama-gqa"), device=torch.device(device)), SimpleNamespace(is_spread=is_spread)
        return open_arena(spec, loaded, say=said.append, **given)

    arena = opened()
    assert arena.page_bytes == PAGE_BYTES and arena.spare_bytes == 10 * PAGE_BYTES, "a share of the room"
    assert opened(free_bytes=0).spare_bytes == PAGE_BYTES
    for options in ({"device": "cpu"}, {"is_packed": False}, {"is_spread": True}):
        assert opened(**options) is None
    assert not said
    monkeypatch.setattr(arenas, "why_not_packed", lambda loaded, arena: f"tried in {arena.spare_bytes} bytes")
    assert opened() is None and f"tried in {PAGE_BYTES} bytes" in said[0]


def test_a_job_from_pages_gives_the_same_answers_and_stores_the_same(
    job: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, with so little memory that waves follow each other."""
    monkeypatch.setattr(prepare, "free_bytes", lambda device, sharers: 1_200_000)
    made: list[Arena] = []

    def open_and_keep(*given: Any, **options: Any) -> Any:
        made.append(open_pages(*given, **options))
        return made[-1]

    environment = Environment(Machine(cache_dir, cores=2, offline=True), this_process())

    def run(name: str) -> tuple[Any, dict[str, Any]]:
        spec = spec_of(job, "output.kv=true", f"output.path={tmp_path / name}")
        work = partial(run_job, spec, RunOptions(), environment)
        assert run_local(2, lambda rank: work(rank, Log(rank.rank, stream=io.StringIO()))) == [0, 0]
        return answers(tmp_path / name), keys_and_values(tmp_path / name / "results.h5")

    own = run("own")
    monkeypatch.setattr(prepare, "open_arena", open_and_keep)
    found = run("pages")
    assert found[0] == own[0] and len(own[0]) == len(own[1]) == 5
    assert not kept_differences(found[1], own[1], 0.0)
    assert len(made) == 2
    for arena in made:
        arena.collect()
        assert not arena.extents, "what has been answered and stored holds no pages"
