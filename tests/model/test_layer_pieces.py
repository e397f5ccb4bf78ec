"""Layers in two pieces around their attention: the same as the layers' own code, whatever the model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from chains import greedy, single
from models import prompt, tiny

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.kernels import ATTENTION_SLOT
from kvr_mpi.model.layer_chunks import decoder_layers
from kvr_mpi.model.layer_pieces import (
    LayerPieces,
    Piece,
    forget_pieces,
    give_pieces,
    inputs_of,
    pieces_of,
    without_pieces,
)
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning.compiled_layers import why_other
from kvr_mpi.tuning.layer_kinds import kinds_of, layer_inputs

CHUNK = 16
BY_NAME = ["llama-gqa", "mistral-window", "qwen2-some-windows", "gpt2", "gemma2-softcap", "phi3", "opt"]


@pytest.fixture(autouse=True)
def own_code_again() -> Iterator[None]:
    """Models are made once for all tests: leave none with pieces."""
    yield
    for name in (*BY_NAME, "falcon-mqa"):
        forget_pieces(tiny(name).model)


@torch.inference_mode()
def in_pieces(loaded: LoadedModel, chunk_tokens: int = CHUNK) -> list[LayerPieces]:
    """Give all layers but the last their pieces, run by torch as they would be compiled: on weights they are given."""
    prepare_model(loaded.model, chain=True)
    few, full = layer_inputs(loaded, 2), layer_inputs(loaded, chunk_tokens)
    layers = decoder_layers(loaded.model)[:-1]
    bare = copy.deepcopy(layers)
    for layer in bare:  # a piece that read its own layer's weights would give nothing but these
        for weight in layer.parameters():
            weight.fill_(torch.nan)
    for idx, layer in enumerate(layers):
        lock = threading.Lock()
        before, after = (
            partial(run_eagerly, lock, Piece(bare[idx], full[idx], is_after=is_after)) for is_after in (False, True)
        )
        give_pieces(layer, LayerPieces(layer, few[idx], full[idx], before, after))
    return [found for layer in layers if (found := pieces_of(layer)) is not None]


def run_eagerly(lock: threading.Lock, piece: Piece, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    assert all(tensor.is_contiguous() for tensor in tensors)
    with lock:  # ranks are threads, and share the layer whose code is followed
        found: tuple[torch.Tensor, ...] = piece(*tensors)
    return found


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.filterwarnings("ignore")  # a configuration made up for tests makes transformers warn
def test_pieces_give_what_one_process_gives(name: str) -> None:
    loaded, ids = tiny(name), prompt(90)
    expected = single(loaded, ids)
    assert expected.logits is not None
    answer = greedy(loaded.model, expected, 8)
    pieces = in_pieces(loaded)
    for bounds in ((0, 90), (0, 53, 90)):
        partition = Partition(bounds)
        before = sum(each.runs for each in pieces)
        found = run_local(
            partition.size,
            lambda rank: prefill_kvr(loaded, ids, partition, rank, reserve_tokens=8, chunk_tokens=CHUNK),  # noqa: B023
        )[-1]
        assert found.logits is not None
        assert torch.allclose(found.logits, expected.logits, atol=1e-4), bounds
        assert sum(each.runs for each in pieces) - before == 5 * len(pieces) - (len(bounds) - 2) * len(pieces)
        assert greedy(loaded.model, found, 8) == answer
    assert why_other(loaded, CHUNK) == ""


def test_a_model_whose_attention_is_its_own_call_is_not_cut() -> None:
    loaded = tiny("falcon-mqa")
    with pytest.raises(ModelError, match="are not given what its attention is told"):
        in_pieces(loaded)
    assert not any(pieces_of(layer) for layer in decoder_layers(loaded.model))


def test_layers_are_told_apart_by_settings_and_by_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    layers, inputs = decoder_layers(loaded.model), layer_inputs(loaded, CHUNK)
    assert kinds_of(layers, inputs) == [[0, 1, 2]]
    monkeypatch.setattr(layers[1].input_layernorm, "variance_epsilon", 0.5)
    assert kinds_of(layers, inputs) == [[0, 2], [1]]
    assert inputs[0].signature == inputs[2].signature != layer_inputs(loaded, CHUNK + 1)[0].signature


def test_what_pieces_are_not_made_for_is_run_by_the_layer() -> None:
    """Another number of tokens, another type, another value of an argument: each is the layer's own again."""
    loaded = tiny("llama-gqa")
    pieces, layer = in_pieces(loaded)[0], decoder_layers(loaded.model)[0]
    full = layer_inputs(loaded, CHUNK)[0]
    args, kwargs = full.calling(full.cache, full.tensors)
    assert pieces.run(layer, full.hidden[:, 1:], args, kwargs) is None
    assert pieces.run(layer, full.hidden.double(), args, kwargs) is None
    assert pieces.run(layer, full.hidden, args, {**kwargs, "use_cache": 3}) is None
    assert pieces.runs == 0
    with pytest.raises(ModelError, match="are not given"):
        inputs_of(full.hidden, args, {**kwargs, "kv_chain": None})


def test_code_that_computes_something_else_is_noticed() -> None:
    loaded = tiny("llama-gqa")
    pieces = in_pieces(loaded)[1]
    right = pieces._after
    pieces._after = lambda tensors: [right(tensors)[0] * 1.01]
    assert "differ by" in why_other(loaded, CHUNK)
    pieces._after = lambda tensors: [right(tensors)[0] * torch.nan]
    assert "differ by nan" in why_other(loaded, CHUNK)

    def fails(tensors: list[torch.Tensor]) -> Any:
        raise RuntimeError("no such kernel")

    pieces._after = fails
    assert "code of one size fails (RuntimeError: no such kernel)" in why_other(loaded, CHUNK)
    pieces._after = right
    assert why_other(loaded, CHUNK) == ""
    pieces._signature = ["something else"]
    assert "given something else" in why_other(loaded, CHUNK)


def test_the_layers_own_code_is_there_without_pieces() -> None:
    loaded, ids = tiny("llama-gqa"), prompt(40)
    pieces = in_pieces(loaded)

    def run() -> torch.Tensor:
        found = prefill_kvr(loaded, ids, Partition((0, 40)), LocalTransport(), chunk_tokens=CHUNK).logits
        assert found is not None
        return found

    with without_pieces(loaded.model):
        plain = run()
        assert not any(each.runs for each in pieces)
    assert torch.allclose(run(), plain, atol=1e-4) and all(each.runs == 2 for each in pieces)
    assert not any(pieces_of(module) for module in copy.deepcopy(loaded.model).modules())
    forget_pieces(loaded.model)
    run()
    assert all(each.runs == 2 for each in pieces)


def test_what_attention_is_computed_with_is_no_part_of_a_piece() -> None:
    """It is asked for chunks in pieces as it is for the layers' own."""

    class Asked:
        times = 0

        def takes(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
            self.times += 1
            return False

    loaded, ids, times = tiny("llama-gqa"), prompt(40), []
    pieces = in_pieces(loaded)
    for forgets in (False, True):
        if forgets:
            forget_pieces(loaded.model)
        asked = Asked()
        vars(loaded.model)[ATTENTION_SLOT] = asked
        try:
            prefill_kvr(loaded, ids, Partition((0, 40)), LocalTransport(), chunk_tokens=CHUNK)
        finally:
            del vars(loaded.model)[ATTENTION_SLOT]
        times.append(asked.times)
    assert times[0] == times[1] > 0 and all(each.runs == 2 for each in pieces)
