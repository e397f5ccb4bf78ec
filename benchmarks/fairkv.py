"""What sharing heads out is worth: placements against each other and against the whole cache, on the same ranks.

Documents are prefilled and compressed as their job says, and then decoded in every way, a few steps each in turn. Turns
come in rounds of two, the second in the first's order turned round, so that of any two ways each goes first as often,
and neither drift nor what the other left in the processor's caches favors one. Attention is timed apart, on the same
caches, without the sums that follow it. Efficiency is mean over maximum: of each layer's loads on the ranks, summed
(sync), or of all layers' together (total, FairKV's eq. 5); predicted from the counts of keys, measured from times.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any, cast

import click
import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

from benchmarks.decode_turns import STEPS, PrefilledDocuments, TimedSums, Way
from benchmarks.options import (
    check_writable,
    json_option,
    patience_options,
    transport_option,
)
from benchmarks.pairs import Patience, Ratio, drift_of, ratio_of
from benchmarks.placement import place_with_copies
from benchmarks.tables import print_heads
from kvr_mpi.cli.environment import is_offline, read_environment
from kvr_mpi.cli.launch import run_guarded
from kvr_mpi.cli.log_lines import quiet_libraries
from kvr_mpi.cli.options import command, job_argument, parse_numbers, set_option
from kvr_mpi.compress.compression import Compression
from kvr_mpi.costs.decoding import Wave, step_seconds
from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.group import Group
from kvr_mpi.documents import Corpus
from kvr_mpi.documents.prompts import PromptText
from kvr_mpi.errors import ConfigError, CorpusError, DocumentError, counted
from kvr_mpi.fairkv.group import HeadGroup, PlaceHeads
from kvr_mpi.fairkv.placement import place_best_effort, place_in_proportion, place_statically, place_with_equal_copies
from kvr_mpi.job import JobSpec, load_job
from kvr_mpi.logs import RankLogger
from kvr_mpi.runtime.checks import check_job
from kvr_mpi.runtime.indexing import open_documents, scan_documents
from kvr_mpi.runtime.job_ranks import JobRanks
from kvr_mpi.runtime.loading import own_device
from kvr_mpi.runtime.prepare import prepare
from kvr_mpi.runtime.session import Machine, Session
from kvr_mpi.transport import Transport, gather_json, on_root, share_json, together
from kvr_mpi.transport.choose import TransportName, open_transport
from kvr_mpi.transport.mpi import connect
from kvr_mpi.tuning.cores import pinned
from kvr_mpi.tuning.decode_probe import attention_seconds, measure_decoding

GREEDY = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
# The first token, a turn that is not counted, a round, and one more, so that no answer ends.
LEAST_NEW_TOKENS = 2 + 3 * STEPS
# All ranks decode together, and what they would have chosen is forecast; nothing is stored.
SHARING = ("parallel.ranks_per_chain=all", "parallel.tensor_parallel=1", "decode.mode=auto", "output.kv=false")
SHA, APART = "SHA", "apart"
WHOLE = "whole, "
Floats = npt.NDArray[np.float64]


def placements(copies: int) -> dict[str, PlaceHeads]:
    """Name the ways to place heads; SHA is heads in order, as many on each rank (the first may have one more)."""
    return {
        SHA: place_statically,
        "best effort": place_best_effort,
        "equal copies": partial(place_with_equal_copies, copies=copies),
        "in proportion": partial(place_with_copies, copies=copies),
    }


def rank_loads(owners: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], ranks: int) -> npt.NDArray[np.float64]:
    """Keys that each rank has of a layer, (ranks,)."""
    return np.bincount(owners.ravel(), counts.ravel(), ranks).astype(np.float64)


@dataclass(frozen=True, slots=True)
class HeadsRow:
    """One way to decode the documents; times are of the slowest rank, step by step.

    way : a placement, or ``apart``: each rank its own documents; with "whole, " before it: not compressed.
    tokens, kept_tokens : of all prompts; of a KV head and a document, on average.
    step_s, best_s : median and least time of a step.
    compute_s : median processor time of a step without the sums over ranks.
    forecast_s : of a step, by what decides ``[decode] mode = "auto"``.
    attention_s : of a step, the sum over layers of the rank that took longest.
    measured, predicted : efficiency, by the times of attention and by the counts of keys.
    same_answers : documents whose tokens are those of ranks that decode their own; sums are added up in another order.
    whole_over_this, sha_over_this : ratios of steps, with intervals.
    compute_whole_over_this, compute_sha_over_this : of processor times.
    kv_bytes : that each rank holds.
    heads : of a layer that each rank computes, on average: every rank with a copy computes queries, keys and values.
    """

    way: str
    ranks: int
    documents: int
    tokens: int
    kept_tokens: float
    step_s: float
    best_s: float
    tokens_per_s: float
    compute_s: float
    forecast_s: float
    attention_s: float
    measured: dict[str, float]
    predicted: dict[str, float] | None
    same_answers: int
    whole_over_this: Ratio
    sha_over_this: Ratio
    compute_whole_over_this: Ratio
    compute_sha_over_this: Ratio
    kv_bytes: tuple[int, ...]
    heads: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what a table or file shows."""
        return asdict(self)


def efficiency(loads: Floats) -> dict[str, float]:
    """Of loads or times (layers, ranks)."""
    sync, total = loads.mean(1).sum() / loads.max(1).sum(), loads.sum(0).mean() / loads.sum(0).max()
    return {"sync": float(sync), "total": float(total)}


class _Contest:
    """All ways to decode the same documents, the whole ones and those compressed to one budget."""

    def __init__(
        self, session: Session, documents: PrefilledDocuments, compression: Compression, ranks: Transport
    ) -> None:
        self._session, self._documents, self._ranks = session, documents, ranks
        self.compression = compression
        self.places = placements(ranks.size - 1)
        begun: dict[str, Callable[[], Any]] = {
            WHOLE + SHA: partial(self._shared, self.places[SHA], None),
            WHOLE + APART: partial(self._apart, None),
        }
        begun |= {name: partial(self._shared, place, compression) for name, place in self.places.items()}
        begun[APART] = partial(self._apart, compression)
        self.ways = {name: Way(name, begin, ranks, session.loaded.device) for name, begin in begun.items()}

    def _shared(self, place: PlaceHeads, compression: Compression | None) -> DecodeBatch:
        sums: Any = TimedSums(self._ranks)
        return self._begin(HeadGroup(self._session.loaded, sums, place), compression)

    def _apart(self, compression: Compression | None) -> DecodeBatch:
        return self._begin(Group(self._session.loaded), compression)

    def _begin(self, group: Group, compression: Compression | None) -> DecodeBatch:
        documents = self._documents
        batch = DecodeBatch(self._session.loaded, GREEDY, stop=(), max_new_tokens=documents.new_tokens, group=group)
        pairs = zip(documents.prompts, documents.copies(compression), strict=True)
        for number, (prompt, prefill) in enumerate(pairs):
            batch.add(number, prefill, prompt.ids, 0)
        batch.begin()
        return batch

    def run(self, patience: Patience) -> None:
        """Let all take turns until enough is known of each."""
        began, draw, rounds = time.monotonic(), random.Random(0), 0  # the same on all ranks
        # Two turns a round; the answers' first token and the turn that is not counted went before.
        rounds_of_answer = (self._documents.new_tokens - 2 - STEPS) // (2 * STEPS)
        while not self._is_known(patience, began):
            if rounds % rounds_of_answer == 0:
                for way in self.ways.values():
                    way.begin()
            order = draw.sample(list(self.ways.values()), len(self.ways))
            for way in [*order, *reversed(order)]:
                way.turn()
            rounds += 1

    def _is_known(self, patience: Patience, began: float) -> bool:
        """Whether the ratios to both ways that others are compared with are known well enough."""
        ratios = [self._ratios(one, way) for one in (WHOLE + SHA, SHA) for way in self.ways if way != one]
        is_late = patience.time_limit_s is not None and time.monotonic() - began > patience.time_limit_s
        is_over = all(map(len, ratios)) and is_late
        return bool(share_json(self._ranks, is_over or all(map(patience.is_content, ratios))))

    def _ratios(self, one: str, other: str, *, computed: bool = False) -> list[float]:
        """Divide one way's time by another's, round by round (geometric mean of two turns)."""
        times = [self._slowest(self.ways[name], computed=computed) for name in (one, other)]
        logs = np.log(np.array(times[0]) / np.array(times[1])).reshape(-1, 2).mean(1)
        return [float(each) for each in np.exp(logs)]

    def _slowest(self, way: Way, *, computed: bool = False) -> list[float]:
        """Give the most of any rank, by turn."""
        return [max(each) for each in zip(*self._of_all(way.computed if computed else way.turns), strict=True)]

    def _of_all(self, mine: Any) -> list[Any]:
        """Tell all ranks what each has."""
        return list(share_json(self._ranks, gather_json(self._ranks, mine)))

    def drift(self) -> str | None:
        """Say that this machine's speed changed meanwhile."""
        return drift_of(self._slowest(self.ways[SHA]))

    def rows(self, times: tuple[float, float]) -> list[HeadsRow]:
        """Sum up; `times` as from `measure_decoding`."""
        return [self._row(way, times) for way in self.ways.values()]

    def _row(self, way: Way, times: tuple[float, float]) -> HeadsRow:
        loaded, ranks, batch = self._session.loaded, self._ranks, way.batch
        caches = [prefill.cache for prefill in batch.prefills]
        turns, computed = self._slowest(way), self._slowest(way, computed=True)
        attention = np.array(self._of_all(attention_seconds(loaded, caches, ranks))).T  # (layers, ranks)
        predicted, heads = None, [float(loaded.shape.layers[0].num_kv_heads)] * ranks.size
        if isinstance(batch.group, HeadGroup):
            kept = zip(batch.group.owners, batch.group.counts, strict=True)
            predicted = efficiency(np.array([rank_loads(own, counts, ranks.size) for own, counts in kept]))
            heads = self._of_all(
                statistics.mean(len(set(np.nonzero(own == ranks.rank)[1])) for own in batch.group.owners)
            )
        beside = self.ways[WHOLE + APART if way.name.startswith(WHOLE) else APART]
        ratios = {
            f"{prefix}{word}_over_this": ratio_of(self._ratios(one, way.name, computed=bool(prefix)))
            for prefix in ("", "compute_")
            for word, one in (("whole", WHOLE + SHA), ("sha", SHA))
        }
        return HeadsRow(
            way=way.name,
            ranks=ranks.size,
            documents=self._documents.number,
            tokens=sum(self._documents.tokens),
            kept_tokens=self._kept_tokens(way.name),
            step_s=statistics.median(turns),
            best_s=min(turns),
            tokens_per_s=self._documents.number / statistics.median(turns),
            compute_s=statistics.median(computed),
            forecast_s=self._forecast_s(way.name, times, None if predicted is None else predicted["sync"]),
            attention_s=float(attention.max(1).sum()),
            measured=efficiency(attention),
            predicted=predicted,
            same_answers=sum(self._of_all(sum(map(eq, batch.written, beside.batch.written)))),
            kv_bytes=tuple(self._of_all(sum(cache.nbytes for cache in caches))),
            heads=tuple(heads),
            **ratios,
        )

    def _kept_tokens(self, way: str) -> float:
        """Tokens that a KV head keeps of a document, on average."""
        kept_of = int if way.startswith(WHOLE) else self.compression.settings.kept_of
        return statistics.mean(map(kept_of, self._documents.tokens))

    def _forecast_s(self, way: str, times: tuple[float, float], efficiency: float | None) -> float:
        """Forecast a step in the middle of the answers, as `[decode] mode = "auto"` does."""
        session, answered = self._session, self._documents.new_tokens / 2
        assert session.costs is not None, "asked for by mode = 'auto'"
        hidden_bytes = session.loaded.shape.hidden_size * session.loaded.dtype.itemsize
        # So many new tokens that handing keys and values over, which is not timed here, is nothing a step.
        kept = self._kept_tokens(way) + answered
        wave = Wave(self._documents.number, self._ranks.size, kept, sys.maxsize, hidden_bytes)
        apart_s, shared_s = step_seconds(session.costs, wave, efficiency or 1.0, times)
        return apart_s if efficiency is None else shared_s


def bench_heads(
    spec: JobSpec,
    machine: Machine,
    corpus: Corpus,
    ranks: Transport,
    *,
    documents: int,
    budgets: Sequence[int],
    patience: Patience,
    logger: RankLogger,
) -> list[HeadsRow]:
    """Decode some of a job's documents in all ways that placement and compression leave; every rank calls this.

    Parameters
    ----------
    spec : JobSpec
        With [compress], and ``decode.mode = "auto"``.
    corpus : Corpus
    ranks : Transport
        What carries tensors between all ranks, every pair of them.
    documents : int
        How many at most, spread over the corpus.
    budgets : sequence of int
        Tokens that a KV head keeps on average, one after another; none: as the job says.
    patience : Patience
        How many rounds of all ways.

    Raises
    ------
    ConfigError
        If there is one rank, no [compress], heads that cannot be shared out, or answers too short to be timed.
    CorpusError
        If there are too few documents that are longer than the budget.
    """
    check_heads(spec, ranks.size)
    with pinned(ranks) as cores, torch.inference_mode():
        logger.root.info(f"{counted(ranks.size, 'rank')}, {counted(cores, 'core')} each")
        session = prepare(spec, machine, JobRanks(ranks, ranks), ranks, logger)
        if isinstance(session.sharing, str):
            architecture = session.loaded.shape.architecture
            raise ConfigError(
                f"--fairkv: the heads of {architecture} cannot be distributed over ranks: {session.sharing}"
            )
        compressions = together(ranks, lambda: _compressions(session, budgets))
        prompts = together(ranks, lambda: _sample(session, corpus, documents, compressions, ranks.size))
        together(ranks, lambda: _check_room(session, prompts, ranks))
        held = PrefilledDocuments(session, prompts, ranks, compressions[0])
        logger.root.info(f"{held.number} prompts of {min(held.tokens)} to {max(held.tokens)} tokens, prefilled")
        times = measure_decoding(
            session.loaded, ranks, held.number, lambda: HeadGroup(session.loaded, ranks, place_in_proportion)
        )
        began, rows = time.monotonic(), list[HeadsRow]()
        for number, compression in enumerate(compressions):
            contest = _Contest(session, held, compression, ranks)
            contest.run(patience.share(time.monotonic() - began, len(compressions) - number))
            rows += contest.rows(times)
            logger.root.info(f"{compression.describe()}: measured")
            if drift := contest.drift():
                logger.root.info(f"{SHA} {drift}")
    return rows


def check_heads(spec: JobSpec, ranks: int) -> None:
    """Refuse a job that no placement can be measured with, before anything is loaded.

    Raises
    ------
    ConfigError
        If there is one rank, no [compress], or answers are too short to be timed.
    """
    if ranks < 2:
        raise ConfigError("--fairkv compares ranks that share heads; start it on at least 2, such as mpirun -n 2")
    if spec.compress is None:
        raise ConfigError(
            "--fairkv: the job has no [compress], without which all heads keep the same; use --set "
            "compress.method=ada-snapkv --set compress.budget=512"
        )
    if spec.generation.max_new_tokens < LEAST_NEW_TOKENS:
        raise ConfigError(
            f"generation.max_new_tokens = {spec.generation.max_new_tokens}: too few steps to time; expected at least "
            f"{LEAST_NEW_TOKENS} with --fairkv"
        )


def _compressions(session: Session, budgets: Sequence[int]) -> list[Compression]:
    """Make one for each budget, the job's own if none is given."""
    assert session.compression is not None, "the job has [compress]"
    if not budgets:
        return [session.compression]
    settings = session.compression.settings
    found = []
    for budget in budgets:
        if budget < settings.always_kept:
            raise ConfigError(
                f"--budgets {budget}: less than the {settings.always_kept} tokens that every head keeps anyway; raise "
                f"it, or lower compress.window"
            )
        changed = settings.model_copy(update={"budget": budget})
        found.append(replace(session.compression, settings=changed))
    return found


def _sample(
    session: Session, corpus: Corpus, documents: int, compressions: Sequence[Compression], ranks: int
) -> list[PromptText]:
    """Read prompts that are compressed to every budget, of documents spread over the corpus."""
    source, share, found = (
        open_documents(session, corpus),
        range(len(corpus)),
        list[PromptText](),
    )
    why = "the corpus has no more"
    for number in share[:: max(1, len(share) // documents)]:
        if len(found) == documents:
            break
        try:
            prompts = source.request(source.read(number), 0).texts
        except DocumentError as error:
            why = str(error)
            continue
        if len(prompts) == 1 and all(one.window_of(prompts[0].tokens, prompts[0].text) for one in compressions):
            found += prompts
        else:
            why = "shorter than the budget, or split"
    if len(found) < ranks:
        raise CorpusError(
            f"--fairkv: found {counted(len(found), 'document')} longer than the budget and in one part, out of "
            f"{len(share)}; expected at least one for each of {ranks} ranks ({why})"
        )
    return found


def _check_room(session: Session, prompts: Sequence[PromptText], ranks: Transport) -> None:
    """Refuse more than this rank has memory for: what was prefilled, two whole caches, those of the compressed ways."""
    mine = sum(prompt.tokens + session.spec.generation.max_new_tokens for prompt in prompts[ranks.rank :: ranks.size])
    needed, free = (3 + len(placements(0)) + 1) * session.kv_bytes(mine), session.free_bytes[ranks.rank]
    if needed > free:
        raise ConfigError(
            f"--fairkv: up to {needed / 1e9:.1f} GB on rank {ranks.rank} for {len(prompts)} documents decoded in "
            f"all ways at once, {free / 1e9:.1f} GB free; choose fewer --documents, or shorter ones (prompt.max_tokens)"
        )


@command("fairkv")
@job_argument
@set_option
@transport_option
@click.option(
    "--budgets",
    "budget_list",
    default="",
    metavar="TOKENS,...",
    help="Tokens that a KV head keeps on average, one after the other.  [default: the job's]",
)
@click.option(
    "--documents",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Number of documents, spread over the corpus.",
)
@patience_options
@json_option
def main(
    job: Path,
    settings: tuple[str, ...],
    transport: str,
    budget_list: str,
    documents: int,
    repeats: int,
    until: float | None,
    time_limit: float | None,
    json_file: Path | None,
) -> int:
    """Compare ways to decode documents of JOB, compressed as its [compress] says, over all ranks.

    \b
    mpirun -n 2 python -m benchmarks fairkv jobs/demo.toml --set compress.method=ada-snapkv --set compress.budget=512

    KV heads are placed on the ranks in several ways; and each rank decodes its own documents.
    """  # noqa: D301
    world = connect()

    def read() -> list[Any]:
        check_writable(json_file)
        spec, _ = load_job(job, (*settings, *SHARING))
        check_heads(spec, world.size)
        check_job(spec, world.size, offline=is_offline())
        numbers = parse_numbers("--budgets", budget_list) if budget_list else []
        return [spec.model_dump_json(), numbers]

    def work() -> int:
        logger, machine = RankLogger(world.rank), read_environment()
        quiet_libraries(world.rank)
        text, budgets = share_json(world, on_root(world, read))
        spec = JobSpec.model_validate_json(text)
        listed = world.broadcast(on_root(world, lambda: scan_documents(spec).to_bytes()) or b"")
        device = own_device(world, spec.model.device)
        wanted = cast(TransportName, transport)
        links, reason = open_transport(world, wanted, device, decodes_together=True)
        logger.root.info(reason)
        rows = bench_heads(
            spec,
            machine,
            Corpus.from_bytes(listed),
            links,
            documents=documents,
            budgets=budgets,
            patience=Patience(repeats, until, time_limit),
            logger=logger,
        )
        if world.rank == 0:
            print_heads([row.as_json() for row in rows], json_file)
        return 0

    return run_guarded(world, work)
