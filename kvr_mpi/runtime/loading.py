"""Loads a model on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvr_mpi.disk import retried
from kvr_mpi.errors import ModelError, UnavailableError
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.model import LoadedModel, ModelSource, choose_device, find_model, is_unconverted, load_model, visible_gpus
from kvr_mpi.model.adapter import merge_adapter
from kvr_mpi.model.source import find_converted
from kvr_mpi.model.tp_group import TensorParallelGroup, alone
from kvr_mpi.runtime.host_memory import free_bytes, keep_heap, ranks_on_device
from kvr_mpi.topology import gpus_in_turn
from kvr_mpi.transport import Transport, gather_json, host_by_host, share_json, together
from kvr_mpi.tuning.compiled_attention import open_attention
from kvr_mpi.tuning.kernels import choose_kernels, describe_slow_dtype

T = TypeVar("T")


def load_on_all(
    world: Transport,
    path: str,
    *,
    adapter: str | None = None,
    kernels: str = "measured",
    logger: RankLogger = SILENT,
    tp_group: TensorParallelGroup | None = None,
    **arguments: Any,
) -> LoadedModel:
    """Load a model on every rank and choose its kernels; every rank calls this.

    adapter : folder of a LoRA adapter, which is merged into the model.
    kernels : kernels for chains, as in a job's `model.kernels`.
    tp_group : the ranks among which the model is divided; each loads its part.
    **arguments : arguments of `load_model`.
    """
    index = gpu_index(world, arguments.get("device", "auto"))
    load = partial(readable, path, partial(load_model, path, tp_group=tp_group, device_index=index, **arguments))
    # One rank per host converts a GGUF file or downloads from the hub; all ranks read existing files at the same time.
    compiles = kernels != "plain" and choose_device(arguments.get("device", "auto"), index).type == "cpu"
    early = host_by_host(world, lambda: load() if _find(path, arguments["cache_dir"], compiles).is_hub else None)
    plain = together(world, lambda: early or load())
    loaded = host_by_host(world, lambda: readable(adapter or path, lambda: merge_adapter(plain, adapter)))
    if loaded.tokenizer is not plain.tokenizer:
        logger.root.info("tokenizer and chat template are those in the folder of model.adapter")
    keep_heap()
    if kernels != "plain":
        free = free_bytes(loaded.device, ranks_on_device(world, loaded.device))
        with alone(tp_group):  # kernels are measured without sums over the group
            choose_kernels(loaded, world, free, arguments["cache_dir"], logger.root)
    if logger.root.isEnabledFor(WARNING) and (line := describe_slow_dtype(loaded)) is not None:
        logger.root.warning(line)
    return loaded


def _find(path: str, cache_dir: Path, compiles: bool) -> ModelSource:
    """Find a model's files; while a GGUF file is converted, which takes one core, compile our kernels."""
    with ThreadPoolExecutor(1) as pool:
        if compiles and is_unconverted(find_model(path), cache_dir):
            pool.submit(open_attention, cache_dir, SILENT, compiles=True)
        return readable(path, lambda: find_converted(path, cache_dir))


def readable(path: str, read: Callable[[], T]) -> T:
    """Call a function that reads a model; `retried`. Raises `ModelError` if its files must not be read."""
    try:
        return retried(read, path)
    except UnavailableError:
        raise
    except OSError as error:
        why = error.strerror or error
        raise ModelError(f"model.path {path!r}: {error.filename or path} cannot be read: {why}") from error


def own_device(world: Transport, name: str) -> torch.device:
    """Choose a rank's device (``auto``, ``cpu``, ``cuda``) with `choose_device`; every rank calls this."""
    index = gpu_index(world, name)
    return together(world, lambda: choose_device(name, index))


def gpu_index(world: Transport, name: str = "auto") -> int:
    """Choose this rank's GPU with `gpus_in_turn`; every rank calls this."""
    mine = together(world, lambda: visible_gpus() if name != "cpu" else [])
    return gpus_in_turn(share_json(world, gather_json(world, mine)))[world.rank]
