"""What a model gives its layers, and which of these are alike, so that one compiled code serves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.model.layer_chunks import decoder_layers
from kvr_mpi.model.layer_pieces import CONSTANTS, LayerInputs, inputs_of, weights_of
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.relay import Relay

# What layers are told apart by in their messages only, and what says nothing of what they compute.
NAMES = {"layer_idx", "training"}


class _AllSeenError(Exception):
    """Raised out of the last layer, when it is known what all are given."""


@torch.inference_mode()
def layer_inputs(loaded: LoadedModel, tokens: int) -> list[LayerInputs]:
    """See what a model gives each of its layers for the first tokens of a prompt; no layer computes anything.

    Raises
    ------
    ModelError
        If the layers are not found, or not given their cache.
    """
    cache, layers = SliceCache(loaded, Relay(Partition((0, tokens)), 0), None), decoder_layers(loaded.model)
    seen: list[LayerInputs] = []

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(inputs_of(hidden_states, args, kwargs))
        if len(seen) == len(layers):
            raise _AllSeenError
        return hidden_states

    ids = torch.tensor([loaded.shape.sample_ids(tokens)], device=loaded.device)
    with _computing(layers, forward):
        try:
            run_model(loaded.model, ids, cache)
        except _AllSeenError:
            pass
    return seen


@contextmanager
def _computing(layers: Sequence[torch.nn.Module], forward: Any) -> Iterator[None]:
    """Have all layers compute something else."""
    held = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer, own in zip(layers, held, strict=True):
            vars(layer).pop("forward")
            if own is not None:
                layer.forward = own


def kinds_of(layers: Sequence[torch.nn.Module], inputs: Sequence[LayerInputs]) -> list[list[int]]:
    """Group layers that are alike: of the same classes and settings, weights of the same shapes, and given the like."""
    found: dict[str, list[int]] = {}
    for idx, (layer, given) in enumerate(zip(layers, inputs, strict=True)):
        found.setdefault(repr([_modules_of(layer), weights_kind(layer), given.signature]), []).append(idx)
    return list(found.values())


def weights_kind(layer: torch.nn.Module) -> list[str]:
    """Say which tensors a layer holds, of which types and shapes."""
    return [f"{name}: {one.dtype} {list(one.shape)}" for name, one in weights_of(layer).items()]


def _modules_of(layer: torch.nn.Module) -> list[Any]:
    """List a layer's modules, each with its class and the settings that it keeps as numbers and names."""
    return [(name, type(module).__qualname__, _settings_of(module)) for name, module in layer.named_modules()]


def _settings_of(module: torch.nn.Module) -> list[tuple[str, Any]]:
    found = vars(module).items()
    return sorted((key, repr(value)) for key, value in found if isinstance(value, CONSTANTS) and key not in NAMES)
