"""Each part of a prefill as a fraction of what the processor can do: multiply-adds in registers, bytes from memory.

Both peaks are measured by compiled loops (``peaks.cpp``) on all ranks at once. No strategy or engine that multiplies as
often in float32 takes less time than its multiplications at the first peak. The second is no such bound: what a part
reads and writes may stay in the caches, and then it exceeds the peak.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from kvr_mpi.costs.workload import workload_of
from kvr_mpi.errors import ConfigError
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.kernels import without_kernels
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport import Transport, gather_json, share_json, together
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.tuning.compiled_attention import NO_COMPILER, find_compiler, run_compiler
from kvr_mpi.tuning.cores import pinned

PRODUCTS, ATTENTION, REST = "products with weights", "attention", "everything else"
# What a profile calls them.
WEIGHT_OPERATIONS = {"aten::mm", "aten::addmm", "aten::linear", "aten::_grouped_mm", "mkldnn::_linear_pointwise"}
WEIGHT_OPERATIONS |= {"panel product", "narrow product", "widened product"}
ATTENTION_OPERATIONS = {"aten::bmm", "aten::baddbmm"}
# They read of their first tensor only what they return.
GATHERS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather"}
REPEATS = 3
PEAK_SOURCE = Path(__file__).with_name("peaks.cpp")
# Short runs, some of which nothing disturbs; memory that fits no cache.
PEAK_REPEATS = 40
STEPS = 1 << 21
STREAM_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a rank's processor can do in a second, mean of all ranks, which were all at work."""

    flop_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """What one kind of operation takes of a prefill on one rank.

    flop : multiplications and additions; 0 where none are counted.
    nbytes : of the tensors that plain torch's operations read and write.
    """

    name: str
    flop: float
    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """A prompt on one rank alone, while every other rank does the same.

    seconds : of the whole prefill.
    """

    tokens: int
    ranks: int
    seconds: float
    peaks: Peaks
    parts: tuple[Part, ...]

    @property
    def least_s(self) -> float:
        """Seconds that no way of sharing this prompt's multiplications among the ranks falls below."""
        return sum(part.flop for part in self.parts) / (self.ranks * self.peaks.flop_per_s)


def measure_rooflines(loaded: LoadedModel, world: Transport, contexts: Sequence[int]) -> list[Roofline]:
    """Prefill prompts on every rank alone, all ranks at once; the slowest rank's figures, on every rank.

    Raises
    ------
    ConfigError
        On a GPU, whose kernels a profile of this process does not time; of a model that is not in float32, whose
        multiply-adds are not those that are measured; without a compiler.
    """
    if loaded.device.type != "cpu" or loaded.dtype != torch.float32:
        raise ConfigError(
            f"--roofline needs the model in float32 on the CPU (--dtype float32 --device cpu); it is in {loaded.dtype} "
            f"on {loaded.device}"
        )
    with pinned(world):
        peaks = measure_peaks(world)
        return [_measure(loaded, world, tokens, peaks) for tokens in contexts]


def measure_peaks(world: Transport) -> Peaks:
    """Measure multiply-adds and reads by as many threads as torch computes with, on all ranks at once."""
    library, threads = together(world, _compiled_loops), torch.get_num_threads()
    ones = torch.ones(STREAM_BYTES // 4)
    mine = [
        2 * _best_rate(world, lambda: library.multiply_add(STEPS, 1.0, threads)),
        4 * _best_rate(world, lambda: library.read_ones(ones.data_ptr(), ones.numel(), threads)),
    ]
    found = share_json(world, gather_json(world, mine))
    return Peaks(*(sum(rates) / world.size for rates in zip(*found, strict=True)))


def _compiled_loops() -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError(f"--roofline compiles {PEAK_SOURCE.name}: {NO_COMPILER}")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "peaks.so"
        if why := run_compiler(compiler, [PEAK_SOURCE], made):
            raise ConfigError(f"--roofline compiles {PEAK_SOURCE.name}: {why}; CXX names another compiler")
        library = ctypes.CDLL(str(made))
    multiply, read = library.multiply_add, library.read_ones
    multiply.restype, multiply.argtypes = ctypes.c_int64, [ctypes.c_int64, ctypes.c_float, ctypes.c_int64]
    read.restype, read.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return library


def _best_rate(world: Transport, run: Callable[[], int]) -> float:
    """Units of work a second in the best of some runs; what disturbs a run only makes it slower."""
    rates = []
    for _ in range(PEAK_REPEATS):
        world.barrier()
        begin = time.perf_counter()
        done = run()
        rates.append(done / (time.perf_counter() - begin))
    return max(rates)


def _measure(loaded: LoadedModel, world: Transport, tokens: int, peaks: Peaks) -> Roofline:
    ids = loaded.shape.sample_ids(tokens, 1, 0)
    partition = Partition((0, tokens))

    def prefill() -> float:
        return prefill_kvr(loaded, ids, partition, LocalTransport()).seconds

    world.barrier()
    prefill()
    seconds = min(prefill() for _ in range(REPEATS))
    spent = _profiled(prefill)
    with without_kernels(loaded.model), FlopCounterMode(display=False) as counter, _TrafficMode() as traffic:
        prefill()
    flop = {PRODUCTS: _weight_flop(counter), ATTENTION: attention_flop(loaded, tokens), REST: 0.0}
    spent[REST] = max(0.0, seconds - sum(spent.values()))
    mine = [seconds, [[name, flop[name], traffic.nbytes[name], spent[name]] for name in flop]]
    slowest = max(share_json(world, gather_json(world, mine)), key=lambda found: found[0])
    return Roofline(tokens, world.size, slowest[0], peaks, tuple(Part(*part) for part in slowest[1]))


def _part_of(operation: str) -> str:
    if operation in WEIGHT_OPERATIONS:
        return PRODUCTS
    return ATTENTION if "attention" in operation or operation in ATTENTION_OPERATIONS else REST


class _TrafficMode(TorchDispatchMode):
    """Count the bytes of the tensors that operations read and write, by part."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = f"aten::{_name(func)}"
        if not func.is_view and not name.startswith("aten::empty"):
            read = (result,) if name in GATHERS else (args, kwargs)
            self.nbytes[_part_of(name)] += sum(_bytes_of(read)) + sum(_bytes_of(result))
        return result


def _bytes_of(tensors: Any) -> Iterator[int]:
    """Bytes of each tensor: of one that repeats its rows, those that it has in memory."""
    for each in tree_leaves(tensors):
        if isinstance(each, torch.Tensor):
            yield min(each.nbytes, each.untyped_storage().nbytes())


def _profiled(run: Callable[[], Any]) -> dict[str, float]:
    """Seconds of processor time in products with weights, and in attention."""
    spent = {PRODUCTS: 0.0, ATTENTION: 0.0}
    with profile(activities=[ProfilerActivity.CPU]) as record:
        run()
    for event in record.key_averages():
        if (part := _part_of(event.key)) in spent:
            spent[part] += event.self_cpu_time_total / 1e6
    return spent


def _weight_flop(counter: FlopCounterMode) -> float:
    """Operations of products with weights."""
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
