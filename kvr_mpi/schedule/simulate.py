"""Forecasts of all strategies over prompt lengths and numbers of ranks.

Used by ``kvr plan --tokens``; combines the registry of strategies with the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvr_mpi.costs.costmodel import (
    RelayKind,
    best_split,
    chain_seconds,
    lower_bound_seconds,
    ring_seconds,
    single_seconds,
    tsp_seconds,
    ttft_star,
)
from kvr_mpi.costs.hardware import Hardware, load_hardware
from kvr_mpi.costs.layer_costs import Costs, costs_of
from kvr_mpi.costs.workload import SHAPES, Workload, named_workload, workload_of
from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.model import PACKAGE, find_model
from kvr_mpi.model.source import must_be_cached
from kvr_mpi.prefill.registry import AUTO, KVR, candidates, fastest

HARDWARE = "h100-80gb"
# Strategies of a forecast; kvr-e has even slices, and kvr-s the best that were found.
NAMES = ("single", "tsp-dense", "tsp-causal", "ring", "kvr-e", "kvr-s")


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """The forecast for one prompt length and one number of ranks.

    ttft_s : seconds to the first token by strategy; other methods as published (``single`` uses one rank).
    auto : the strategy that a job with ``strategy = "auto"`` would use.
    slices : slice bounds of kvr-s in tokens.
    efficiency : parallel efficiency of kvr-s; 1 if p ranks are p times as fast as one.
    bound_s : TTFT(p), kvr-s without communication; star_s : TTFT*(p), eq. 3.
    """

    context_tokens: int
    ranks: int
    ttft_s: dict[str, float]
    auto: str
    slices: tuple[int, ...]
    efficiency: float
    bound_s: float
    star_s: float

    @property
    def winner(self) -> str:
        """The fastest strategy; of equally fast ones, the simplest."""
        return min(self.ttft_s, key=lambda name: self.ttft_s[name])

    def as_json(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return asdict(self) | {"winner": self.winner}


@dataclass(frozen=True, slots=True)
class Outlook:
    """The inputs of a forecast: a model's work, a machine with its costs, and the kind of relay."""

    work: Workload
    hardware: Hardware
    costs: Costs
    relay: RelayKind


def look_out(
    model: str,
    hardware: str | None,
    link_gigabytes_per_s: float | None,
    relay: RelayKind | None,
    is_offline: Callable[[], bool],
    tensor_parallel: int = 1,
) -> Outlook:
    """Prepare a forecast.

    model, is_offline : as in `find_workload`.
    hardware : a profile or a JSON file; None: `HARDWARE`.
    link_gigabytes_per_s : bandwidth of each link in one direction; None: the profile's.
    relay : None: as in our engine, or as in the paper if attention is eager.
    tensor_parallel : size of the tensor-parallel groups; each counts as one rank of the forecast.

    Raises
    ------
    ConfigError
        If a value is invalid.
    """
    profile = load_hardware(hardware or HARDWARE)
    if link_gigabytes_per_s is not None and not 0 < link_gigabytes_per_s < float("inf"):
        raise ConfigError(
            f"link_gigabytes_per_s = {link_gigabytes_per_s}: expected a number above 0 (50 is 400 Gbit/s)"
        )
    work = find_workload(model, is_offline)
    link = link_gigabytes_per_s and link_gigabytes_per_s * 1e9
    costs = costs_of(work, profile, link_bytes_per_s=link, tensor_parallel=tensor_parallel)
    return Outlook(work, profile, costs, relay or ("store-and-forward" if costs.eager else "cut-through"))


def simulate(
    found: Outlook, contexts: Sequence[int], ranks: Sequence[int], chunk_tokens: int | None = None
) -> list[ForecastRow]:
    """Forecast every length on every number of ranks, with whole slices or in chunks.

    Raises
    ------
    ConfigError
        If a context is longer than the model's, or there are more ranks than tokens.
    """
    if chunk_tokens is not None and found.relay != "cut-through":
        raise ConfigError(
            f"chunk_tokens = {chunk_tokens}: forecasts with chunks need relay = 'cut-through', not {found.relay!r}"
        )
    for tokens in contexts:
        if found.work.max_tokens is not None and tokens > found.work.max_tokens:
            longer = [name for name, shape in SHAPES.items() if (shape.max_tokens or tokens) >= tokens]
            raise ConfigError(
                f"{tokens} tokens exceed the {found.work.max_tokens} of {found.work.name}; shapes for this length: "
                f"{', '.join(longer)}"
            )
        if tokens < max(ranks):
            raise ConfigError(
                f"{max(ranks)} ranks for {tokens} tokens: every rank needs at least one; use at most {tokens} ranks"
            )
    return [_row(found.costs, tokens, size, found.relay, chunk_tokens) for tokens in contexts for size in ranks]


def _row(costs: Costs, tokens: int, ranks: int, relay: RelayKind, chunk_tokens: int | None) -> ForecastRow:
    chunks = 1 if chunk_tokens is None else -(-tokens // (ranks * chunk_tokens))  # for the mean slice
    of_chain = costs.in_chunks(chunks)
    partition, searched_s = best_split(of_chain, tokens, ranks, relay)
    single_s = single_seconds(costs, tokens)
    times_s = (
        single_s,
        tsp_seconds(costs, tokens, ranks),
        tsp_seconds(costs, tokens, ranks, dense=False),
        ring_seconds(costs, tokens, ranks),
        chain_seconds(of_chain, _evenly(tokens, ranks), relay),
        searched_s,
    )
    ttft_s = dict(zip(NAMES, times_s, strict=True)) if ranks > 1 else {"single": single_s}
    return ForecastRow(
        context_tokens=tokens,
        ranks=ranks,
        ttft_s=ttft_s,
        auto=KVR.name if chunk_tokens else _choose(costs, tokens, ranks, searched_s),  # others take no chunks
        slices=partition.bounds,
        efficiency=single_s / ranks / searched_s,
        bound_s=lower_bound_seconds(costs, tokens, ranks),
        star_s=ttft_star(single_s, ranks),
    )


def _evenly(tokens: int, slices: int) -> list[float]:
    return [tokens / slices] * slices


def _choose(costs: Costs, tokens: int, ranks: int, searched_s: float) -> str:
    """Name the strategy that a job would use."""
    choices = candidates(AUTO) if ranks > 1 else [KVR]
    seconds = [
        searched_s if one.in_order else one.forecast(costs, _evenly(tokens, one.stretches * ranks)) for one in choices
    ]
    return choices[fastest(seconds)].name


def find_workload(model: str, is_offline: Callable[[], bool]) -> Workload:
    """Find a named model shape, or count the work of a model from its configuration.

    `is_offline` is called only if needed, since its import takes seconds.

    Raises
    ------
    ConfigError
        If `model` is neither; lists the shapes.
    """
    try:
        return named_workload(model)
    except ConfigError as error:
        if not (Path(model).exists() or "/" in model or model.startswith(PACKAGE)):
            raise ConfigError(f"{error}; or give a model folder, a .gguf file, or an id org/name on the hub") from error
    source = find_model(model)
    import torch
    from transformers import AutoConfig

    options = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    is_local = not source.is_hub or must_be_cached(model, is_offline())
    try:
        config = AutoConfig.from_pretrained(
            source.location, local_files_only=is_local, trust_remote_code=False, **options
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {model!r}: its configuration cannot be read: {error}") from error
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return workload_of(config, dtype.itemsize, name=model)
