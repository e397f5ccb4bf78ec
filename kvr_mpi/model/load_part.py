"""A rank's part of a model, loaded for a group: of every shared matrix its own slice only."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from kvr_mpi.errors import ModelError
from kvr_mpi.model.checks import check_config, check_dtype, check_loaded
from kvr_mpi.model.load import LoadedModel, choose_device, placement
from kvr_mpi.model.shape import BUILDING, probe_shape
from kvr_mpi.model.source import explained, fingerprint_of, locate
from kvr_mpi.model.tp_group import TensorParallelGroup
from kvr_mpi.model.tp_weights import check_part, join_group, part_config, part_files, part_of, sliced_weights


def load_part(
    path: str,
    tp_group: TensorParallelGroup,
    *,
    dtype: str = "auto",
    device: str = "auto",
    cache_dir: Path,
    device_index: int = 0,
) -> LoadedModel:
    """Load a rank's part of a model, its tokenizer and its shape: that of a model with fewer heads.

    Parameters
    ----------
    path : str
        A folder, or a .gguf file, which is converted whole (`load.convert_gguf`).
    tp_group : TensorParallelGroup
        The ranks that have the other parts; nobody waits for them here.
    dtype, device, cache_dir, device_index
        Of `load.load_model`.

    Raises
    ------
    ConfigError
        If the model's heads cannot be divided so.
    ModelError
        If it is not known how to divide this model, or it cannot be loaded.
    """
    source, options = locate(path, True, False, cache_dir)
    if source.is_hub:
        raise ModelError(
            f"model.path {path!r} is an id on the hub, but the ranks of a tensor-parallel group read slices of files "
            f"in a folder: "
            f"download it (hf download {path} --local-dir FOLDER), and use that folder"
        )
    import torch
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    target, folder = choose_device(device, device_index), Path(source.location)
    with explained(path):
        config = AutoConfig.from_pretrained(folder, **options)
        check_config(config)
        part = part_of(config, tp_group.rank, tp_group.size)
        mine = part_config(config, part)
        check_part(config, mine, part)
        own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        with BUILDING, ExitStack() as opened:
            model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None,
                config=mine,
                state_dict=sliced_weights(list(part_files(folder)), part, opened),
                dtype=own if dtype == "auto" else getattr(torch, dtype),
                output_loading_info=True,
                **placement(target),
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        check_loaded(model, info)
        check_dtype(model.dtype, target)
        model = model.to(target).eval()
        has_own = (folder / "generation_config.json").is_file()
        model.generation_config = (
            GenerationConfig.from_pretrained(folder) if has_own else GenerationConfig.from_model_config(config)
        )
        join_group(model, config, tp_group)
        shape = replace(probe_shape(model.config, model.dtype), vocab_size=config.vocab_size)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        shape=shape,
        name=path,
        fingerprint=fingerprint_of(source, config),
        dtype=model.dtype,
        device=target,
        tp_group=tp_group,
        part=part,
    )
