"""Keys and values that come from a file while the model computes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from models import prompt, tiny

from kvr_mpi.kv.contents import layer_kv
from kvr_mpi.kv.loading import LAYERS_AHEAD, LAYERS_KEPT, LoadedLayers
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import allowed_error, error_share
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.store.kv import open_kv, write_kv
from kvr_mpi.store.stored_kv import CachedTokens
from kvr_mpi.transport.local import LocalTransport, run_local


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-gqa", torch.bfloat16),
        ("gemma2-softcap", torch.bfloat16),
        ("gemma2-softcap", torch.float16),
        ("mistral-window", torch.float32),
    ],
)
def test_logits_after_a_loaded_prefix_are_those_of_a_fresh_prefill(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """As near as rounding allows: greedy tokens of a random model in 16 bits are decided by the order of adding up."""
    loaded, ids = tiny(name, dtype), prompt(120)
    prepare_model(loaded.model, chain=True)
    truth = prefill_kvr(loaded, ids, Partition((0, 120)), LocalTransport())
    two = run_local(2, lambda rank: prefill_kvr(loaded, ids, Partition((0, 70, 120)), rank, keeps_all=True).cache)[1]
    with h5py.File(tmp_path / "kv.h5", "w") as file:
        layers = [layer_kv(two, layer) for layer in range(3)]
        told = write_kv(file, "a", layers, CachedTokens(ids, (0, 100)))
        stored = {layer.number: layer for layer in open_kv(file["a"], *told).layers}

        def load(number: int) -> torch.Tensor:
            keys, values = stored[number].read(0, 100)
            return torch.cat([keys.flatten(1), values.flatten(1)], 1)

        prefix = SharedPrefix(tuple(ids[:100]), LoadedLayers(3, load))
        several = prefill_packed(loaded, [ids, ids[:110], ids], prefix=prefix)
    assert several[0].known_tokens == 100 and truth.logits is not None
    for found in (several[0], several[2]):
        assert found.logits is not None and error_share(found.logits, truth.logits) <= allowed_error(dtype)


def test_layers_are_read_ahead_once_and_forgotten() -> None:
    """What reading raises comes out where the layer is asked for, and whoever asks again may have more luck."""
    read, damage = list[int](), ["damaged"]

    def load(number: int) -> torch.Tensor | None:
        assert threading.current_thread().name.startswith("kvr-loading")
        read.append(number)
        if number == 20 and damage:
            raise OSError(damage.pop())
        return None if number == 5 else torch.full((2, 3), float(number))

    layers = LoadedLayers(40, load)
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
    layers = LoadedLayers(3, lambda number: None if number == 1 else torch.full((2, 3), 1.0 + number), device)
    prefix, shape = SharedPrefix((5, 6), layers), LayerShape(1, 1, 2)
    stores = [prefix.store(number, shape, torch.device("cpu"), None) for number in range(3)]
    assert stores[1] is None and stores[2] is not None
    assert all(rows.eq(3.0).all() for rows in stores[2].rows(0, 2))
    is_gpu = device is not None and device.type == "cuda"
    assert told == ([("kvr-loading_0", device), *[("locked", (2, 3))] * 2] if is_gpu else [])
