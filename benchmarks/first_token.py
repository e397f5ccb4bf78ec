"""Strategies side by side on this machine: time to first token, waits, bytes, memory.

Everything is measured in one run, in pairs with ours, so that what disturbs one disturbs the other (``pairs``). Each
rank is pinned to its share of the host's cores; ``single`` (plain transformers) gets all of them, and the other ranks
sleep meanwhile.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.cores import all_cores, plain
from benchmarks.memory import held_bytes, peak_bytes, reset_peak
from benchmarks.options import (
    check_writable,
    default_dtype,
    json_option,
    model_options,
    open_rivals,
    patience_options,
    plot_option,
    rival_options,
    transport_option,
)
from benchmarks.pairs import Patience, Ratio, drift_of, measure_pairs, ratio_of, ratios_of
from benchmarks.pretrained import opened_model
from benchmarks.published import LENT, PUBLISHED, Strategy
from benchmarks.rivals import Rival
from benchmarks.roofline import measure_rooflines
from benchmarks.tables import print_rooflines, print_strategies
from kvr_mpi.cli.launch import load_everywhere, open_links, run_guarded
from kvr_mpi.cli.options import command, parse_names, parse_numbers
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.kv.relay import Relay
from kvr_mpi.logs import RankLogger
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.kernels import without_kernels
from kvr_mpi.partition import QUANTUM_TOKENS, Partition
from kvr_mpi.prefill.memory_budget import Footprint, footprint_of
from kvr_mpi.prefill.one_prompt import Prefill, prefill_single
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.runtime.verify import _in_float32
from kvr_mpi.transport import FailedTogetherError, Transport, gather_json, on_root, share_json, together
from kvr_mpi.transport.mpi import connect
from kvr_mpi.tuning.cores import pinned
from kvr_mpi.tuning.lookup import interpolate
from kvr_mpi.tuning.measure import follow_measurements, leading, measure_costs
from kvr_mpi.tuning.refit import refit

# A strategy with cuts of its own runs with even, searched and interpolated slices.
CUTS = ("-e", "-s", "-p")
STRATEGIES = tuple(one.name + cut for one in PUBLISHED.values() for cut in (CUTS if one.is_chain else ("",)))
OURS = tuple(name for name in STRATEGIES if name not in PUBLISHED)
# Others with this end of their name have what is ours: kernels, and the cut of the last layer.
LENT_END = "-lent"
WITH_OURS = tuple(name + LENT_END for name in ("tsp-dense", "tsp-causal", "ring"))

# Prompts of which the first token is compared with that of float32, and their length.
PROBES, PROBE_TOKENS = 4, 64


@dataclass(frozen=True, slots=True)
class StrategyRun:
    """One prompt under one strategy: what the ranks together found."""

    ttft_s: float  # from a common start to the first token's logits
    wait_s: float  # the decode rank's wait for keys and values
    link_bytes: int  # the most any rank sent
    cpu_s: float  # processor time of all ranks together, from start to end; waiting sleeps and takes none
    peak_bytes: tuple[int, ...]  # the most memory each rank has held, weights included
    predicted_bytes: tuple[int, ...]  # what the plan said before; 0 where nothing is predicted


@dataclass(slots=True)
class StrategyRow:
    """One strategy at one length."""

    strategy: str
    context_tokens: int
    size: int
    slices: str = ""
    cold: StrategyRun | None = None  # the first, which warms up and tells the memory
    runs: list[StrategyRun] = field(default_factory=list)
    ours: str = ""  # what it is compared with
    ratios: list[float] = field(default_factory=list)  # of its time to ours, pair by pair
    runs_in: str = ""  # dtype and kernels, as the engine says
    version: str = ""  # of another engine
    error: float | None = None  # of the first token's log-probability (`ErrorProbe`)

    @property
    def ttft_s(self) -> float:
        """Median time to first token."""
        return statistics.median(run.ttft_s for run in self.runs)

    @property
    def ratio(self) -> Ratio:
        """Its time to the first token as a multiple of ours; 1 for ours."""
        return ratio_of(self.ratios).of_any_start() if self.ratios else Ratio(1.0, 1.0, 1.0, len(self.runs))

    def as_json(self, rows: Sequence[StrategyRow]) -> dict[str, Any]:
        """Return what a table or file shows, with ratios to the others of the same length.

        ``times_ours`` is above 1 where ours is faster, ``speedup_over_...`` where this strategy is; all are of pairs.
        """
        ratio = self.ratio
        same = {row.strategy: row.ratio.median for row in rows if row.context_tokens == self.context_tokens}
        rivals = [multiple for name, multiple in same.items() if name not in OURS]
        times = [run.ttft_s for run in self.runs]
        assert self.cold is not None
        return {
            "strategy": self.strategy,
            "context_tokens": self.context_tokens,
            "size": self.size,
            "ttft_s": self.ttft_s,
            "ttft_min_s": min(times),
            "ttft_max_s": max(times),
            "wait_s": statistics.median(run.wait_s for run in self.runs),
            "link_bytes": max(run.link_bytes for run in self.runs),
            "cpu_s": statistics.median(run.cpu_s for run in self.runs),
            "peak_bytes": max(self.cold.peak_bytes),
            "peak_bytes_by_rank": list(self.cold.peak_bytes),
            "predicted_bytes_by_rank": list(self.cold.predicted_bytes),
            "repeats": len(times),
            "slices": self.slices,
            "ours": self.ours,
            "pairs": len(self.ratios),
            "times_ours": ratio.median,
            "times_ours_low": ratio.low,
            "times_ours_high": ratio.high,
            "is_told_apart": ratio.is_told,
            "runs_in": self.runs_in,
            "version": self.version,
            "error": self.error,
            "speedup_over_single": same["single"] / ratio.median if "single" in same else None,
            "speedup_over_best_rival": min(rivals) / ratio.median if rivals else None,
        }


@dataclass(frozen=True, slots=True)
class Contest:
    """What is compared.

    strategies : of `STRATEGIES`.
    contexts : lengths of prompts, in tokens.
    patience : how long to measure; its time limit is for all lengths together.
    slices : lengths of slices for kvr-s at some prompt lengths, instead of a search.
    lends : let tsp and ring have what is ours, the cut of the last layer and packed weights; as published they run with
        the whole model and the weights as they are.
    """

    strategies: Sequence[str]
    contexts: Sequence[int]
    patience: Patience
    slices: Mapping[int, Sequence[int]] = field(default_factory=dict)
    lends: bool = False


def bench(
    loaded: LoadedModel,
    world: Transport,
    contest: Contest,
    logger: RankLogger,
    rivals: Mapping[str, Rival | None] | None = None,
) -> list[StrategyRow]:
    """Run every strategy at every length, in pairs with ours; every rank calls this.

    Parameters
    ----------
    rivals : mapping of str to Rival, optional
        Other engines that take part, by name; None in place of each on all ranks but the first.

    Returns
    -------
    list of StrategyRow
        On every rank; the figures are complete on all of them.

    Raises
    ------
    ConfigError
        If a strategy is unknown or a length does not fit the model or the ranks.
    ModelError
        If a strategy cannot run this model.
    """
    strategies, contexts, rivals = contest.strategies, contest.contexts, rivals or {}
    for name in strategies:
        if name not in (*STRATEGIES, *WITH_OURS):
            raise ConfigError(f"--strategies {name!r}: expected some of {', '.join((*STRATEGIES, *WITH_OURS))}")
    for tokens in contexts:
        if not 2 * world.size <= tokens <= (loaded.shape.max_tokens or tokens):
            raise ConfigError(
                f"--contexts {tokens}: expected from {2 * world.size} (two tokens per rank) to "
                f"{loaded.shape.max_tokens} (the model's context)"
            )
    given = {tokens: _given(tokens, lengths, world.size) for tokens, lengths in contest.slices.items()}
    loaded = check_chain(loaded, logger=logger)
    footprint = footprint_of(
        loaded.model.config, loaded.dtype, on_gpu=loaded.device.type == "cuda", in_parts=loaded.attends_in_parts
    )
    for name in strategies:
        if name not in OURS:
            LENT[name.removesuffix(LENT_END)].check(loaded, world)
    with pinned(world) as cores:
        ours = choose_ours(strategies)
        logger.info(
            f"{counted(world.size, 'rank')}, {counted(cores, 'core')} each; "
            f"lengths {list(contexts)}; in pairs with {ours}"
        )
        partitions = _plan(loaded, world, strategies, contexts, given, logger)
        probe, rows = ErrorProbe(loaded, world), list[StrategyRow]()
        began, left = time.monotonic(), len(contexts)
        for tokens in contexts:
            trials: dict[str, Trial | RivalTrial] = {
                name: Trial(loaded, world, name, tokens, partitions.get((name, tokens)), footprint, contest.lends)
                for name in strategies
            }
            trials |= {name: RivalTrial(loaded, world, rival, tokens) for name, rival in rivals.items()}
            patience = contest.patience.share(time.monotonic() - began, left)
            rows += _measure_length(world, trials, ours, patience, probe, logger)
            left -= 1
    return rows


def choose_ours(strategies: Sequence[str]) -> str:
    """Say which strategy the others are held against: ours, with the best slices there are."""
    return next((name for name in ("kvr-s", "kvr-p", "kvr-e") if name in strategies), strategies[0])


def _measure_length(
    world: Transport,
    trials: Mapping[str, Trial | RivalTrial],
    ours: str,
    patience: Patience,
    probe: ErrorProbe,
    logger: RankLogger,
) -> list[StrategyRow]:
    """Measure all strategies at one length."""
    rows = {name: StrategyRow(name, one.tokens, world.size, str(one.partition or "")) for name, one in trials.items()}
    for name, row in list(rows.items()):
        try:
            row.ours, row.cold = ours, trials[name].measure(cold=True)
            row.runs_in, row.version = trials[name].describe()
            row.error, same = probe.error_of(name, trials[name].first_token)
        except FailedTogetherError as failure:
            if not isinstance(trials[name], RivalTrial):
                raise
            logger.info(f"{row.context_tokens} tokens: left out: {failure}")
            del rows[name]
            continue
        busy, engine = row.cold.cpu_s / row.cold.ttft_s, f"{name} {row.version}".strip()
        logger.info(
            f"{row.context_tokens} tokens: {engine} computes in {row.runs_in}; {same} of {PROBES} first tokens are "
            f"those of float32, with log-probabilities off by {row.error:.1e}; {busy:.1f} cores kept busy"
        )

    def measure(name: str) -> StrategyRun:
        run = trials[name].measure()
        rows[name].runs.append(run)
        return run

    others = [name for name in rows if name != ours]
    found = measure_pairs(world, ours, others, measure, _ttft_s, patience)
    for name in others:
        rows[name].ratios = ratios_of(found[name], _ttft_s)
    tokens = trials[ours].tokens
    texts = [f"{name} {row.ttft_s:.2f} s, x {row.ratio.describe()}" for name, row in rows.items() if name != ours]
    logger.info("; ".join([f"{tokens} tokens: {ours} {rows[ours].ttft_s:.2f} s", *texts]))
    if drift := drift_of([run.ttft_s for run in rows[ours].runs]):
        logger.info(f"{tokens} tokens: {ours} {drift}")
    return list(rows.values())


def _ttft_s(run: StrategyRun) -> float:
    return run.ttft_s


def _given(tokens: int, lengths: Sequence[int], size: int) -> Partition:
    if len(lengths) != size or sum(lengths) != tokens or min(lengths) < 1:
        raise ConfigError(
            f"--slices {tokens}={'+'.join(map(str, lengths))}: expected {size} lengths of at least 1, one per rank, "
            f"with a sum of {tokens}; the sum is {sum(lengths)}"
        )
    return Partition((0, *accumulate(lengths)))


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt of arbitrary tokens, to be prefilled under one strategy on all ranks."""

    loaded: LoadedModel
    world: Transport
    strategy: str
    tokens: int
    partition: Partition | None  # of ours
    footprint: Footprint
    lends: bool

    @property
    def registered(self) -> Strategy:
        """The strategy, however it is cut."""
        known, name = (LENT if self.has_ours else PUBLISHED), self.strategy.removesuffix(LENT_END)
        return known[name if name in known else name[:-2]]

    @property
    def has_ours(self) -> bool:
        """Whether it has our kernels and, if it is not ours, our cut of the last layer."""
        return self.lends or self.strategy in OURS or self.strategy.endswith(LENT_END)

    @property
    def cut(self) -> Partition:
        return self.partition or self.registered.cut_evenly(self.tokens, self.world.size)

    def measure(self, *, cold: bool = False) -> StrategyRun:
        """Prefill it; every rank calls this.

        Parameters
        ----------
        cold : bool
            Begin without what earlier prompts have left in memory, so that the peak is this one's.
        """
        loaded, world = self.loaded, self.world
        world.barrier()
        if cold:
            reset_peak(loaded.device)
        predicted = 0
        if self.registered.is_chain:
            relay = Relay(self.cut, world.rank)
            predicted = held_bytes(loaded.device) + self.footprint.slice_bytes(relay)
        began_cpu_s = time.process_time()
        prefill = self._prefill(loaded.shape.sample_ids(self.tokens, 7919, 13), self.cut)
        cpu_s = time.process_time() - began_cpu_s if prefill is not None else 0.0
        first_token = prefill if prefill is not None and prefill.logits is not None else None
        found = [
            first_token.seconds if first_token else 0.0,
            first_token.wait_s if first_token else 0.0,
            prefill.sent_bytes if prefill is not None else 0,
            cpu_s,
            peak_bytes(loaded.device),
            predicted,
        ]
        del prefill, first_token
        seconds, waits, sent, cpu, peaks, plans = zip(*share_json(world, gather_json(world, found)), strict=True)
        return StrategyRun(max(seconds), max(waits), max(sent), sum(cpu), peaks, plans)

    def first_token(self, ids: Sequence[int]) -> tuple[int, float]:
        """Return the likeliest token after a prompt, and its log-probability; every rank calls this."""
        strategy = self.registered
        prefill = self._prefill(ids, strategy.cut_evenly(len(ids), self.world.size))
        found = None
        if prefill is not None and prefill.logits is not None:
            logprobs = prefill.logits.double().log_softmax(-1).flatten()
            found = int(logprobs.argmax()), float(logprobs.max())
        answers = share_json(self.world, gather_json(self.world, found))
        token, logprob = next(answer for answer in answers if answer is not None)
        return token, logprob

    def describe(self) -> tuple[str, str]:
        """Return dtype and kernels; there is no version of its own."""
        dtype = str(self.loaded.dtype).removeprefix("torch.")
        return f"{dtype}, our kernels" if self.has_ours else dtype, ""

    def _prefill(self, ids: Sequence[int], cut: Partition) -> Prefill | None:
        loaded, world = self.loaded, self.world
        if self.registered.is_single:
            return _single_with_all_cores(loaded, world, ids)
        with nullcontext() if self.has_ours else without_kernels(loaded.model):
            return self.registered.prefill(loaded, ids, cut, world)


@dataclass(frozen=True, slots=True)
class RivalTrial:
    """The same prompt, by another engine on all cores of the first rank's host."""

    loaded: LoadedModel
    world: Transport
    rival: Rival | None  # on the first rank
    tokens: int

    @property
    def partition(self) -> None:
        """There is none."""

    @property
    def ids(self) -> list[int]:
        return list(self.loaded.shape.sample_ids(self.tokens, 7919, 13))

    def measure(self, *, cold: bool = False) -> StrategyRun:
        """Let the engine have the prompt while the ranks sleep; every rank calls this."""

        def run() -> list[float]:
            assert self.rival is not None, "the first rank has it"
            answer = self.rival.answer([self.ids], 1, None)
            return [answer.seconds, answer.cpu_s, answer.peak_bytes]

        self.world.barrier()
        seconds, cpu_s, peak = share_json(self.world, on_root(self.world, run))
        return StrategyRun(seconds, 0.0, 0, cpu_s, (int(peak),), (0,))

    def first_token(self, ids: Sequence[int]) -> tuple[int, float]:
        """Return the likeliest token after a prompt, and its log-probability; every rank calls this."""

        def run() -> tuple[int, float]:
            assert self.rival is not None, "the first rank has it"
            answer = self.rival.answer([ids], 1, None)
            return answer.tokens[0][0], answer.logprobs[0]

        token, logprob = share_json(self.world, on_root(self.world, run))
        return token, logprob

    def describe(self) -> tuple[str, str]:
        """Return what it says that it computes in, and its version; every rank calls this."""
        said = on_root(self.world, lambda: self.rival and (self.rival.runs_in, self.rival.version))
        runs_in, version = share_json(self.world, said)
        return runs_in, version


class ErrorProbe:
    """Log-probabilities of the first token after some short prompts, by plain transformers in float32 on rank 0.

    In another dtype the weights are those of the model, rounded to its dtype. What an engine is told to compute in says
    little about what it rounds: OpenVINO, llama.cpp and others are held against the same figures.
    """

    def __init__(self, loaded: LoadedModel, world: Transport) -> None:
        self._world, self._loaded = world, loaded
        most = loaded.shape.max_tokens or PROBE_TOKENS
        self._prompts = [
            loaded.shape.sample_ids(min(PROBE_TOKENS, most), 11 + 101 * number, 29) for number in range(PROBES)
        ]
        self._found: dict[str, tuple[float, int]] = {}
        self._truth: list[torch.Tensor] = []
        if world.rank == 0:
            with all_cores(), plain(loaded):
                exact = loaded if loaded.dtype == torch.float32 else _in_float32(loaded)
                for ids in self._prompts:
                    logits = prefill_single(exact.model, ids, loaded.device).logits
                    assert logits is not None
                    self._truth.append(logits.double().log_softmax(-1).flatten().cpu())
        world.barrier()

    def error_of(self, name: str, first_token: Callable[[Sequence[int]], tuple[int, float]]) -> tuple[float, int]:
        """Return the root mean square error of log-probabilities, and how many tokens are the same; for all ranks."""
        if name not in self._found:
            answers = [first_token(ids) for ids in self._prompts]
            found = None
            if self._world.rank == 0:
                pairs = list(zip(answers, self._truth, strict=True))
                squares = [(logprob - float(truth[token])) ** 2 for (token, logprob), truth in pairs]
                found = math.sqrt(statistics.mean(squares)), sum(int(truth.argmax()) == at[0] for at, truth in pairs)
            error, same = share_json(self._world, found)
            self._found[name] = error, same
        return self._found[name]


def _single_with_all_cores(loaded: LoadedModel, world: Transport, ids: Sequence[int]) -> Prefill | None:
    """Plain transformers on rank 0, which borrows the cores of the ranks on its host."""
    prefill = None
    if world.rank == 0:
        with all_cores(), plain(loaded):
            prefill = prefill_single(loaded.model, ids, loaded.device)
    world.barrier()
    return prefill


def _plan(
    loaded: LoadedModel,
    world: Transport,
    strategies: Sequence[str],
    contexts: Sequence[int],
    given: Mapping[int, Partition],
    logger: RankLogger,
) -> dict[tuple[str, int], Partition]:
    """Slices for kvr-e (even), kvr-s (searched here and now) and kvr-p (interpolated between the searched)."""
    plans = {("kvr-e", tokens): Partition.even(tokens, world.size) for tokens in contexts}
    plans |= {("kvr-s", tokens): partition for tokens, partition in given.items()}
    ratios = {tokens: tuple(length / tokens for length in cut.lengths) for tokens, cut in given.items()}
    todo = [tokens for tokens in contexts if tokens not in given]
    if not {"kvr-s", "kvr-p"} & set(strategies):
        return plans
    costs = measure_costs(loaded, world) if todo else None
    for tokens in todo:
        assert costs is not None
        partition = plans["kvr-s", tokens] = _search(loaded, world, tokens, costs, logger)
        ratios[tokens] = tuple(length / tokens for length in partition.lengths)
    for tokens in contexts:
        others = {length: shares for length, shares in ratios.items() if length != tokens} or ratios
        plans["kvr-p", tokens] = Partition.by_ratio(tokens, interpolate(others, tokens), QUANTUM_TOKENS)
    return plans


def _search(loaded: LoadedModel, world: Transport, tokens: int, costs: Costs, logger: RankLogger) -> Partition:
    """Search one length in a few instrumented runs, as ``kvr search`` does; rank 0 leads."""
    best = None
    if world.rank == 0:
        with leading(loaded, world) as run:
            best = refit(tokens, costs, world.size, run, logger).best.bounds
    else:
        follow_measurements(loaded, world)
    return Partition(tuple(share_json(world, best)))


@command("first-token")
@model_options
@click.option(
    "--strategies",
    default="single,tsp-dense,tsp-causal,ring,kvr-e,kvr-s,kvr-p",
    show_default=True,
    help="Strategies to run: kvr-e uses even slices, kvr-s searched ones, kvr-p interpolated ones; ring-lent and "
    "tsp-causal-lent have our kernels and our cut of the last layer, as all have with --lend.",
)
@click.option("--contexts", default="1024,2048,4096", show_default=True, help="Prompt lengths in tokens.")
@transport_option
@patience_options
@rival_options
@click.option(
    "--slices",
    "lengths_of",
    multiple=True,
    metavar="TOKENS=A+B+...",
    help="Slices of kvr-s for a prompt length, instead of a search; may be repeated for other lengths.",
)
@click.option(
    "--lend",
    is_flag=True,
    help="Run tsp and ring with our optimizations, too: kernels chosen for the processor and, except for tsp-dense, a "
    "last layer that computes only what is read. As published they have neither.",
)
@click.option(
    "--kernels",
    type=click.Choice(["measured", "plain"]),
    default="measured",
    show_default=True,
    help="Kernels that ours uses, as model.kernels in a job file.",
)
@click.option(
    "--roofline",
    is_flag=True,
    help="Also measure this processor's peaks (multiply-adds, memory); show how close parts and strategies come.",
)
@json_option
@plot_option
def main(
    model: str,
    dtype: str | None,
    device: str,
    strategies: str,
    contexts: str,
    transport: str,
    repeats: int,
    until: float | None,
    time_limit: float | None,
    rivals: str,
    rivals_folder: Path,
    lengths_of: tuple[str, ...],
    lend: bool,
    kernels: str,
    roofline: bool,
    json_file: Path | None,
    plot: Path | None,
) -> int:
    """Time the strategies side by side: seconds to the first token for each length.

    \b
    mpirun -n 2 python -m benchmarks first-token --contexts 4096,8192 --repeats 5 --json bench.json
    mpirun -n 2 python -m benchmarks first-token --strategies kvr-s,ring --until 3% --time-limit 20:00
    mpirun -n 2 python -m benchmarks first-token --contexts 4096 --rivals openvino --roofline

    single is plain transformers on all cores of a host; tsp-dense, tsp-causal and ring are published alternatives. Each
    is run back to back with ours (kvr-s, or else kvr-p or kvr-e), in alternating order. The table shows the median
    ratio of these pairs with a 95% bootstrap interval, 3% wider on both sides for what another start of the same
    command changes: on a shared machine, speed drifts more within minutes than the strategies differ.
    """  # noqa: D301
    world = connect()

    def work() -> int:
        with ExitStack() as stack:
            return measure(stack)

    def measure(stack: ExitStack) -> int:
        logger = RankLogger(world.rank)
        on_root(world, lambda: check_writable(json_file, plot))
        lengths = together(world, lambda: parse_numbers("--contexts", contexts))
        slices = together(world, lambda: _parse_slices(lengths_of))
        opened = stack.enter_context(opened_model(world, model))
        loaded = load_everywhere(world, opened, dtype or default_dtype(device), device, kernels=kernels, logger=logger)
        links = open_links(world, loaded, transport, logger)
        patience = Patience(repeats, until, time_limit)
        contest = Contest(parse_names(strategies), lengths, patience, slices, lend)
        own = str(loaded.dtype).removeprefix("torch.")
        engines = open_rivals(stack, world, rivals, rivals_folder, opened, own, max(lengths) + 1)
        rows = bench(loaded, links, contest, logger.root, engines)
        stack.pop_all().close()  # engines would take time from what follows
        found = [row.as_json(rows) for row in rows] if world.rank == 0 else []
        if world.rank == 0:
            print_strategies(found, json_file, plot)
        if roofline:  # minutes more: what was measured so far is shown and written already
            rooflines = measure_rooflines(loaded, links, lengths)
            if world.rank == 0:
                print_rooflines(rooflines, found, json_file)
        return 0

    return run_guarded(world, work)


def _parse_slices(texts: Sequence[str]) -> dict[int, list[int]]:
    found = {}
    for text in texts:
        tokens, _, lengths = text.partition("=")
        parts = lengths.split("+")
        if not (tokens.isdigit() and all(part.isdigit() for part in parts)):
            raise ConfigError(f"--slices {text!r}: expected TOKENS=A+B+..., such as 4096=2480+1616")
        found[int(tokens)] = [int(part) for part in parts]
    return found
