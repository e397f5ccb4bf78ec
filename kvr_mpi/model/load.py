"""Loads a causal LM and its tokenizer as a `LoadedModel`.

Weights are read only from safetensors or GGUF, never from pickles. Code from a model's folder runs only if a job sets
`model.trust_remote_code`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import ModelError
from kvr_mpi.model.checks import GENERATION, check_config, check_dtype, check_generation, check_loaded
from kvr_mpi.model.devices import choose_device
from kvr_mpi.model.shape import BUILDING, ModelShape, language_config, meta_model, probe_shape, shape_of
from kvr_mpi.model.source import ModelSource, explained, fingerprint_of, folder_of, locate
from kvr_mpi.model.tensor_parallel import Part, join_group, part_config, part_of, sliced_weights, why_not_by_plan
from kvr_mpi.model.tokenizer_file import load_tokenizer
from kvr_mpi.model.tp_group import TensorParallelGroup
from kvr_mpi.model.weights import check_model_folder, check_types, tensor_types

if TYPE_CHECKING:
    import torch

# Expressions for names of a language model's tensors in models of texts and images, and their names in it alone.
IN_LARGER_MODELS = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
# Methods whose weights transformers can expand, or multiply with kernels for GPUs that the package `kernels` downloads.
EXPANDABLE = ("fp8", "mxfp4")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its tokenizer and its identity; or, on the ``meta`` device, enough to plan with it."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    shape: ModelShape
    name: str
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    cuts_last_layer: bool = True  # its last layer processes the last token as a separate chunk
    attends_in_parts: bool = True  # chains replace its attention; otherwise its own runs over the whole prefix at once
    tp_group: TensorParallelGroup | None = None  # the ranks with the other parts, if the model is divided
    part: Part | None = None  # then the heads of this rank

    @property
    def config(self) -> Any:
        """The model's transformers configuration."""
        return self.model.config


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    offline: bool = False,
    trust_remote_code: bool = False,
    cache_dir: Path,
    device_index: int = 0,
    tp_group: TensorParallelGroup | None = None,
    needs_head: bool = True,
) -> LoadedModel:
    """Load weights, tokenizer and shape; in a tensor-parallel group only this rank's part of the weights.

    path : see `find_model`.
    dtype : ``auto`` (the model's own), ``float32``, ``bfloat16`` or ``float16``.
    device : ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
    offline : use only the hub's local cache.
    cache_dir : folder for converted GGUF models.
    device_index : index of the GPU among those that this rank sees.
    tp_group : the ranks with the other parts; loading does not wait for them.
    needs_head : refuse a model whose files lack the weights of its head, as those of some embedding models do.

    Raises `ModelError` if the model is missing, incomplete, damaged or of an unknown architecture, or cannot be
    divided; `ConfigError` if its heads cannot be divided among the group.
    """
    source, options = locate(path, offline, trust_remote_code, cache_dir)
    if source.is_hub and tp_group is not None:
        raise ModelError(
            f"model.path {path!r} is an id on the hub, but the ranks of a tensor-parallel group read slices of files "
            f"in a folder: download it (hf download {path} --local-dir FOLDER), and use that folder"
        )
    import torch
    from transformers import AutoModelForCausalLM

    target, part = choose_device(device, device_index), None
    with explained(path):
        config, names = _read_config(source, options)
        if not source.is_hub:
            check_types(Path(source.location), config)
        stored = getattr(config, "quantization_config", None) or {}
        has_kernels = target.type == "cuda" and importlib.util.find_spec("kernels") is not None
        if stored.get("quant_method") in EXPANDABLE and not has_kernels:  # transformers looks for a GPU only
            stored["dequantize"] = True
        # Refuse unsupported models before weights are read. Models with their own code are built only once.
        shape = None if trust_remote_code or tp_group else probe_shape(config, torch.float32)
        if tp_group is None:
            with BUILDING:
                model, info = AutoModelForCausalLM.from_pretrained(
                    source.location,
                    config=config,
                    dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # `check_loaded` names them
                    key_mapping=names,
                    **options,
                    **placement(target),
                )
        else:
            part = part_of(config, tp_group.rank, tp_group.size)
            model, info = _read_part(Path(source.location), config, names, part, _dtype_of(config, dtype), target)
        tokenizer = load_tokenizer(source.location, is_converted=path.endswith(".gguf"), **options)
        files = folder_of(source)
        if source.is_hub:
            check_types(files, config)
        check_loaded(model, info, [name for name, _ in tensor_types(files)], needs_head=needs_head)
        check_generation(files)
        check_dtype(model.dtype, target)
        if stored.get("dequantize"):  # transformers leaves what is not quantised as it is stored
            model = model.to(_dtype_of(config, dtype))
        model = model.to(target).eval()
        if tp_group is not None:
            join_group(model, config, tp_group)
        shape = shape or probe_shape(model.config, model.dtype)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        shape=replace(shape, dtype_bytes=model.dtype.itemsize),
        name=path,
        fingerprint=fingerprint_of(source),
        dtype=model.dtype,
        device=target,
        tp_group=tp_group,
        part=part,
    )


def _read_config(source: ModelSource, options: Mapping[str, Any]) -> tuple[Any, dict[str, str] | None]:
    """Read and check a model's configuration; also return how to rename the tensors of its files, if that is needed."""
    from transformers import AutoConfig, PreTrainedConfig

    if not source.is_hub:
        check_model_folder(Path(source.location))
    config = AutoConfig.from_pretrained(source.location, **options)
    given, _ = PreTrainedConfig.get_config_dict(source.location, local_files_only=options["local_files_only"])
    check_config(config, given)
    text = language_config(config)
    return text, None if text is config else IN_LARGER_MODELS


def _read_part(
    folder: Path, config: Any, names: dict[str, str] | None, part: Part, dtype: torch.dtype, target: torch.device
) -> tuple[Any, Any]:
    """Read a rank's slices of a model's weights; also return transformers' loading info."""
    import torch
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    mine = part_config(config, part)
    outline = meta_model(mine, torch.bfloat16)
    if why := why_not_by_plan(outline):
        raise ModelError(f"{type(outline).__name__}: {why}; use tensor_parallel = 1")
    with BUILDING, ExitStack() as opened:
        model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=mine,
            state_dict=sliced_weights(folder, part, opened),
            key_mapping=names,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **placement(target),
        )
    has_own = (folder / GENERATION).is_file()
    model.generation_config = (
        GenerationConfig.from_pretrained(folder) if has_own else GenerationConfig.from_model_config(config)
    )
    return model, info


def _dtype_of(config: Any, wanted: str) -> torch.dtype:
    """Return the dtype to compute in; ``auto`` is the model's own."""
    import torch

    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    chosen: torch.dtype = own if wanted == "auto" else getattr(torch, wanted)
    return chosen


def placement(device: torch.device) -> dict[str, Any]:
    """Return options for loading weights straight to a GPU, if `accelerate` is installed."""
    if device.type != "cuda" or importlib.util.find_spec("accelerate") is None:
        return {}
    return {"device_map": {"": device}}


def load_outline(
    path: str,
    *,
    dtype: str = "auto",
    offline: bool = False,
    trust_remote_code: bool = False,
    cache_dir: Path,
) -> LoadedModel:
    """Load configuration and tokenizer, and make the model on ``meta``; parameters and errors as for `load_model`.

    The model has no weights, is in bfloat16, and only serves to plan. `dtype` and `fingerprint` are those of the model
    that `load_model` returns.
    """
    source, options = locate(path, offline, trust_remote_code, cache_dir)
    import torch

    with explained(path):
        config, _ = _read_config(source, options)
        tokenizer = load_tokenizer(source.location, is_converted=path.endswith(".gguf"), **options)
        chosen, model = _dtype_of(config, dtype), meta_model(config, torch.bfloat16)
        shape = shape_of(model, chosen)
    return LoadedModel(model, tokenizer, shape, path, fingerprint_of(source), chosen, torch.device("meta"))
