"""Keys and values that come from a file while the model computes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny

from kvr_mpi.events import Span
from kvr_mpi.kv.clock import Clock
from kvr_mpi.kv.loading import LAYERS_AHEAD, LAYERS_KEPT, LoadedLayers
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.prefill.one_prompt import own_pool


def test_layers_are_read_ahead_once_and_forgotten() -> None:
    """What reading raises comes out where the layer is asked for, and whoever asks again may have more luck."""
    read, damage, is_ahead = list[int](), ["damaged"], threading.Event()

    def load(number: int) -> torch.Tensor | None:
        assert threading.current_thread().name.startswith("kvr-loading")
        read.append(number)
        if number == LAYERS_AHEAD:
            is_ahead.set()
        if number == 20 and damage:
            raise OSError(damage.pop())
        return None if number == 5 else torch.full((2, 3), float(number))

    layers = LoadedLayers(40, load)
    assert layers[0] is not None and is_ahead.wait(30), "the next ones are read before they are asked for"
    for number in range(40):
        if number == 20:
            with pytest.raises(OSError, match="damaged"):
                layers[number]
        for _ in range(3):  # prompts of one row
            rows = layers[number]
            assert rows is None if number == 5 else rows is not None and float(rows[0, 0]) == number
    assert read.count(20) == 2 and read.count(39) == 1, "what has failed again, the others once"
    assert list(dict.fromkeys(read)) == list(range(40)), "in order"
    assert layers[0] is not None and len(layers._layers) <= LAYERS_AHEAD + LAYERS_KEPT + 1
    assert read[41] == 0, "another prompt begins anew"


@pytest.mark.parametrize("device", [torch.device("cuda", 3), torch.device("cpu"), None])
def test_layers_for_a_gpu_are_read_into_page_locked_memory(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    """By a thread that says which GPU is its own; no GPU is here."""
    told = list[tuple[str, Any]]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: told.append((threading.current_thread().name, gpu)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: told.append(("locked", rows.shape)) or rows)
    loaded = tiny("llama-gqa")
    layers = LoadedLayers(3, lambda number: torch.full((2, loaded.shape.layers[0].elements), 1.0 + number), device)
    prefix = SequenceKV(loaded, own_pool(loaded), 2, length=2, stop=2, read=layers.__getitem__)
    for number in range(3):
        prefix.open(number)
    assert all(rows.eq(3.0).all() for rows in prefix.rows(2, 0, 2))
    is_gpu = device is not None and device.type == "cuda"
    assert told == ([("kvr-loading_0", device), *[("locked", (2, 32))] * 3] if is_gpu else [])


def test_waits_are_told_apart_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    at, layer = 0.0, -1
    monkeypatch.setattr("kvr_mpi.kv.clock.time", SimpleNamespace(perf_counter=lambda: at))
    clock, busy = Clock(None), Clock(None)
    for layer_s, receive_s, send_s in ((2.0, 1.0, 0.0), (3.0, 0.5, 4.0), (2.0, 0.25, 0.0)):
        clock.mark("layer", layer := layer + 1)
        clock.mark("wait", layer, 1)
        at += receive_s
        clock.mark("continue")
        at += layer_s
        clock.mark("send wait", layer)
        at += send_s
        clock.mark("continue")
        for each in range(2):
            busy.mark("layer", 2 * layer + each)
    spans, *times = clock.read(-1.0, 13.0)
    assert times == [[0.0, 2.0, 5.0], 1.75, 4.0]
    assert [span for span in spans if span.kind == "layer"] == [
        *(Span("layer", -1.0, 3.0, layer=0), Span("layer", 3.0, 10.5, layer=1), Span("layer", 10.5, 13.0, layer=2))
    ]
    assert [span for span in spans if span.kind == "wait"] == [
        Span("wait", began_s, ended_s, layer=layer, peer=1)
        for layer, (began_s, ended_s) in enumerate(((0.0, 1.0), (3.0, 3.5), (10.5, 10.75)))
    ]
    assert sum(span.ended_s - span.began_s for span in spans if span.kind == "send wait") == 4.0
    assert busy.read()[1:] == ([0.0, 0.0, 7.5, 7.5, 9.75, 9.75], 0.0, 0.0)
    assert Clock(None).read() == ([], [], 0.0, 0.0)
