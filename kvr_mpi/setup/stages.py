"""Which of a job's ranks this one meets, and for what, where a stage of a chain is several ranks.

The ranks that have the same heads, one of each stage, are a *lane*: between them everything goes as in a job whose
stages are one rank each, of a model with fewer heads. A lane's keys and values never meet another's. Within a stage
ranks meet in the sums of the model's layers (``model.stage``); what is decided is decided once for a whole chain, and
what is told, by the first rank of a stage.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from kvr_mpi.model import LoadedModel
from kvr_mpi.model.stage import Stage
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.prefill.one_prompt import wait_for_compute
from kvr_mpi.setup.rates import Say
from kvr_mpi.topology import Topology
from kvr_mpi.transport import Transport, gather_json, share_json
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.collectives import all_gather

# Sums are timed for one token and for so many, so often.
TIMED_TOKENS, TIMED_SUMS = 1024, 5


@dataclass(frozen=True, slots=True)
class JobRanks:
    """A job's ranks, as one of them meets them.

    world : all of them.
    lane : one of each stage, with the heads of this one; where a stage is one rank, all.
    peers : the ranks of this stage; None where it is one rank.
    stage : what the model asks of them.
    hosts : of this stage.
    """

    world: Transport
    lane: Transport
    peers: Transport | None = None
    stage: Stage | None = None
    hosts: int = 1

    @property
    def tells(self) -> bool:
        """Whether what becomes of this stage's documents is told by this rank."""
        return self.stage is None or self.stage.rank == 0

    def members_of(self, topology: Topology, chain: Transport) -> Transport:
        """Meet all ranks of this rank's chain; every rank calls this.

        Parameters
        ----------
        topology : Topology
            Of the lane.
        chain : Transport
            Those of the lane in the chain.
        """
        return chain if self.stage is None else self.world.split(topology.group_of(self.lane.rank))


def join_stages(world: Transport, control: Transport, topology: Topology, device: torch.device) -> JobRanks:
    """Meet the other ranks of the stage and of the lane; every rank calls this.

    Parameters
    ----------
    world, control : Transport
        All ranks of the job: over what carries tensors, and as they met.
    """
    if topology.ranks_per_stage == 1:
        return JobRanks(world, world)
    lane = world.split(topology.rank_in_stage(world.rank))
    number = topology.stage_number(world.rank)
    peers, words = world.split(number), control.split(number)
    warm_up(peers, device, every_pair=True)

    def tell(word: int) -> list[int]:
        return [int(each) for each in all_gather(words, torch.tensor([word], dtype=torch.int64))]

    stage = Stage(peers.rank, peers.size, peers.all_reduce, tell, is_out_of_memory)
    firsts: list[bool] = share_json(words, gather_json(words, words.local_rank == 0))
    return JobRanks(world, lane, peers, stage, hosts=max(1, sum(firsts)))


def describe_stages(ranks: JobRanks, loaded: LoadedModel, say: Say) -> None:
    """Time the sums of a stage, and say what they add to a prompt and to an answer; every rank calls this."""
    if ranks.stage is None:
        return
    hidden, layers = loaded.shape.hidden_size, len(loaded.shape.layers)
    seconds = [_sum_seconds(ranks.stage, tokens, hidden, loaded) for tokens in (TIMED_TOKENS, 1)]
    prompt_ms, token_ms = (1e3 * (2 * layers + 1) * each for each in seconds)
    across: list[int] = share_json(ranks.world, gather_json(ranks.world, ranks.hosts))
    where = ""
    if max(across) > 1:
        where = (
            f"; warning: {sum(hosts > 1 for hosts in across)} rank(s) are in stages that span several hosts, so these "
            f"sums go over the network: start a multiple of {ranks.stage.size} ranks on each host, numbered block-wise"
        )
    say(
        f"stages of {ranks.stage.size} ranks, each with {loaded.shape.layers[0].num_kv_heads} KV head(s) per layer: "
        f"sums were measured to take {prompt_ms:.1f} ms for {TIMED_TOKENS} prompt tokens, and {token_ms:.1f} ms per "
        f"decoded token{where}"
    )


def _sum_seconds(stage: Stage, tokens: int, hidden: int, loaded: LoadedModel) -> float:
    """Time of one sum of states (tokens, hidden_size)."""
    states = torch.zeros(tokens, hidden, dtype=loaded.dtype, device=loaded.device)
    times = []
    for _ in range(TIMED_SUMS + 1):
        began = time.perf_counter()
        stage.all_reduce(states)
        wait_for_compute(loaded.device)
        times.append(time.perf_counter() - began)
    return median(times[1:])
