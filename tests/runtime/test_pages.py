"""Which documents are kept in pages, and how much memory that is taken to need."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_logs import logger_to
from models import tiny

from kvr_mpi.kv.pool import PAGE_ROWS, Pool
from kvr_mpi.kv.table import PageTable
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.self_check import why_not_packed
from kvr_mpi.runtime import prepare
from kvr_mpi.runtime.prepare import try_rows

PAGE_BYTES = PAGE_ROWS * 3 * 2 * 2 * 8 * 4  # three layers, keys and values of two heads, float32


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_pages_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loaded = tiny(name)
    prepare_model(loaded.model, chain=True)
    trial = Pool(loaded.shape.layers, loaded.dtype, loaded.device, 2 * PAGE_ROWS)
    assert why_not_packed(loaded, trial) is None
    assert trial.nbytes == 2 * PAGE_BYTES and not trial.taken_bytes
    write = PageTable.write
    monkeypatch.setattr(PageTable, "write", lambda table, at, keys, values: write(table, at, values, keys))
    assert "differ from each alone" in str(why_not_packed(loaded, trial))
    assert why_not_packed(loaded) is None


@pytest.mark.parametrize(
    ("device", "is_sharded", "fails", "found"),  # found: why not, whether in pages, and what was tried
    [
        ("cuda", False, "", (None, True, ["pages"])),
        ("cuda", False, "pages", (None, False, ["pages", "rows"])),
        ("cuda", False, "pages, rows", ("rows fail", False, ["pages", "rows"])),
        ("cuda", True, "pages", (None, False, ["rows"])),
        ("cpu", False, "pages", (None, False, ["rows"])),
    ],
)
def test_pages_are_for_packed_documents_on_gpus(
    device: str, is_sharded: bool, fails: str, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that hold documents in a row show that they run so: that is not tried again."""
    tried, said = list[str](), list[str]()

    monkeypatch.setattr(prepare, "Pool", lambda *given: "pages")

    def fail(loaded: Any, pool: Pool | None = None) -> str | None:
        tried.append("rows" if pool is None else "pages")
        return f"{tried[-1]} fail" if tried[-1] in fails else None

    monkeypatch.setattr(prepare, "why_not_packed", fail)
    loaded, cache = replace(tiny("llama-gqa"), device=torch.device(device)), SimpleNamespace(is_rolling=False)
    spec = SimpleNamespace(is_sharded=is_sharded, cache=cache)
    assert (*try_rows(spec, loaded, logger_to(said)), tried) == found  # type: ignore[arg-type]
    assert ["pages fail" in line for line in said] == [True] * (fails == "pages" and tried[0] == "pages")
