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
from kvr_mpi.setup.prepare import try_rows

PAGE_BYTES = PAGE_ROWS * 3 * 2 * 2 * 8 * 4  # three layers, keys and values of two heads, float32


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_pages_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loaded = tiny(name)
    prepare_model(loaded.model, chain=True)
    trial = Arena(loaded.shape.layers, loaded.dtype, loaded.device, extent_bytes=0)
    assert why_not_packed(loaded, trial) is None and trial.extents, "it is in these that they were tried"
    assert trial.spare_bytes == PAGE_BYTES
    write = PageTables.write
    monkeypatch.setattr(
        PageTables, "write", lambda tables, at, keys, values, lengths: write(tables, at, values, keys, lengths)
    )
    assert "differ from each alone" in str(why_not_packed(loaded, trial))
    assert why_not_packed(loaded) is None


@pytest.mark.parametrize(
    ("device", "is_spread", "fails", "found"),  # found: why not, whether in pages, and what was tried
    [
        ("cuda", False, "", (None, True, ["pages"])),
        ("cuda", False, "pages", (None, False, ["pages", "rows"])),
        ("cuda", False, "pages, rows", ("rows fail", False, ["pages", "rows"])),
        ("cuda", True, "pages", (None, False, ["rows"])),
        ("cpu", False, "pages", (None, False, ["rows"])),
    ],
)
def test_pages_are_for_packed_documents_on_gpus(
    device: str, is_spread: bool, fails: str, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that hold documents in a row show that they run so: that is not tried again."""
    tried, said = list[str](), list[str]()

    def fail(loaded: Any, arena: Arena | None = None) -> str | None:
        tried.append("rows" if arena is None else "pages")
        return f"{tried[-1]} fail" if tried[-1] in fails else None

    monkeypatch.setattr(prepare, "why_not_packed", fail)
    loaded, spec = replace(tiny("llama-gqa"), device=torch.device(device)), SimpleNamespace(is_spread=is_spread)
    assert (*try_rows(spec, loaded, said.append), tried) == found  # type: ignore[arg-type]
    assert ["pages fail" in line for line in said] == [True] * (fails == "pages" and tried[0] == "pages")
