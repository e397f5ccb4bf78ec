"""Distribution of documents over the chains of a job, decided by rank 0.

A job has one round for each chain length, the longest first. So a rank joins ever shorter chains, and ranks cannot wait
for each other in a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvr_mpi.documents import Corpus
from kvr_mpi.runtime.checks import lay_out
from kvr_mpi.runtime.session import Session
from kvr_mpi.schedule.assignment import count_tokens, describe_schedule, plan_documents
from kvr_mpi.schedule.placement import Order, deal
from kvr_mpi.topology import Topology
from kvr_mpi.transport import on_root, share_json

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Round:
    """Chains of the same length, with the documents that they start with.

    topology : the chains.
    lists : document numbers for each chain.
    works : work of each document of the corpus, by number: characters or predicted milliseconds.
    """

    topology: Topology
    lists: list[Numbers]
    works: Numbers

    @property
    def work(self) -> int:
        """Work of all documents."""
        return sum(int(self.works[one].sum()) for one in self.lists)


def make_rounds(session: Session, corpus: Corpus, todo: Numbers) -> tuple[list[Round], dict[int, str], float | None]:
    """Distribute documents over chains: by the plan, or evenly by work over chains of the same length.

    Every rank calls this, with the same documents, and gets the same result; rank 0 makes the plan.

    Returns the rounds; the documents that no chain takes, with the reason if they fit on none; and the predicted time
    of the job, if it was planned.
    """
    world, lanes = session.ranks.world, session.ranks.lane.size
    is_bad = corpus.bad_among(todo)
    refused, todo = dict.fromkeys(todo[is_bad].tolist(), ""), todo[~is_bad]
    if session.costs is None or not session.spec.planned:
        topology = lay_out(session.spec, world.size).by_group
        return [_round(corpus, todo, topology, session.spec.documents.order)], refused, None
    session.logger.root.info("plan: counting tokens")
    numbers = {corpus.id(number): number for number in todo.tolist()}
    mine = (corpus.read(number) for number in todo[world.rank :: world.size].tolist())
    tokens = count_tokens(session.loaded.tokenizer, mine, world)
    plan = share_json(world, on_root(world, lambda: _planned(session, numbers, tokens, lanes)))
    rounds = []
    for length, lists, pairs in plan["rounds"]:
        works = np.ones(len(corpus), np.int64)
        for number, work in pairs:
            works[number] = work
        rounds.append(Round(Topology(lanes, length), [np.array(one, np.int64) for one in lists], works))
    return rounds, refused | dict(plan["refused"]), plan["predicted_s"]


def _round(corpus: Corpus, todo: Numbers, topology: Topology, order: Order) -> Round:
    """Distribute documents over chains of the same length, with the same work for each chain."""
    works = corpus.works()
    # All questions about a document go to the same chain, which loads it once.
    about = todo // (len(corpus.prompts) or 1)
    documents, group = np.unique(about, return_inverse=True)
    sizes = np.bincount(group, works[todo], len(documents)).astype(np.int64)
    chains = deal(sizes, topology.chains)[group]
    bits = np.frexp(sizes.astype(np.float64))[1][group]  # the bit length of the work
    keys = {"longest": -bits, "shortest": bits, "given": np.zeros_like(bits)}[order]
    ordered = np.lexsort((todo, keys))
    return Round(topology, [todo[ordered[chains[ordered] == chain]] for chain in range(topology.chains)], works)


def _planned(session: Session, numbers: Mapping[str, int], tokens: Mapping[str, int], ranks: int) -> dict[str, object]:
    """Plan chains of different lengths; `tokens` has the length of each document by id."""
    plan = plan_documents(session.spec, [(name, tokens[name]) for name in numbers], ranks, session.forecast())
    for line in describe_schedule(plan):
        session.logger.root.info(f"plan: {line}")
    rounds = []
    for length in plan.chain_lengths:
        topology = Topology(ranks, length)
        lists: list[list[int]] = [[] for _ in range(topology.chains)]
        works: list[tuple[int, int]] = []
        for place in sorted(plan.placements, key=lambda place: place.start_s):
            if place.ranks == length:
                number = numbers[place.id]
                lists[topology.chain_color(place.first_rank)].append(number)
                works.append((number, max(1, round(1e3 * (place.end_s - place.start_s)))))
        rounds.append((length, lists, works))
    refused = [(numbers[name], why) for name, _, why in plan.does_not_fit]
    return {"rounds": rounds, "refused": refused, "predicted_s": plan.makespan_s}
