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
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.prefill.one_prompt import own_pool


class Stored:
    """A sequence whose layers are read from here, all of whose elements are the layer's number."""

    def __init__(self, device: Any = None) -> None:
        self.loaded, self.read, self.damage = tiny("llama-gqa"), list[int](), [OSError("damaged")]
        self.elements, self.is_ahead = self.loaded.shape.layers[0].elements, threading.Event()
        pool = own_pool(self.loaded)
        pool.device = pool.device if device is None else device
        self.sequence = SequenceKV(self.loaded, pool, 2, length=2, stop=2, source="a file", read=self.load)

    def load(self, number: int) -> torch.Tensor:
        assert threading.current_thread().name.startswith("kvr-loading")
        self.read.append(number)
        if number == 1:
            self.is_ahead.set()
        if number == 2 and self.damage:
            raise self.damage.pop()
        return torch.full((2, self.elements), float(number))


def test_layers_are_read_ahead_once_and_forgotten() -> None:
    """What reading raises comes out where the layer is asked for, and whoever asks again may have more luck."""
    stored = Stored()
    stored.sequence.open(0)
    assert stored.is_ahead.wait(30), "the next ones are read before they are asked for"
    for number in range(2):
        for _ in range(3):  # prompts of one row
            assert all(rows.eq(number).all() for rows in stored.sequence.rows(number, 0, 2))
    with pytest.raises(OSError, match="damaged"):
        stored.sequence.open(2)
    assert all(rows.eq(2).all() for rows in stored.sequence.rows(2, 0, 2))
    assert stored.read == [0, 1, 2, 2], "in order, and what has failed again"
    for number in range(3):
        stored.sequence.close(number)
    assert not stored.sequence.pool.blocks
    assert all(rows.eq(1).all() for rows in stored.sequence.rows(1, 0, 2)), "read again"
    stored.sequence.release()
    assert not stored.sequence.pool.blocks


def test_layers_for_a_gpu_are_read_into_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread that says which GPU is its own; no GPU is here."""
    told = list[tuple[str, Any]]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: told.append((threading.current_thread().name, gpu)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: told.append(("locked", rows.shape)) or rows)
    stored = Stored(gpu := torch.device("cuda", 3))
    assert stored.sequence._read_layer(0) is not None and stored.sequence._read_layer(1) is not None
    stored.sequence.release()
    assert told[:3] == [("kvr-loading_0", gpu), *[("locked", (2, stored.elements))] * 2]


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
