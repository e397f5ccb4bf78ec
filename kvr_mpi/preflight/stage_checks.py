"""What stages of several ranks cannot be combined with, as far as it shows before anything is loaded; no torch."""

from __future__ import annotations

import json
from pathlib import Path

from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.job import JobSpec
from kvr_mpi.model import find_model
from kvr_mpi.model.stage_weights import why_not_divided


def check_stages(spec: JobSpec) -> None:
    """Refuse stages beside what they would be ignored by, or would make wrong, and heads that they do not divide.

    Raises
    ------
    ConfigError
        Naming the settings, and what to do.
    """
    size = spec.parallel.ranks_per_stage
    if size == 1:
        return
    if why := _why_not_combined(spec):
        raise ConfigError(f"parallel.ranks_per_stage = {size}: {why}")
    if why := _why_not_heads(spec.model.path, size):
        raise ConfigError(f"parallel.ranks_per_stage = {size}: {why}")


def _why_not_combined(spec: JobSpec) -> str | None:
    """Say what else in a job keeps its stages from being several ranks; None: nothing."""
    parallel, model = spec.parallel, spec.model
    if parallel.strategy != "kvr":
        return f"strategy = {parallel.strategy!r} needs a whole model on every rank; choose strategy = 'kvr'"
    if parallel.ranks_per_chain == "auto":
        return "ranks_per_chain = 'auto' plans for ranks that hold the whole model; give a number of ranks, or 'all'"
    if parallel.table is not None:
        return "parallel.table was measured on ranks that hold the whole model; choose partition = 'equal_time'"
    if spec.decode.mode != "data-parallel":
        return f"decode.mode = {spec.decode.mode!r} distributes heads, which stages already do; leave it out"
    if spec.cache.is_rolling:
        return "cache.kind = 'rolling' needs ranks that hold the whole model each; leave one of the two out"
    if model.adapter is not None:
        return (
            "model.adapter is merged into whole matrices, but a rank of a stage loads slices of them; save a merged "
            "model and use its folder"
        )
    if model.trust_remote_code:
        return "model.trust_remote_code: transformers has no plan to split such a model; leave one of the two out"
    return None


def _why_not_heads(path: str, size: int) -> str | None:
    """Look into a model's folder for its heads; what is wrong with the folder is said of the model."""
    try:
        source = find_model(path)
    except ModelError:
        return None
    if source.is_hub:
        return (
            f"model.path {path!r} is an id on the hub, but the ranks of a stage read slices of files in a folder: "
            f"download it (hf download {path} --local-dir FOLDER), and use that folder"
        )
    file = Path(source.location) / "config.json"
    if source.gguf_file is not None or not file.is_file():
        return None
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    heads = found.get("num_attention_heads") if isinstance(found, dict) else None
    kv_heads = found.get("num_key_value_heads") or heads if isinstance(found, dict) else None
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or min(heads, kv_heads) < 1:
        return None
    return why_not_divided(heads, kv_heads, size)
