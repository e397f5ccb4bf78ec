"""Kernels for CPUs as shares of the processor's peak: products and attention of the shapes of several models.

One core computes; its peak is that of multiply-adds in registers (``peaks.cpp``), measured just before. A model's
products count together: their multiplications over their time, each the best of some calls. For processors with AVX2
only, restrict the others: ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
CXX="c++ -march=x86-64-v3".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.options import make_parser
from benchmarks.roofline import measure_peaks
from kvr_mpi.cli.environment import read_environment
from kvr_mpi.errors import ConfigError
from kvr_mpi.kv.attention import attend
from kvr_mpi.logs import RankLogger
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.cpu_attention import OWN, CpuAttention, KernelLibrary
from kvr_mpi.model.kernels import PLAIN, always
from kvr_mpi.model.products import PANELS, PREPACKED, Product
from kvr_mpi.report.table import print_table
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.tuning.compiled_attention import open_attention


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model computes in a layer."""

    name: str
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(outs, features) of each product of a layer."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = ((width, self.hidden), (kv_width, self.hidden), (kv_width, self.hidden), (self.hidden, width))
        return *attention, (self.mlp, self.hidden), (self.mlp, self.hidden), (self.hidden, self.mlp)


MODELS = (
    Sizes("SmolLM2-135M", 576, 1536, 9, 3, 64),
    Sizes("Qwen2.5-0.5B", 896, 4864, 14, 2, 64),
    Sizes("Llama-3.2-1B", 2048, 8192, 32, 8, 64),
    Sizes("Qwen2.5-1.5B", 1536, 8960, 12, 2, 128),
)
ROWS, CONTEXTS, REPEATS = (1, 8, 64, 512), (4096, 8192), 7


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("kernels", __doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="calls of each kernel, of which the best counts")
    repeats = parser.parse_args(arguments).repeats
    torch.set_num_threads(1)
    library = open_attention(read_environment().cache_dir, RankLogger(), compiles=True)
    if library is None:
        raise ConfigError("benchmarks kernels needs our own kernels, which are not compiled here")
    peak = measure_peaks(LocalTransport()).flop_per_s
    print(f"peak of one core: {peak / 1e9:.1f} GFLOP/s of multiply-adds; shares of it")
    with torch.inference_mode():
        rows = [(each.name, *line) for each in MODELS for line in _lines(each, library, peak, repeats)]
    print_table(("model", "kernel", "size", "torch", "oneDNN layout", "ours"), rows)


def _lines(sizes: Sizes, library: KernelLibrary, peak: float, repeats: int) -> Iterator[tuple[str, ...]]:
    """Return kernel, size, and the share of the peak that each implementation reaches."""
    layers = [torch.nn.Linear(features, outs, bias=False) for outs, features in sizes.products]
    ways = {way: [Product(layer, always(way), library) for layer in layers] for way in (PLAIN, PREPACKED, PANELS)}
    for count in ROWS:
        inputs = [torch.randn(count, layer.in_features) for layer in layers]
        calls = {
            way: [partial(product, rows) for product, rows in zip(products, inputs, strict=True)]
            for way, products in ways.items()
        }
        flop = sum(2 * count * layer.weight.numel() for layer in layers)
        seconds = _best_s(calls, repeats)
        yield "products", f"{count} rows", *(f"{flop / seconds[way] / peak:.0%}" for way in ways)
    for context in CONTEXTS:
        query, keys, values = (
            torch.randn(1, context, heads, sizes.head_dim).transpose(1, 2)
            for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        )
        scale = sizes.head_dim**-0.5
        ours = AttentionParams(scale, kernel=CpuAttention(library, always(OWN)))
        attending = {
            way: [partial(attend, query, keys, values, params, causal=True)]
            for way, params in ((PLAIN, AttentionParams(scale)), (OWN, ours))
        }
        flop = 2 * sizes.heads * sizes.head_dim * context * (context + 1)
        seconds = _best_s(attending, max(1, repeats // 2))
        yield (
            "attention",
            f"{context} tokens",
            f"{flop / seconds[PLAIN] / peak:.0%}",
            "",
            f"{flop / seconds[OWN] / peak:.0%}",
        )


def _best_s(calls: Mapping[str, Sequence[Callable[[], object]]], repeats: int) -> dict[str, float]:
    """Return the seconds of each implementation's calls: of each call the best, implementations in turn."""
    best = {way: [float("inf")] * len(each) for way, each in calls.items()}
    for _ in range(repeats):
        for at in range(len(next(iter(calls.values())))):
            for way, each in calls.items():
                began = time.perf_counter()
                each[at]()
                best[way][at] = min(best[way][at], time.perf_counter() - began)
    return {way: sum(seconds) for way, seconds in best.items()}
