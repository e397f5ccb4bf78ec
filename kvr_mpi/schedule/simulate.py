"""Forecasts of the time to the first token over prompt lengths and numbers of ranks, for ``kvr plan --tokens``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvr_mpi.costs.costmodel import best_split, single_seconds
from kvr_mpi.costs.hardware import Hardware, load_hardware
from kvr_mpi.costs.layer_costs import Costs, costs_of
from kvr_mpi.costs.workload import SHAPES, Workload, named_workload, workload_of
from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.model import PACKAGE, find_model
from kvr_mpi.model.gguf import read_gguf
from kvr_mpi.model.gguf_convert import config_of
from kvr_mpi.model.shape import language_config
from kvr_mpi.model.source import must_be_cached

HARDWARE = "h100-80gb"


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """The forecast for one prompt length and one number of ranks.

    ttft_s : seconds to the first token, of a chain with the best slices.
    slices : its slice bounds in tokens.
    efficiency : parallel efficiency; 1 if p ranks are p times as fast as one.
    """

    context_tokens: int
    ranks: int
    ttft_s: float
    slices: tuple[int, ...]
    efficiency: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def costs_on(
    model: str, hardware: str | None, link_gigabytes_per_s: float | None, is_offline: Callable[[], bool]
) -> tuple[Workload, Hardware, Costs]:
    """Return a model's work, the profile of a machine, and the costs of the work on this machine.

    model, is_offline : as in `find_workload`.
    hardware : a profile or a JSON file; None: `HARDWARE`.
    link_gigabytes_per_s : bandwidth of each link in one direction; None: the profile's.

    Raises `ConfigError` if a value is invalid.
    """
    profile = load_hardware(hardware or HARDWARE)
    if link_gigabytes_per_s is not None and not 0 < link_gigabytes_per_s < float("inf"):
        raise ConfigError(
            f"link_gigabytes_per_s = {link_gigabytes_per_s}: expected a number above 0 (50 is 400 Gbit/s)"
        )
    work = find_workload(model, is_offline)
    link = link_gigabytes_per_s and link_gigabytes_per_s * 1e9
    return work, profile, costs_of(work, profile, link_bytes_per_s=link)


def check_lengths(work: Workload, contexts: Sequence[int], ranks: Sequence[int]) -> None:
    """Refuse a prompt that is longer than the model's context, or shorter than the chain, with `ConfigError`."""
    for tokens in contexts:
        if work.max_tokens is not None and tokens > work.max_tokens:
            longer = [name for name, shape in SHAPES.items() if (shape.max_tokens or tokens) >= tokens]
            raise ConfigError(
                f"{tokens:,} tokens exceed the context of {work.name} ({work.max_tokens:,}); longer ones: "
                f"{', '.join(longer)}"
            )
        if tokens < max(ranks):
            raise ConfigError(f"{max(ranks)} ranks for {tokens:,} tokens: use at most one rank per token")


def simulate(work: Workload, costs: Costs, contexts: Sequence[int], ranks: Sequence[int]) -> list[ForecastRow]:
    """Forecast every length on every number of ranks; errors as for `check_lengths`."""
    check_lengths(work, contexts, ranks)
    rows = []
    for tokens in contexts:
        single_s = single_seconds(costs, tokens)
        for size in ranks:
            partition, seconds = best_split(costs, tokens, size)
            ttft_s = seconds if size > 1 else single_s
            rows.append(ForecastRow(tokens, size, ttft_s, partition.bounds, single_s / size / seconds))
    return rows


def find_workload(model: str, is_offline: Callable[[], bool]) -> Workload:
    """Find a named model shape, or count the work of a model from its configuration.

    Raises `ConfigError`, which lists the shapes, if `model` is neither. `is_offline` is called only if needed, since
    its import takes seconds.
    """
    try:
        return named_workload(model)
    except ConfigError as error:
        if not (Path(model).exists() or "/" in model or model.startswith(PACKAGE)):
            raise ConfigError(f"{error}; or give a model folder, a .gguf file, or an id org/name on the hub") from error
    source = find_model(model)
    import torch
    from transformers import AutoConfig

    is_local = not source.is_hub or must_be_cached(model, is_offline())
    try:
        if source.gguf_file is not None:
            config = config_of(read_gguf(source.path))
        else:
            config = AutoConfig.from_pretrained(source.location, local_files_only=is_local, trust_remote_code=False)
            config = language_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {model!r}: its configuration cannot be read: {error}") from error
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return workload_of(config, dtype.itemsize, name=model)
