"""The communicators of a job: all ranks, the chain, the tensor-parallel group, and the lane.

A *lane* consists of the ranks with the same heads, one from each group. Its ranks communicate as in a job without
groups, with a model that has fewer heads; keys and values never leave their lane. The ranks of a group communicate in
the all-reduces of the model's layers (``model.tp_group``). Decisions are made once per chain, and only the first rank
of a group logs.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.errors import counted
from kvr_mpi.logs import RankLogger
from kvr_mpi.model.tp_group import TensorParallelGroup
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.topology import Topology, others_after, others_before, place_in_group
from kvr_mpi.transport import Transport, gather_json, share_json
from kvr_mpi.transport.base import FixedTag, Request
from kvr_mpi.transport.choose import warm_up_sums
from kvr_mpi.transport.collectives import all_gather
from kvr_mpi.transport.nccl import NcclTransport

# Interval between checks for failures of other ranks.
LOOK_S = 5e-3


@dataclass(frozen=True, slots=True)
class JobRanks:
    """A job's ranks from the point of view of one of them.

    world : all ranks.
    lane : the ranks with this rank's heads, one from each group; all ranks without groups.
    peers : the ranks of this group; None without groups.
    tp_group : the group as the model uses it.
    hosts : number of hosts of this group.
    """

    world: Transport
    lane: Transport
    peers: Transport | None = None
    tp_group: TensorParallelGroup | None = None
    hosts: int = 1

    @property
    def tells(self) -> bool:
        """Whether this rank reports for its tensor-parallel group."""
        return self.tp_group is None or self.tp_group.rank == 0


def join_groups(world: Transport, control: Transport, topology: Topology, device: torch.device) -> JobRanks:
    """Make transports for the tensor-parallel group and the lane; every rank calls this.

    world, control : all ranks of the job: the transport for tensors, and that from `mpi.connect`.
    """
    if topology.tensor_parallel == 1:
        return JobRanks(world, world)
    number, part = place_in_group(world.rank, topology.tensor_parallel)
    lane = world.split(part)
    peers, words = world.split(number), control.split(number)
    warm_up_sums(peers, device)

    def tell(word: int) -> list[int]:
        return [int(each) for each in all_gather(words, torch.tensor([word], dtype=torch.int64))]

    watch = _Watch(words, peers) if isinstance(peers, NcclTransport) else None
    how: tuple[Any, ...] = (tell, is_out_of_memory)
    if isinstance(peers, NcclTransport) and watch is not None:
        how = (watch.tell, is_out_of_memory, watch.hears, peers.keep_graph)
    tp_group = TensorParallelGroup(peers.rank, peers.size, peers.all_reduce, *how)
    firsts: list[bool] = share_json(words, gather_json(words, words.local_rank == 0))
    return JobRanks(world, lane, peers, tp_group, hosts=max(1, sum(firsts)))


class _Watch:
    """The status exchange of a tensor-parallel group whose GPUs all-reduce without their hosts.

    A failed rank joins no further all-reduce, so the other GPUs, and the hosts that wait for them, would hang. A thread
    therefore polls for the next status word of each rank, and aborts the all-reduces when one reports a failure.
    """

    def __init__(self, words: Transport, sums: NcclTransport) -> None:
        self._words, self._sums = words, sums
        self._coming: dict[int, tuple[torch.Tensor, Request]] = {}
        self._has_heard, self._lock, ended = False, threading.Lock(), threading.Event()
        self._failure: BaseException | None = None  # of the thread
        threading.Thread(target=_look, args=(weakref.ref(self), ended), daemon=True, name="watch").start()
        weakref.finalize(self, ended.set)

    def hears(self) -> bool:
        """Return whether another rank has reported a failure; post the receives of status words first."""
        with self._lock:
            self._listen()
        if self._failure is not None:
            raise self._failure
        return self._has_heard

    def look(self) -> None:
        """Abort the all-reduces if another rank has failed; `hears` raises an error of this thread."""
        try:
            with self._lock:
                if not self._has_heard and any(request.test() and int(word) for word, request in self._coming.values()):
                    self._has_heard = True
                    self._sums.abort_sums()
        except BaseException as error:
            self._failure = error

    def tell(self, word: int) -> list[int]:
        """Exchange status words; after a failure, prepare for new all-reduces."""
        with self._lock:
            self._listen()
            coming, self._coming = self._coming, {}
        mine, rank = torch.tensor([word], dtype=torch.int64), self._words.rank
        sends = [self._words.isend(mine, dest, FixedTag.GATHER) for dest in others_after(rank, self._words.size)]
        for request in [*sends, *(request for _, request in coming.values())]:
            request.wait()
        found = {rank: word} | {source: int(theirs) for source, (theirs, _) in coming.items()}
        if any(found.values()):
            if not self._has_heard:
                self._sums.abort_sums()
            self._sums.renew_sums()
            self._has_heard = False
        return [found[each] for each in sorted(found)]

    def _listen(self) -> None:
        """Post the receives of the other ranks' next words."""
        if not self._coming:
            for source in others_before(self._words.rank, self._words.size):
                with torch.inference_mode(False):  # the thread and `tell` use it outside of inference
                    word = torch.zeros(1, dtype=torch.int64)
                self._coming[source] = word, self._words.irecv(word, source, FixedTag.GATHER)


def _look(watch: weakref.ref[_Watch], ended: threading.Event) -> None:
    while not ended.wait(LOOK_S) and (it := watch()) is not None:
        it.look()
        del it


def warn_of_hosts(ranks: JobRanks, logger: RankLogger) -> None:
    """Warn of tensor-parallel groups on several hosts, whose all-reduces are slow; every rank calls this."""
    across: list[int] = share_json(ranks.world, gather_json(ranks.world, ranks.hosts))
    if max(across) > 1:
        logger.warning(
            f"{counted(sum(hosts > 1 for hosts in across), 'rank')} in tensor-parallel groups on several "
            f"hosts, so all-reduces go over the network: start a multiple of the group's size on each host, numbered "
            f"block-wise"
        )
