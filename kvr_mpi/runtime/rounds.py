"""Distribution of documents over the chains of a job, decided by rank 0.

A job has one round for each chain length, the longest first. So a rank joins ever shorter chains, and ranks cannot wait
for each other in a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvr_mpi.documents import Corpus
from kvr_mpi.plain import from_plain
from kvr_mpi.preflight.checks import lay_out
from kvr_mpi.report.log import Log
from kvr_mpi.schedule.placement import Order, deal, order_key
from kvr_mpi.schedule.plan import count_tokens, describe_schedule, plan_documents
from kvr_mpi.setup.job_ranks import JobRanks
from kvr_mpi.setup.job_setup import JobSetup
from kvr_mpi.topology import Topology
from kvr_mpi.transport import on_root, share_json


@dataclass(frozen=True, slots=True)
class Round:
    """Chains of the same length, with the documents that they start with.

    topology : the chains.
    lists : document numbers for each chain.
    works : work of each document: characters or predicted milliseconds.
    """

    topology: Topology
    lists: list[list[int]]
    works: dict[int, int]


@dataclass(frozen=True, slots=True)
class Shares:
    """The documents that the chains start with.

    refused : documents that cannot be read or fit on no chain, with the reason; no chain takes them.
    predicted_s : predicted time of the job, if it was planned.
    """

    rounds: list[Round]
    refused: dict[int, str] = field(default_factory=dict)
    predicted_s: float | None = None

    @property
    def slots(self) -> int:
        """Number of counters needed."""
        return sum(len(part.lists) for part in self.rounds)

    @property
    def work(self) -> int:
        """Total work of all documents."""
        return sum(sum(part.works.values()) for part in self.rounds)


def share_out(prepared: JobSetup, corpus: Corpus, todo: Sequence[int], ranks: JobRanks, log: Log) -> Shares:
    """Distribute documents over chains: by the plan, or evenly by work over chains of the same length.

    Every rank calls this; rank 0 decides, and all ranks receive the same shares.
    """
    world, lanes = ranks.world, ranks.lane.size
    unreadable = {number: why for number in todo if (why := corpus.entries[number].error) is not None}
    todo = [number for number in todo if number not in unreadable]
    tokens = None
    if prepared.costs is not None and prepared.spec.planned:
        log.root("plan: counting tokens")
        mine = (corpus.read(number) for number in todo[world.rank :: world.size])
        tokens = count_tokens(prepared.loaded.tokenizer, mine, world)

    def decide() -> dict[str, Any]:
        if tokens is not None:
            shares = _planned(prepared, corpus, todo, tokens, lanes, log)
        else:
            topology = lay_out(prepared.spec, world.size).by_group
            shares = Shares([_round(corpus, todo, topology, prepared.spec.documents.order)])
        return asdict(replace(shares, refused=unreadable | shares.refused))

    return from_plain(Shares, share_json(world, on_root(world, decide)))


def _round(corpus: Corpus, todo: Sequence[int], topology: Topology, order: Order) -> Round:
    """Distribute documents over chains of the same length, with the same work for each chain."""
    works = {number: max(1, corpus.entries[number].chars) for number in todo}
    # All questions about a document go to the same chain, which loads it once.
    together: dict[tuple[int, int], list[int]] = {}
    for number in todo:
        together.setdefault((corpus.entries[number].file, corpus.entries[number].place), []).append(number)
    groups = {members[0]: members for members in together.values()}
    sizes = {first: sum(works[number] for number in members) for first, members in groups.items()}
    lists = deal(list(sizes.items()), topology.chains)
    ordered = [sorted(one, key=lambda first: (order_key(order, sizes[first]), first)) for one in lists]
    return Round(topology, [[number for first in one for number in groups[first]] for one in ordered], works)


def _planned(
    prepared: JobSetup, corpus: Corpus, todo: Sequence[int], tokens: Mapping[str, int], ranks: int, log: Log
) -> Shares:
    """Plan chains of different lengths; `tokens` has the length of each document by id."""
    numbers = {corpus.entries[number].id: number for number in todo}
    texts = [(name, tokens[name]) for name in numbers]
    plan = plan_documents(prepared.spec, texts, ranks, prepared.forecast())
    for line in describe_schedule(plan):
        log.root(f"plan: {line}")
    rounds = []
    for length in plan.chain_lengths:
        topology = Topology(ranks, length)
        part = Round(topology, [[] for _ in range(topology.chains)], {})
        for place in sorted(plan.placements, key=lambda place: place.start_s):
            if place.ranks == length:
                number = numbers[place.id]
                part.lists[topology.chain_color(place.first_rank)].append(number)
                part.works[number] = max(1, round(1e3 * (place.end_s - place.start_s)))
        rounds.append(part)
    return Shares(rounds, {numbers[name]: why for name, _, why in plan.does_not_fit}, plan.makespan_s)
