"""Compile pieces of layers, as a program of its own: ``python -m kvr_mpi.tuning.compile_layers FOLDER NAME...``.

The folder holds a model's configuration and a `Request`. The model is built without weights; its code is followed as
the ranks' own is, and has to be given what theirs is. NAME is a layer's number and a piece's place: ``0-before``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LoadedModel, meta_model, on_meta, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.layer_chunks import decoder_layers
from kvr_mpi.model.layer_pieces import LayerInputs, Piece, weights_of
from kvr_mpi.tuning.compile_program import THREADS
from kvr_mpi.tuning.layer_kinds import layer_inputs, weights_kind

BEFORE, AFTER = "before", "after"
REQUEST = "request.json"


class Request(BaseModel):
    """What a rank's layers are: of each that is compiled, by its number, its weights and what it is given."""

    model_config = ConfigDict(extra="forbid")

    dtype: str
    tokens: int
    weights: dict[int, list[str]]
    given: dict[int, list[str]]


def request_of(dtype: torch.dtype, layers: dict[int, torch.nn.Module], inputs: dict[int, LayerInputs]) -> Request:
    """Say what some layers, by their numbers, are to be compiled for."""
    return Request(
        dtype=str(dtype).removeprefix("torch."),
        tokens=next(iter(inputs.values())).hidden.shape[1],
        weights={idx: weights_kind(layer) for idx, layer in layers.items()},
        given={idx: each.signature for idx, each in inputs.items()},
    )


def compile_piece(layer: torch.nn.Module, inputs: LayerInputs, file: Path, *, is_after: bool) -> None:
    """Compile a piece of a layer that is on ``meta`` into a file that torch loads without its compiler."""
    tensors = [inputs.hidden, *inputs.tensors]
    if is_after:
        with on_meta():
            query, _, values = Piece(layer, inputs, is_after=False)(*weights_of(layer).values(), *tensors)
        tensors.insert(1, query.new_empty(1, query.shape[2], query.shape[1], values.shape[3]))
    example = [torch.empty(each.shape, dtype=each.dtype) for each in (*weights_of(layer).values(), *tensors)]
    with torch.no_grad():
        exported = torch.export.export(Piece(layer, inputs, is_after=is_after), tuple(example), strict=False)
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(file), inductor_configs={"cpp.dynamic_threads": True}
        )


def main(folder: str, *names: str) -> None:
    """Compile each into ``FOLDER/NAME.pt2``.

    Raises
    ------
    ModelError
        If the model's code, without weights, is not what the ranks' is.
    """
    from torch._inductor import cpp_builder
    from transformers import AutoConfig

    cpp_builder.get_cpp_compiler()  # raises before anything is exported, if there is none
    torch.set_num_threads(THREADS)
    asked = Request.model_validate_json(Path(folder, REQUEST).read_bytes())
    dtype, config = getattr(torch, asked.dtype), AutoConfig.from_pretrained(folder, local_files_only=True)
    model: Any = meta_model(config, dtype)
    prepare_model(model, chain=True)
    loaded = LoadedModel(model, None, probe_shape(config, dtype), "", "", dtype, torch.device("meta"))
    with on_meta():
        inputs = dict(enumerate(layer_inputs(loaded, asked.tokens)))
    layers = dict(enumerate(decoder_layers(model)))
    found = request_of(dtype, {idx: layers[idx] for idx in asked.given}, {idx: inputs[idx] for idx in asked.given})
    if found != asked:
        raise ModelError(f"its layers are given {found}, and on a rank {asked}")
    for name in names:
        number, _, place = name.partition("-")
        compile_piece(layers[int(number)], inputs[int(number)], Path(folder, f"{name}.pt2"), is_after=place == AFTER)


if __name__ == "__main__":
    main(*sys.argv[1:])
