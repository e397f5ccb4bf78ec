"""What NCCL is like to those that use it through torch's process groups, among threads on pretended GPUs.

Messages of a pair go by order, on a stream of the pair's own. The first call over a pair makes a connection, and blocks
until the other side calls, too. Host memory is refused. A transfer is a kernel: it begins when it is the first of its
stream and its GPU has room for its blocks, holds them until the other side has begun, too, and only then ends.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from pretended_cuda import GpuTensor, PretendedCuda, Stream, grains

from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.nccl import NcclTransport, open_nccl

T = TypeVar("T")

# Multiprocessors of an H100, and the blocks that NCCL takes for a transfer over NVLink if nobody limits it.
MULTIPROCESSORS, BLOCKS = 132, 16
TIMEOUT_S = 20.0
NOT_SET = -(1 << 31)  # of an option of NCCL's


class Options(SimpleNamespace):
    """Of a group."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace(max_ctas=NOT_SET))


class Transfer:
    """One side of a transfer: torch's Work."""

    def __init__(self, network: Network, rank: int, tensor: GpuTensor, stream: Stream, blocks: int) -> None:
        self.network, self.rank, self.tensor, self.stream, self.blocks = network, rank, tensor, stream, blocks
        self.has_begun = self.has_ended = False
        self.end: Any = None

    def is_completed(self) -> bool:
        if self.network.failure is not None:
            return True  # as torch's: it says so by its exception only
        if self.has_ended and self.end is None:
            self.end = self.stream.record_event()
            self.end.synchronize()  # the host has seen it
        return self.has_ended

    def exception(self) -> Exception | None:
        return None if self.network.failure is None else RuntimeError(self.network.failure)

    def wait(self) -> None:
        """The current stream waits: without a host in between only for what has ended."""
        if not self.has_ended:
            self.network.gpus.faults.append(f"rank {self.rank} lets its stream wait for NCCL's")
        if self.end is not None:
            self.end.wait(self.network.gpus.current_stream(self.tensor.device))


class Network:
    """All links of a job, and how many multiprocessors its transfers hold.

    Parameters
    ----------
    pauses : callable
        Seconds that a rank rests before each of its transfers, so that runs differ in who is where when.
    """

    def __init__(self, gpus: PretendedCuda, *, pauses: Callable[[], float] | None = None) -> None:
        self.gpus = gpus
        self.pauses = pauses
        self.lock = threading.Lock()
        self.connections: dict[tuple[int, int, int], threading.Barrier] = {}
        self.queues: dict[tuple[int, int, int, str], deque[Transfer]] = defaultdict(deque)
        self.held: dict[int, int] = defaultdict(int)
        self.most_held: dict[int, int] = defaultdict(int)
        # Bytes of all messages, as they were begun: by group, source, destination and side.
        self.orders: dict[tuple[int, int, int, str], list[int]] = defaultdict(list)
        self.groups: list[Group] = []
        self.failure: str | None = None

    def group(self, store: Any, rank: int, size: int, options: Options) -> Group:
        """Stand in for ``ProcessGroupNCCL(...)``."""
        with self.lock:
            number = sum(group.rank == rank for group in self.groups)
            self.groups.append(Group(self, number, rank, size, options))
            return self.groups[-1]

    def progress(self) -> None:
        """Begin what can begin, and end what both sides have begun, as long as anything moves."""
        moved = self.failure is None
        while moved:
            moved = False
            for queue in self.queues.values():
                first = queue[0] if queue else None
                if first and not first.has_begun and self.held[first.rank] + first.blocks <= MULTIPROCESSORS:
                    first.has_begun = moved = True
                    self.held[first.rank] += first.blocks
                    self.most_held[first.rank] = max(self.most_held[first.rank], self.held[first.rank])
            for link in [key[:3] for key in self.queues if key[3] == "send"]:
                sends, receives = self.queues[(*link, "send")], self.queues[(*link, "receive")]
                if sends and receives and sends[0].has_begun and receives[0].has_begun:
                    moved = self._move(sends.popleft(), receives.popleft())

    def _move(self, sent: Transfer, received: Transfer) -> bool:
        if sent.tensor.nbytes != received.tensor.nbytes:
            self.failure = f"{sent.tensor.nbytes} bytes are sent and {received.tensor.nbytes} received"
            return False
        received.tensor.on_cpu.copy_(sent.tensor.on_cpu)
        for one in (sent, received):
            self.held[one.rank] -= one.blocks
            one.has_ended = True
        return True


class Group:
    """A rank's end of a process group."""

    def __init__(self, network: Network, number: int, rank: int, size: int, options: Options) -> None:
        self.network, self.number, self.rank, self.size, self.options = network, number, rank, size, options
        self.ended = ""
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

    def shutdown(self) -> None:
        self.ended = "shut down"

    def abort(self) -> None:
        self.ended = "aborted"

    def _begin(self, tensors: list[torch.Tensor], peer: int, what: str, source: int, dest: int) -> Transfer:
        network, gpus = self.network, self.network.gpus
        (tensor,) = tensors
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
            stream.is_nccl = True
        event = gpus.current_stream(tensor.device).record_event()
        event.wait(stream)
        there = grains(tensor.on_cpu)
        gpus.access(stream, there if what == "send" else set(), there if what == "receive" else set(), f"nccl {what}")
        limit = self.options.config.max_ctas
        blocks = BLOCKS if limit == NOT_SET else min(BLOCKS, limit)
        transfer = Transfer(network, self.rank, tensor, stream, blocks)
        with network.lock:
            network.queues[self.number, source, dest, what].append(transfer)
            network.orders[self.number, source, dest, what].append(tensor.nbytes)
            network.progress()
        return transfer

    def _connect(self, peer: int) -> None:
        if peer in self._connected:
            return
        low, high = sorted((self.rank, peer))
        with self.network.lock:
            barrier = self.network.connections.setdefault((self.number, low, high), threading.Barrier(2))
        try:
            barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise TimeoutError(f"rank {self.rank} waits for a connection with rank {peer} that nobody makes") from None
        self._connected.add(peer)


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
        return work(open_nccl(local, device))

    def all_ranks() -> None:
        try:
            found.extend(run_local(size, rank))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=all_ranks, daemon=True, name="all ranks")
    thread.start()
    thread.join(4 * TIMEOUT_S)
    if thread.is_alive():
        raise TimeoutError(f"{size} ranks stand still after {4 * TIMEOUT_S} s")
    if failed:
        raise failed[0]
    return found


def installed(monkeypatch: pytest.MonkeyPatch, network: Network) -> Network:
    """Let torch.distributed make this network's groups where it is asked for NCCL's."""

    def make(store: Any, rank: int, size: int, options: Options) -> Group:
        return network.group(store, rank, size, options)

    for module in ("nccl", "forwarder"):  # many ranks that look often take the processor from each other
        monkeypatch.setattr(f"kvr_mpi.transport.{module}.PAUSE_S", 1e-3)
    monkeypatch.setattr("kvr_mpi.transport.forwarder.SPINS", 2)
    make.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", make, raising=False)
    return network
