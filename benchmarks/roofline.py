"""How near a prefill comes to what the processor can do: its parts beside peaks that are measured, not looked up.

A strategy, or another engine, that reaches nine tenths of the roofline cannot be beaten by more than a ninth, whatever
is done to it. The roofline here is the time that multiplications alone would take if all of them ran at the best rate
at which this processor was seen to multiply, on all ranks at once: weights at that of the best product found, and
attention at that of its kernel without a mask. Nothing else is counted: norms, gates, rotary embeddings, residuals and
the links between ranks would be free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from kvr_mpi.costs.workload import workload_of
from kvr_mpi.errors import ConfigError
from kvr_mpi.kv.attention import attend
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.cpu_attention import attention_kernel
from kvr_mpi.model.kernels import without_kernels
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport import Transport, gather_json, share_json
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.tuning.cores import pinned

PRODUCTS, ATTENTION, REST = "products with weights", "attention", "everything else"
# What a profile calls them; what compiled kernels do has no name there, and belongs to the rest.
WEIGHT_OPERATIONS = {"aten::mm", "aten::addmm", "aten::linear", "aten::_grouped_mm", "mkldnn::_linear_pointwise"}
ATTENTION_OPERATIONS = {"aten::bmm", "aten::baddbmm"}
REPEATS = 3
PEAK_REPEATS = 5
# Sides of square products, and rows of attention, at which the processor's best rate is looked for.
SIDES = (1024, 2048)
ROWS = (1024, 2048)


@dataclass(frozen=True, slots=True)
class Part:
    """What one kind of operation takes of a prefill on one rank.

    flop : multiplications and additions; 0 where none are counted.
    peak : of them a second, the best that was seen here; 0 where there is none.
    """

    name: str
    flop: float
    seconds: float
    peak: float

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.flop / self.seconds if self.seconds else 0.0

    @property
    def least_s(self) -> float:
        """Seconds at the peak."""
        return self.flop / self.peak if self.peak else 0.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """A prompt on one rank alone, while every other rank does the same.

    seconds : of the whole prefill.
    """

    tokens: int
    ranks: int
    seconds: float
    parts: tuple[Part, ...]

    @property
    def least_s(self) -> float:
        """Seconds that no way of sharing this prompt among the ranks falls below, with these peaks."""
        return sum(part.least_s for part in self.parts) / self.ranks

    def as_json(self) -> dict[str, Any]:
        """Return what a table or file shows."""
        return {
            "context_tokens": self.tokens,
            "ranks": self.ranks,
            "seconds_alone": self.seconds,
            "least_s": self.least_s,
            "parts": [
                {
                    "part": part.name,
                    "gflop": part.flop / 1e9,
                    "seconds": part.seconds,
                    "gflop_per_s": part.rate / 1e9,
                    "peak_gflop_per_s": part.peak / 1e9,
                }
                for part in self.parts
            ],
        }


def measure_rooflines(loaded: LoadedModel, world: Transport, contexts: Sequence[int]) -> list[Roofline]:
    """Prefill prompts on every rank alone, all ranks at once; the slowest rank's figures, on every rank.

    Raises
    ------
    ConfigError
        On a GPU, whose kernels a profile of this process does not time.
    """
    if loaded.device.type != "cpu":
        raise ConfigError(f"--roofline needs the model on the CPU; it is on {loaded.device}")
    with pinned(world):
        peaks = _product_peak(loaded, world), _attention_peak(loaded, world)
        return [_measure(loaded, world, tokens, *peaks) for tokens in contexts]


def _measure(
    loaded: LoadedModel, world: Transport, tokens: int, product_peak: float, attention_peak: float
) -> Roofline:
    ids = loaded.shape.sample_ids(tokens, 1, 0)
    partition = Partition((0, tokens))

    def prefill() -> float:
        return prefill_kvr(loaded, ids, partition, LocalTransport()).seconds

    world.barrier()
    prefill()
    seconds = min(prefill() for _ in range(REPEATS))
    spent = _profiled(prefill)
    with without_kernels(loaded.model):
        flop = _weight_flop(prefill)
    products = _part(PRODUCTS, flop, spent[PRODUCTS], product_peak)
    attention = _part(ATTENTION, attention_flop(loaded, tokens), spent[ATTENTION], attention_peak)
    rest = Part(REST, 0.0, max(0.0, seconds - products.seconds - attention.seconds), 0.0)
    mine = [seconds, [(part.flop, part.seconds, part.peak) for part in (products, attention, rest)]]
    slowest = max(share_json(world, gather_json(world, mine)), key=lambda found: found[0])
    names = (PRODUCTS, ATTENTION, REST)
    parts = tuple(Part(name, *part) for name, part in zip(names, slowest[1], strict=True))
    return Roofline(tokens, world.size, slowest[0], parts)


def _part(name: str, flop: float, seconds: float, peak: float) -> Part:
    """Make a part; what it reaches itself is a rate at which this processor was seen to multiply, too."""
    return Part(name, flop, seconds, max(peak, flop / seconds if seconds else 0.0))


def _profiled(run: Callable[[], Any]) -> dict[str, float]:
    """Seconds of processor time in products with weights, and in attention."""
    spent = {PRODUCTS: 0.0, ATTENTION: 0.0}
    with profile(activities=[ProfilerActivity.CPU]) as record:
        run()
    for event in record.key_averages():
        if event.key in WEIGHT_OPERATIONS:
            spent[PRODUCTS] += event.self_cpu_time_total / 1e6
        elif "attention" in event.key or event.key in ATTENTION_OPERATIONS:
            spent[ATTENTION] += event.self_cpu_time_total / 1e6
    return spent


def _weight_flop(run: Callable[[], Any]) -> float:
    """Operations of products with weights; the model's own code has to run, whose operations are known."""
    with FlopCounterMode(display=False) as counter:
        run()
    counted = counter.get_flop_counts()["Global"]
    return float(sum(flop for operation, flop in counted.items() if f"aten::{_name(operation)}" in WEIGHT_OPERATIONS))


def _name(operation: Any) -> str:
    return str(operation).removeprefix("aten.").partition(".")[0]


def attention_flop(loaded: LoadedModel, tokens: int) -> float:
    """Operations of queries with the keys that they see; in the last layer only the last query is needed."""
    pair = workload_of(loaded.model.config, loaded.dtype.itemsize).pair_flop
    *others, last = loaded.shape.layers
    seen = sum(sum(_seen(layer, range(tokens))) for layer in others)
    return pair * (seen + sum(_seen(last, [tokens - 1])))


def _seen(layer: LayerShape, queries: Iterable[int]) -> Iterator[int]:
    """Keys that each query sees; none in a layer that keeps no keys."""
    return (query + 1 - layer.visibility.first_key(query) for query in queries if layer.elements)


def _product_peak(loaded: LoadedModel, world: Transport) -> float:
    """Operations a second of the best square product, on all ranks at once."""
    rates = []
    for side in SIDES:
        left, right = (torch.randn(side, side, dtype=loaded.dtype) for _ in range(2))
        rates.append(2.0 * side**3 / _fastest(world, partial(torch.mm, left, right)))
    return max(rates)


def _attention_peak(loaded: LoadedModel, world: Transport) -> float:
    """Operations a second of attention without a mask, by the model's heads, on all ranks at once."""
    work = workload_of(loaded.model.config, loaded.dtype.itemsize)
    layer = next((layer for layer in loaded.shape.layers if layer.elements), None)
    if layer is None:
        return 0.0
    rates = []
    for rows in ROWS:
        queries = torch.randn(1, work.heads, rows, layer.key_dim, dtype=loaded.dtype)
        keys = torch.randn(1, work.heads, rows, layer.key_dim, dtype=loaded.dtype)
        values = torch.randn(1, work.heads, rows, layer.value_dim, dtype=loaded.dtype)
        for kernel in {None, attention_kernel(loaded.model)}:
            run = partial(attend, queries, keys, values, AttentionParams(layer.key_dim**-0.5, kernel=kernel))
            rates.append(work.pair_flop * rows * rows / _fastest(world, run))
    return max(rates)


def _fastest(world: Transport, run: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, on all ranks at once; what disturbs a run only makes it longer."""
    times = []
    with torch.inference_mode():
        for _ in range(PEAK_REPEATS):
            world.barrier()
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return min(times)
