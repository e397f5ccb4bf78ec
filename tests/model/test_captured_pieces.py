"""Chunks as captured pieces: a stand-in repeats what was captured, operation by operation, on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import greedy, single
from models import prompt, tiny
from recorded_graph import record

from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.captured_pieces import CapturedPiece
from kvr_mpi.model.graph_capture import call_again
from kvr_mpi.model.layer_chunks import decoder_layers
from kvr_mpi.model.layer_pieces import LayerPieces, forget_pieces, pieces_of
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.tuning.compiled_layers import compile_layers

CHUNK = 16
NAMES = ["llama-gqa", "mistral-window", "qwen2-some-windows", "gpt2", "gemma2-softcap", "phi3", "opt"]


@pytest.fixture(autouse=True)
def own_code_again() -> Iterator[None]:
    """Models are made once for all tests: leave none with pieces."""
    yield
    for name in (*NAMES, "falcon-mqa"):
        forget_pieces(tiny(name).model)


def captured(loaded: LoadedModel, capture: Any = record) -> tuple[bool, list[str]]:
    said: list[str] = []
    prepare_model(loaded.model, chain=True)
    return compile_layers(loaded, CHUNK, LocalTransport(), Path("unused"), said.append, capture=capture), said


def pieces_in(loaded: LoadedModel) -> list[LayerPieces]:
    return [found for layer in decoder_layers(loaded.model) if (found := pieces_of(layer)) is not None]


@pytest.mark.parametrize("capture", [record, call_again])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")  # a configuration made up for tests makes transformers warn
def test_captured_chunks_give_what_one_process_gives(name: str, capture: Any) -> None:
    """Of several documents, one after the other: nothing of one is left in the memory that pieces share."""
    loaded, truths = tiny(name), {}
    for tokens in (40, 90, 33):
        truth = single(loaded, prompt(tokens))
        truths[tokens] = truth.logits, greedy(loaded.model, truth, 8)
    done, said = captured(loaded, capture)
    assert done and said == ["chunks of 16 tokens are launched as CUDA graphs in 2 of 3 layers, on 1 of 1 rank(s)"]
    pieces = pieces_in(loaded)
    for tokens, (logits, answer) in truths.items():
        before, whole = sum(each.runs for each in pieces), Partition((0, tokens))
        found = prefill_kvr(loaded, prompt(tokens), whole, LocalTransport(), reserve_tokens=8, chunk_tokens=CHUNK)
        assert sum(each.runs for each in pieces) - before == tokens // CHUNK * len(pieces)
        assert found.logits is not None and logits is not None
        assert torch.allclose(found.logits, logits, atol=1e-4)
        assert greedy(loaded.model, found, 8) == answer


@torch.inference_mode()
def test_what_a_piece_was_captured_with_has_to_stay() -> None:
    loaded = tiny("llama-gqa")
    assert captured(loaded)[0]
    before = vars(pieces_in(loaded)[0])["_before"]
    assert isinstance(before, CapturedPiece)
    weights, given = list(before._weights), list(before._memory.given)
    assert len(before([*weights, *given])) == 3
    with pytest.raises(ValueError, match="replaced by others"):
        before([weights[0].clone(), *weights[1:], *given])
    with pytest.raises(ValueError, match="is given"):
        before([*weights, given[0][:, :1], *given[1:]])  # a copy would spread one token over all


def test_code_that_looks_at_the_host_is_noticed() -> None:
    """What was chosen on the host when it was captured is not chosen again: the trial of two chunks tells."""
    loaded = tiny("llama-gqa")
    mlp: Any = decoder_layers(loaded.model)[1].mlp
    calls = list[int]()
    own: Callable[[torch.Tensor], torch.Tensor] = type(mlp).forward.__get__(mlp)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return own(hidden) * (1.5 if float(hidden.abs().sum()) > 0 and len(calls) % 2 else 1.0)

    mlp.forward = forward
    try:
        done, said = captured(loaded)
    finally:
        del mlp.forward
    assert not done and not pieces_in(loaded) and "layers' own code on 1 of 1 rank(s)" in said[-1]


def test_a_capture_that_fails_leaves_the_layers_own_code() -> None:
    loaded, left = tiny("llama-gqa"), [3]

    def fails(compute: Callable[[], torch.Tensor]) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return record(compute)

    done, said = captured(loaded, fails)
    assert not done and not pieces_in(loaded)
    assert said == [
        "chunks are computed by the layers' own code on 1 of 1 rank(s): LlamaForCausalLM: operation not permitted when "
        "stream is capturing"
    ]


def test_a_model_that_is_not_cut_is_named() -> None:
    done, said = captured(tiny("falcon-mqa"))
    assert not done and "FalconForCausalLM calls its attention itself" in said[-1]
