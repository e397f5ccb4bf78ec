"""Load a model whose layers stay on disk (`model.streamed`), and tell its identity as that of one held as a whole."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from transformers import GenerationConfig

from kvr_mpi.errors import ModelError
from kvr_mpi.model.load import LoadedModel, load_outline
from kvr_mpi.model.shape import probe_shape
from kvr_mpi.model.source import convert_gguf, find_model
from kvr_mpi.model.streamed import StreamedWeights
from kvr_mpi.model.weight_files import find_weights


def load_streamed(path: str, *, dtype: str = "auto", offline: bool = False, cache_dir: Path) -> LoadedModel:
    """Load embedding, head and tokenizer, and find the layers; parameters are those of `load_model`.

    Raises
    ------
    ModelError
        Those of `load_model`, and if the model cannot be streamed.
    """
    source = find_model(path)
    if source.is_hub:
        raise ModelError(
            f"model.stream_weights: model.path {path!r} is an id on the hub, but layers are read from a folder: "
            f"download it (hf download {path} --local-dir FOLDER), and use that folder"
        )
    outline = load_outline(path, dtype=dtype, offline=offline, cache_dir=cache_dir)
    folder = Path(source.location) if source.gguf_file is None else convert_gguf(source, cache_dir)
    config = outline.config
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"model.stream_weights: model.path {path!r} is quantised, which cannot be streamed yet")
    is_known = dtype != "auto" or isinstance(config.dtype, torch.dtype)
    try:
        weights = StreamedWeights(config, find_weights(folder, outline.dtype if is_known else None))
    except ModelError as error:
        raise ModelError(f"model.stream_weights: model.path {path!r}: {error}") from error
    model = weights.model
    with contextlib.suppress(OSError):  # most folders have one
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return LoadedModel(
        model=model,
        tokenizer=outline.tokenizer,
        shape=outline.shape,
        name=path,
        fingerprint=outline.fingerprint,
        dtype=model.dtype,
        device=torch.device("cpu"),
        streamed=weights,
    )


def sample_of(loaded: LoadedModel) -> LoadedModel:
    """Make a model of the first layers of one that is streamed, held as a whole: among them is one of each kind.

    Raises
    ------
    ModelError
        If it would be as large as all of it.
    """
    assert loaded.streamed is not None
    kinds = list(dict.fromkeys(loaded.shape.layers))
    count = max(loaded.shape.layers.index(kind) for kind in kinds) + 1
    model = loaded.streamed.first_layers(count)
    shape = probe_shape(model.config, loaded.dtype)
    if shape.layers != loaded.shape.layers[:count]:
        raise ModelError(
            f"model.stream_weights: {loaded.shape.architecture}: its first {count} layers by themselves are not what "
            f"they are in the whole, so that they cannot be tried before the job"
        )
    return LoadedModel(model, loaded.tokenizer, shape, loaded.name, loaded.fingerprint, loaded.dtype, loaded.device)
