"""What NCCL is like to those that use it through torch's process groups, among threads on pretended GPUs.

Messages of a pair go by order, on a stream of the pair's own, and so do the sums of a group. The first call over a pair
makes a connection, and blocks until the other side calls, too. Host memory is refused. A transfer is a kernel: it
begins when it is the first of its stream, what the stream it was posted from waits for has ended, and its GPU has room
for its blocks, holds them until the other side has begun, too, and only then ends.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from pretended_cuda import GpuTensor, PretendedCuda, Stream, grains

from kvr_mpi.transport.base import Request
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.nccl import NcclTransport, open_nccl

T = TypeVar("T")

# Multiprocessors of an H100, and the blocks that NCCL takes for a transfer over NVLink if nobody limits it.
MULTIPROCESSORS, BLOCKS = 132, 16
TIMEOUT_S = 20.0
NOT_SET = -(1 << 31)  # of an option of NCCL's
ALL = -1  # in the place of a peer: the whole group


class Options(SimpleNamespace):
    """Of a group."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace(max_ctas=NOT_SET))


class Transfer:
    """One side of a transfer, or of a sum: torch's Work."""

    def __init__(self, group: Group, tensor: GpuTensor, stream: Stream) -> None:
        self.group, self.network, self.tensor, self.stream = group, group.network, tensor, stream
        limit = group.options.config.max_ctas
        self.blocks = BLOCKS if limit == NOT_SET else min(BLOCKS, limit)
        gpus = self.network.gpus
        current = gpus.current_stream(tensor.device)
        self.after = list(current.after)
        self.behind = current.behind
        self.has_begun = self.has_ended = self.is_seen = False
        self.end = stream.record_event()

    def is_completed(self) -> bool:
        if self.network.failure is not None:
            return True  # as torch's: it says so by its exception only
        if self.group.rank in self.network.blind:
            return False
        if self.has_ended and not self.is_seen:
            self.is_seen = True
            self.network.gpus.handle(self.tensor.device, "event_synchronization", self.end.id)
        return self.has_ended

    def exception(self) -> Exception | None:
        return None if self.network.failure is None else RuntimeError(self.network.failure)

    def wait(self) -> None:
        """The current stream waits, not the host; but what is computed here is computed at once, and has to wait."""
        gpus = self.network.gpus
        current = gpus.current_stream(self.tensor.device)
        if current is not gpus._defaults.get(self.tensor.device.index) and not self.has_ended:
            current.after.append(self)
            gpus.handle(current.device, "event_wait", self.end.id, current.id)
        else:
            if not self.network.wait_for(lambda: self.has_ended or self.network.failure is not None):
                raise TimeoutError(f"rank {self.group.rank} waits for a transfer that nobody joins")
            self.end.wait(current)
            if current is gpus._defaults.get(self.tensor.device.index) and self.group.rank in self.network.blind:
                self.network.ahead[self.group.rank].append(current.behind - self.behind)

    def finish(self) -> None:
        """Leave its stream."""
        self.has_ended = True
        self.network.held[self.tensor.device.index] -= self.blocks * self.has_begun


class Network:
    """All links of a job, and how many multiprocessors its transfers hold.

    Parameters
    ----------
    pauses : callable
        Seconds that a rank rests before each of its transfers, so that runs differ in who is where when.

    Attributes
    ----------
    blind : set of int
        Ranks whose hosts see no transfer end.
    at_work : set of str
        Threads of ranks that prepare a model, or have begun with prompts.
    stuck : list of str
        Groups that were aborted while graphs had sums of theirs, by a thread that kept these graphs.
    late : list of str
        Pairs that connected after that: NCCL may then wait for transfers that wait for one of the two.
    ahead : dict
        By rank, while its host is blind, of each transfer that its computation waited for: the kernels launched before
        that for which the transfer itself did not have to wait.
    """

    def __init__(self, gpus: PretendedCuda, *, pauses: Callable[[], float] | None = None) -> None:
        self.gpus = gpus
        self.pauses = pauses
        self.lock = threading.Condition()
        self.connections: dict[tuple[Any, ...], set[int]] = defaultdict(set)  # the ranks that have called
        # By the group's name, source, destination and side; of a sum, both are the rank's own.
        self.queues: dict[tuple[str, int, int, str], deque[Transfer]] = defaultdict(deque)
        self.held: dict[int, int] = defaultdict(int)
        self.most_held: dict[int, int] = defaultdict(int)
        self.blind: set[int] = set()
        self.ahead: dict[int, list[int]] = defaultdict(list)
        self.groups: list[Group] = []
        self.at_work: set[str] = set()
        self.late: list[str] = []
        self.stuck: list[str] = []
        self.failure: str | None = None
        self.summed: list[tuple[torch.dtype, int]] = []  # of each sum on a rank: dtype and bytes

    def group(self, name: str, rank: int, size: int, options: Options) -> Group:
        """Stand in for ``ProcessGroupNCCL(...)``."""
        with self.lock:
            self.groups.append(Group(self, name, rank, size, options))
            return self.groups[-1]

    def wait_for(self, holds: Callable[[], bool]) -> bool:
        """Wait until something holds; returns false if no rank computes meanwhile, however slow the machine is."""
        with self.lock:
            before = -1
            while not holds() and before < self.gpus.made:
                before = self.gpus.made
                self.lock.wait_for(holds, TIMEOUT_S)
            return holds()

    def progress(self) -> None:
        """Begin what can begin, and end what all sides have begun, as long as anything moves."""
        moved = self.failure is None
        while moved:
            moved = False
            for queue in self.queues.values():
                first = queue[0] if queue else None
                if first and not first.has_begun and all(each.has_ended for each in first.after):
                    at = first.tensor.device.index
                    if self.held[at] + first.blocks <= MULTIPROCESSORS:
                        first.has_begun = moved = True
                        self.held[at] += first.blocks
                        self.most_held[at] = max(self.most_held[at], self.held[at])
            for name, source, dest, side in list(self.queues):
                if side == "send":
                    sides = [self.queues[name, source, dest, each] for each in ("send", "receive")]
                elif side == "sum" and source == 0:
                    size = self.queues[name, 0, 0, "sum"][0].group.size if self.queues[name, 0, 0, "sum"] else 1
                    sides = [self.queues[name, rank, rank, "sum"] for rank in range(size)]
                else:
                    continue
                if all(each and each[0].has_begun for each in sides):
                    moved |= self._move(*(each.popleft() for each in sides), is_sum=side == "sum")
        self.lock.notify_all()

    def _move(self, first: Transfer, *others: Transfer, is_sum: bool) -> bool:
        for other in others:
            if first.tensor.nbytes != other.tensor.nbytes:
                self.failure = f"{first.tensor.nbytes} bytes are sent and {other.tensor.nbytes} received"
                return False
        held = [each.tensor.on_cpu for each in (first, *others)]
        found = sum(held[1:], start=held[0].clone()) if is_sum else held[0]
        for one in (first, *others):
            one.tensor.on_cpu.copy_(found)
            one.finish()
        return True


class Group:
    """A rank's end of a process group."""

    def __init__(self, network: Network, name: str, rank: int, size: int, options: Options) -> None:
        self.network, self.name, self.rank, self.size, self.options = network, name, rank, size, options
        self.ended, self.recorded = "", 0  # sums in graphs
        self.forwards: list[bool] = []  # of each send, whether it was begun beside the computation
        self._streams: dict[int, Stream] = {}
        self._connected: set[int] = set()

    def send(self, tensors: list[torch.Tensor], dest: int, tag: int) -> Transfer:
        transfer = self._begin(tensors, dest, "send", self.rank, dest)
        gpu = self.network.gpus
        current = gpu.current_stream(transfer.tensor.device)
        self.forwards.append(current is not gpu._defaults.get(transfer.tensor.device.index))
        return transfer

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Transfer:
        return self._begin(tensors, source, "receive", source, self.rank)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        if (graph := self.network.gpus._state.graph) is not None:
            graph.sums.append((self, tensors[0]))
            self.recorded += 1
            return SimpleNamespace(wait=lambda: None)
        self.network.summed.append((tensors[0].dtype, tensors[0].nbytes))
        return self._begin(tensors, ALL, "sum", self.rank, self.rank)

    def shutdown(self) -> None:
        self.ended = self.ended or "shut down"

    def forget_sum(self) -> None:
        with self.network.lock:
            self.recorded -= 1
            self.network.lock.notify_all()

    def abort(self) -> None:
        """End this rank's transfers, which fill their tensors with anything; then wait for graphs to be destroyed."""
        network = self.network
        with network.lock:
            self.ended = "aborted"
            for (name, source, dest, side), queue in network.queues.items():
                if name == self.name and self.rank == (source if side == "send" else dest):
                    for transfer in queue:
                        transfer.finish()
                    queue.clear()
            network.progress()
            if not network.lock.wait_for(lambda: not self.recorded, TIMEOUT_S):
                network.stuck.append(self.name)

    def _begin(self, tensors: list[torch.Tensor], peer: int, what: str, source: int, dest: int) -> Transfer:
        network, gpus = self.network, self.network.gpus
        (tensor,) = tensors
        if self.ended:
            raise RuntimeError("NCCL communicator was aborted")
        if not isinstance(tensor, GpuTensor):
            raise RuntimeError("No backend type associated with device type cpu")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        self._connect(peer)
        if network.pauses is not None:
            time.sleep(network.pauses())
        stream = self._streams.get(peer)
        if stream is None:
            stream = self._streams[peer] = Stream(gpus, tensor.device)
        current = gpus.current_stream(tensor.device)
        current.record_event().wait(stream)
        there: set[int] = grains(tensor.on_cpu)
        gpus.access(stream, there if what == "send" else set(), set() if what == "send" else there, f"nccl {what}")
        with network.lock:
            transfer = Transfer(self, tensor, stream)
            network.queues[self.name, source, dest, what].append(transfer)
            network.progress()
        return transfer

    def _connect(self, peer: int) -> None:
        if peer in self._connected:
            return
        low, high = sorted((self.rank, peer)) if peer != ALL else (ALL, ALL)
        if threading.current_thread().name in self.network.at_work:
            self.network.late.append(f"{self.name}: {self.rank} and {peer}")
        with self.network.lock:
            there = self.network.connections[self.name, low, high]
            there.add(self.rank)
            self.network.lock.notify_all()
        if not self.network.wait_for(lambda: len(there) == (self.size if peer == ALL else 2)):
            raise TimeoutError(f"rank {self.rank} waits for a connection with rank {peer} that nobody makes")
        self._connected.add(peer)


class HostOnly(LocalTransport):
    """The control channel of ranks on GPUs, which refuses GPU memory unless it is staged, as ``MpiTransport`` does."""

    stages = False

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Request:
        return super().isend(self._on_host(tensor), dest, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        return super().irecv(self._on_host(tensor), source, tag)

    def split(self, color: int) -> HostOnly:
        some = super().split(color)
        return HostOnly(some._hub, some.rank)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, GpuTensor) and not self.stages:
            raise TypeError("GPU memory is passed to the control channel")
        return tensor.on_cpu if isinstance(tensor, GpuTensor) else tensor


def run_on_gpus(size: int, network: Network, work: Callable[[NcclTransport], T]) -> list[T]:
    """Run `work` on so many threads, each a rank with a GPU, over the transport's own code.

    Raises
    ------
    TimeoutError
        If they stand still.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    def rank(local: LocalTransport) -> T:
        device = torch.device("cuda", local.rank)
        torch.cuda.set_device(device)
        return work(open_nccl(HostOnly(local._hub, local.rank), device))

    def all_ranks() -> None:
        try:
            found.extend(run_local(size, rank))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=all_ranks, daemon=True, name="all ranks")
    thread.start()
    before = -1
    while thread.is_alive() and before < network.gpus.made:
        before = network.gpus.made
        thread.join(2 * TIMEOUT_S)
    if thread.is_alive():
        faulthandler.dump_traceback()
        raise TimeoutError(f"{size} ranks stand still: none has computed for {2 * TIMEOUT_S} s")
    if failed:
        raise failed[0]
    return found


def installed(monkeypatch: pytest.MonkeyPatch, network: Network) -> Network:
    """Let torch.distributed make this network's groups where it is asked for NCCL's."""

    def make(store: str, rank: int, size: int, options: Options) -> Group:
        return network.group(store, rank, size, options)

    for module in ("nccl", "forwarder"):  # many ranks that look often take the processor from each other
        monkeypatch.setattr(f"kvr_mpi.transport.{module}.PAUSE_S", 1e-3)
    monkeypatch.setattr("kvr_mpi.transport.forwarder.SPINS", 2)
    make.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", make, raising=False)
    monkeypatch.setattr(torch.distributed, "PrefixStore", lambda name, store: name)
    return network
