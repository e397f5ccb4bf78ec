"""Strategies side by side on this machine: time to first token, waits, bytes, memory.

Everything is measured in one run, interleaved, so that what disturbs one strategy disturbs all. Each rank is
pinned to its share of the host's cores; ``single`` (plain transformers) gets all of them, and the other ranks
sleep meanwhile.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kvr_mpi.errors import ConfigError
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.planner.probe import measure_rates
from kvr_mpi.planner.search import grid_search, interpolate
from kvr_mpi.planner.solve import equal_time
from kvr_mpi.prefill.seam import prepare_model
from kvr_mpi.prefill.strategies import Prefill, prefill_kvr, prefill_ring, prefill_single, prefill_tsp
from kvr_mpi.report.memory import peak_bytes, reset_peak
from kvr_mpi.transport import Transport, gather_json, share_json

STRATEGIES = ("single", "tsp-dense", "tsp-causal", "ring", "kvr-e", "kvr-s", "kvr-p")
OURS = ("kvr-e", "kvr-s", "kvr-p")
QUANTUM_TOKENS = 16

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt under one strategy: what the ranks together found."""

    ttft_s: float  # from a common start to the first token's logits
    wait_s: float  # the keeper's wait for keys and values
    link_bytes: int  # the most any rank sent
    peak_bytes: int  # the most memory any rank held, weights included


@dataclass(slots=True)
class Row:
    """One strategy at one length."""

    strategy: str
    context_tokens: int
    size: int
    slices: str = ""
    runs: list[Run] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Median time to first token."""
        return statistics.median(run.ttft_s for run in self.runs)

    def as_json(self, rows: Sequence[Row]) -> dict[str, object]:
        """Return what a table or file shows, with ratios to the others of the same length (above 1: faster)."""
        same = {row.strategy: row.ttft_s for row in rows if row.context_tokens == self.context_tokens}
        rivals = [seconds for name, seconds in same.items() if name not in OURS]
        times = [run.ttft_s for run in self.runs]
        return {
            "strategy": self.strategy,
            "context_tokens": self.context_tokens,
            "size": self.size,
            "ttft_s": self.ttft_s,
            "ttft_min_s": min(times),
            "ttft_max_s": max(times),
            "wait_s": statistics.median(run.wait_s for run in self.runs),
            "link_bytes": max(run.link_bytes for run in self.runs),
            "peak_bytes": max(run.peak_bytes for run in self.runs),
            "repeats": len(times),
            "slices": self.slices,
            "speedup_over_single": same["single"] / self.ttft_s if "single" in same else None,
            "speedup_over_best_rival": min(rivals) / self.ttft_s if rivals else None,
        }


@contextmanager
def pinned(transport: Transport) -> Iterator[int]:
    """Pin this rank to its share of the host's cores (one of them, in turn, if there are too few)."""
    everything = sorted(os.sched_getaffinity(0))
    ours = _share_of(everything, transport)
    # Worker threads keep the cores their maker had: make them while that is all of them.
    torch.set_num_threads(len(everything))
    torch.ones(256, 256) @ torch.ones(256, 256)
    os.sched_setaffinity(0, ours)
    torch.set_num_threads(len(ours))
    try:
        yield len(ours)
    finally:
        os.sched_setaffinity(0, everything)


def _share_of(cores: Sequence[int], transport: Transport) -> list[int]:
    """Cores of this rank: those the launcher bound it to, or else its part of what all of the host's ranks have."""
    same_for_all = gather_json(transport, [transport.local_size, list(cores)])
    shared = share_json(transport, all(item == same_for_all[0] for item in same_for_all))
    if not shared:
        return list(cores)
    each = len(cores) // transport.local_size
    first = transport.local_rank * each if each else transport.local_rank % len(cores)
    return list(cores[first : first + max(1, each)])


def bench(
    loaded: LoadedModel,
    world: Transport,
    strategies: Sequence[str],
    contexts: Sequence[int],
    repeats: int,
    say: Say,
) -> list[Row]:
    """Run every strategy at every length, interleaved; every rank calls this.

    Returns
    -------
    list of Row
        On every rank; the figures are complete on all of them.

    Raises
    ------
    ConfigError
        If a strategy is unknown or a length does not fit the model or the ranks.
    """
    for name in strategies:
        if name not in STRATEGIES:
            raise ConfigError(f"--strategies {name!r}: expected some of {', '.join(STRATEGIES)}")
    for tokens in contexts:
        if not 2 * world.size <= tokens <= (loaded.shape.max_tokens or tokens):
            raise ConfigError(
                f"--contexts {tokens}: expected between {2 * world.size} (two for each rank) and "
                f"{loaded.shape.max_tokens} (the model's context)"
            )
    prepare_model(loaded.model, chain=True)
    with pinned(world) as cores:
        say(
            f"{world.size} rank(s), {cores} core(s) each; {repeats} repetition(s) interleaved; lengths {list(contexts)}"
        )
        partitions = _plan(loaded, world, strategies, contexts, say)
        rows = []
        for tokens in contexts:
            here = [Row(name, tokens, world.size) for name in strategies]
            for repeat in range(repeats + 1):  # the first round warms up
                for row in here:
                    partition = partitions.get((row.strategy, tokens))
                    row.slices = str(partition or "")
                    run = measure(loaded, world, row.strategy, tokens, partition)
                    if repeat:
                        row.runs.append(run)
            rows += here
            say(f"{tokens} tokens: " + ", ".join(f"{row.strategy} {row.ttft_s:.2f} s" for row in here))
    return rows


def measure(loaded: LoadedModel, world: Transport, strategy: str, tokens: int, partition: Partition | None) -> Run:
    """Prefill one prompt of arbitrary tokens on all ranks."""
    ids = [(7919 * position + 13) % loaded.shape.vocab_size for position in range(tokens)]
    world.barrier()
    reset_peak(loaded.device)
    if strategy == "single":
        prefill = _single_with_all_cores(loaded, world, ids)
    elif partition is not None:
        prefill = prefill_kvr(loaded, ids, partition, world)
    elif strategy == "ring":
        prefill = prefill_ring(loaded, ids, world)
    else:
        prefill = prefill_tsp(loaded, ids, world, dense=strategy == "tsp-dense")
    found = [
        prefill.seconds if prefill is not None and prefill.logits is not None else 0.0,
        prefill.wait_s if prefill is not None and prefill.logits is not None else 0.0,
        prefill.sent_bytes if prefill is not None else 0,
        peak_bytes(loaded.device),
    ]
    del prefill
    everyone = share_json(world, gather_json(world, found))
    return Run(*(max(column) for column in zip(*everyone, strict=True)))


def _single_with_all_cores(loaded: LoadedModel, world: Transport, ids: Sequence[int]) -> Prefill | None:
    """Plain transformers on rank 0, which borrows the cores of the ranks on its host."""
    prefill = None
    if world.rank == 0:
        pinned_to, threads = os.sched_getaffinity(0), torch.get_num_threads()
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        prepare_model(loaded.model, chain=False)
        prefill = prefill_single(loaded.model, ids, loaded.device)
        prepare_model(loaded.model, chain=True)
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, pinned_to)
    world.barrier()
    return prefill


def _plan(
    loaded: LoadedModel, world: Transport, strategies: Sequence[str], contexts: Sequence[int], say: Say
) -> dict[tuple[str, int], Partition]:
    """Slices for kvr-e (even), kvr-s (searched here and now) and kvr-p (interpolated between the searched)."""
    plans = {("kvr-e", tokens): Partition.even(tokens, world.size) for tokens in contexts}
    if not {"kvr-s", "kvr-p"} & set(strategies):
        return plans
    rates = measure_rates(loaded, world)
    ratios: dict[int, tuple[float, ...]] = {}
    for tokens in contexts:
        start = Partition.by_ratio(tokens, equal_time(tokens, rates), QUANTUM_TOKENS)
        # From a 32nd of the prompt down to a 64th: the valley is flat, and its rim is at hundredths.
        stride = max(QUANTUM_TOKENS, tokens // 32 // QUANTUM_TOKENS * QUANTUM_TOKENS)
        search = grid_search(
            start,
            lambda partition: measure(loaded, world, "kvr-s", partition.tokens, partition).ttft_s,
            stride=stride,
            quantum=max(QUANTUM_TOKENS, stride // 2),
        )
        say(
            f"{tokens} tokens: searched {len(search.tried)} splits from {start} to {search.best}, {search.best_s:.2f} s"
        )
        plans["kvr-s", tokens] = search.best
        ratios[tokens] = tuple(length / tokens for length in search.best.lengths)
    for tokens in contexts:
        others = {length: shares for length, shares in ratios.items() if length != tokens} or ratios
        plans["kvr-p", tokens] = Partition.by_ratio(tokens, interpolate(others, tokens), QUANTUM_TOKENS)
    return plans
