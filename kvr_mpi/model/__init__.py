"""Causal language models: loading, shapes, masks, rotary embeddings and kernels."""

from kvr_mpi.model.devices import choose_device, visible_gpus
from kvr_mpi.model.load import LoadedModel, load_model, load_outline
from kvr_mpi.model.shape import LayerShape, ModelShape, StateShape, meta_model, on_meta, probe_shape, shape_of
from kvr_mpi.model.source import (
    PACKAGE,
    ModelSource,
    convert_gguf,
    find_model,
    hash_weights,
    is_unconverted,
    tokenizer_fingerprint,
)

__all__ = [
    "PACKAGE",
    "LayerShape",
    "LoadedModel",
    "ModelShape",
    "ModelSource",
    "StateShape",
    "choose_device",
    "visible_gpus",
    "convert_gguf",
    "find_model",
    "hash_weights",
    "is_unconverted",
    "load_model",
    "load_outline",
    "meta_model",
    "on_meta",
    "probe_shape",
    "shape_of",
    "tokenizer_fingerprint",
]
