"""A causal LM: loaded, its shape, and what is known of its masks and rotary embeddings."""

from kvr_mpi.model.load import (
    PACKAGE,
    LoadedModel,
    ModelSource,
    Outline,
    choose_device,
    convert_gguf,
    find_model,
    hash_weights,
    load_model,
    load_outline,
    tokenizer_fingerprint,
)
from kvr_mpi.model.shape import LayerShape, ModelShape, StateShape, meta_model, on_meta, probe_shape

__all__ = [
    "PACKAGE",
    "LayerShape",
    "LoadedModel",
    "ModelShape",
    "ModelSource",
    "Outline",
    "StateShape",
    "choose_device",
    "convert_gguf",
    "find_model",
    "hash_weights",
    "load_model",
    "load_outline",
    "meta_model",
    "on_meta",
    "probe_shape",
    "tokenizer_fingerprint",
]
