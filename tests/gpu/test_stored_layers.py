"""Keys and values stored while a GPU computes: copied to the host without waiting."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import HEADER, record
from pretended_cuda import Event, GpuTensor, OnDevices, PretendedCuda

from kvr_mpi.store.folder import survey
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.writer import ResultWriter

GPU = torch.device("cuda", 3)


def test_layers_are_copied_in_the_order_of_the_stream_and_waited_for_where_they_are_written(
    gpus: PretendedCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that computes goes on at once; the one that writes says which GPU it waits for."""
    copies, waits = list[bool](), list[tuple[str, int]]()
    launch, synchronize = gpus.launch, Event.synchronize

    def noted(func: Any, device: torch.device, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], GpuTensor):
            copies.append(len(args) > 2 and args[2])
        return launch(func, device, args, kwargs)

    def waited(event: Event) -> None:
        waits.append((threading.current_thread().name, torch.cuda.current_device()))
        synchronize(event)

    monkeypatch.setattr(gpus, "launch", noted)
    monkeypatch.setattr(Event, "synchronize", waited)
    torch.cuda.set_device(GPU)
    writer = ResultWriter(tmp_path, 0, HEADER)
    rows = [gpus.put(torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(at)), GPU) for at in range(4)]
    with OnDevices(gpus), writer.writing_piece(record("a"), CachedTokens((7, 8, 9, 5), (1, 3))) as document:
        for layer in (tuple(rows[:2]), None, tuple(rows[2:])):
            document.add_layer(layer)
    writer.close()
    assert copies == [True] * 4 and waits == [("kvr-results-0", 3)] * 2 and not gpus.faults
    assert len(survey(tmp_path).volumes) == 1
