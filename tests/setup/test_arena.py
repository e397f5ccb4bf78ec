"""Which documents are kept in pages, and how much memory that is taken to need."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny

from kvr_mpi.kv.arena import PAGE_ROWS, Arena
from kvr_mpi.kv.pages import PageTables
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.self_check import why_not_packed
from kvr_mpi.setup import prepare
from kvr_mpi.setup.prepare import open_arena

PAGE_BYTES = PAGE_ROWS * 3 * 2 * 2 * 8 * 4  # three layers, keys and values of two heads, float32


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_pages_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loaded = tiny(name)
    prepare_model(loaded.model, chain=True)
    trial = Arena(loaded.shape.layers, loaded.dtype, loaded.device, extent_bytes=0)
    assert why_not_packed(loaded, trial) is None and trial.extents, "it is in these that they were tried"
    write = PageTables.write
    monkeypatch.setattr(
        PageTables, "write", lambda tables, at, keys, values, lengths: write(tables, at, values, keys, lengths)
    )
    assert "differ from each alone" in str(why_not_packed(loaded, trial))
    assert why_not_packed(loaded) is None


def test_pages_are_for_packed_documents_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(prepare, "why_not_packed", lambda loaded, arena: None)

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
    monkeypatch.setattr(prepare, "why_not_packed", lambda loaded, arena: f"tried in {arena.spare_bytes} bytes")
    assert opened() is None and f"tried in {PAGE_BYTES} bytes" in said[0]
