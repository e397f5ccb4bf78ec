"""A causal LM: loaded, its shape, and what is known of its masks and rotary embeddings."""

from kvr_mpi.model.load import (
    PACKAGE,
    LoadedModel,
    ModelSource,
    Outline,
    choose_device,
    convert_gguf,
    find_model,
    load_model,
    load_outline,
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
    "load_model",
    "load_outline",
    "meta_model",
    "on_meta",
    "probe_shape",
]
