"""Ranks in process groups of torch.distributed, with NCCL between GPUs.

MPI remains the control channel: it distributes the rendezvous address and carries barriers and small messages. Only
tensors are sent with torch.distributed. There is no default process group, so global state does not change.

NCCL has no tags: a message matches the receive that was posted first. NCCL uses one stream for both directions of a
pair, so a receive posted early would block a send to the same rank. Therefore messages to higher ranks and messages to
lower ranks have separate groups.

An NCCL transfer is a kernel that starts after the work queued in the current stream, and occupies part of the GPU until
its peer joins. So transfers use few thread blocks, and a chain posts receives one layer ahead. Waiting for a transfer
makes the current stream wait, not the host. Groups are shut down when their transports are garbage-collected, or at
exit. If transfers are still in progress then, after a failure, groups are aborted, since the peers may never join.

Sums can be recorded in CUDA graphs. NCCL does not let go of a communicator, aborted or not, before all graphs with its
sums are destroyed (`commDestroySync`). So aborting does not wait where there are graphs, and all graphs are reset
before a group is replaced or ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import TransportError
from kvr_mpi.transport.base import Request, Transport, as_bytes, gather_json, share_json, together
from kvr_mpi.transport.collectives import in_float32

if TYPE_CHECKING:
    import torch

# After this, NCCL ends the process. The deadlines of `Forwarder` are shorter, and name the message; but a host that
# waits for its GPU, such as for the sums of a tensor-parallel group, has no other deadline.
TIMEOUT = timedelta(hours=2)
RENDEZVOUS_TIMEOUT = timedelta(seconds=60)
# How long a rank waits for another to connect to it, which may still connect to others, or load libraries.
CONNECT_TIMEOUT = timedelta(minutes=10)
PAUSE_S = 5e-5
# How long transfers may take to end after the last rank has joined them.
END_S = 1.0
# Thread blocks per transfer, and so the multiprocessors that it takes from computation; NCCL rounds to a power of two.
# 7 peers in both directions take 56 of an H100's 132. NCCL_MAX_CTAS overrides it.
MAX_BLOCKS = 4


class _GpuWork:
    """A transfer on NCCL's stream, and its tensor."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work: Any = work
        self._tensor: torch.Tensor | None = tensor

    def test(self) -> bool:
        work = self._work
        if work is not None and work.is_completed():
            self._check(work)
            work.wait()  # it releases the tensors
            self._work = self._tensor = None
        return self._work is None

    def _check(self, work: Any) -> None:
        """Raise the error of a failed transfer, which NCCL counts as completed.

        Groups are not aborted first: aborting them one after another can hang, while `Transport.abort` ends the job.
        """
        try:
            failure = work.exception()
        except Exception as error:
            failure = error
        if failure is not None:
            raise TransportError(
                f"NCCL: {failure}; the rank at the other end, or its link, has failed: check the last lines of its log"
            )

    def wait(self) -> None:
        if (work := self._work) is not None:  # another thread may see it end meanwhile
            work.wait()


class _Groups:
    """The process groups of the job: one for messages to higher ranks, one to lower ranks, and those for sums.

    side : stream that forwarded tensors are sent from: NCCL makes a send wait for the current stream.
    pending : transfers that the host has not seen complete.
    sums : groups that sum, by their ranks.
    graphs : CUDA graphs with sums.
    """

    def __init__(self, control: Transport, device: torch.device) -> None:
        import torch

        self.rank, self.device_type, self._store = control.rank, device.type, connect_store(control)
        self._store.set_timeout(CONNECT_TIMEOUT)
        self.up, self.down = (_make(self._store, name, control.rank, control.size) for name in ("up", "down"))
        self.side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pending: deque[_GpuWork] = deque()
        self.sums: dict[tuple[int, ...], Any] = {}
        self._made: dict[tuple[int, ...], int] = {}  # number of groups so far, for unique names
        self.graphs = weakref.WeakSet[Any]()
        self.end = weakref.finalize(self, _end, [self.up, self.down], self.sums, self.pending, self.graphs)

    def make_sums(self, members: tuple[int, ...]) -> None:
        """Make a new group for the sums of some ranks, all of which call this."""
        number = self._made[members] = self._made.get(members, 0) + 1
        name, place = f"sum {number} over {members}", members.index(self.rank)
        self.sums[members] = _make(self._store, name, place, len(members), sums=True)

    def begin(self, work: Any, tensor: torch.Tensor) -> Request:
        """Record a transfer, and drop earlier ones that are complete."""
        for _ in range(min(2, len(self.pending))):  # two, so that the queue does not grow
            if not (earlier := self.pending.popleft()).test():
                self.pending.append(earlier)
        self.pending.append(_GpuWork(work, tensor))
        return self.pending[-1]


def _reset(graphs: weakref.WeakSet[Any]) -> None:
    for graph in list(graphs):
        graph.reset()
    graphs.clear()


def _end(
    groups: list[Any], sums: dict[tuple[int, ...], Any], pending: deque[_GpuWork], graphs: weakref.WeakSet[Any]
) -> None:
    """Shut the groups down, or abort them if transfers fail or do not end; hosts have read the results of sums."""
    _reset(graphs)
    until_s = time.monotonic() + END_S
    try:
        while not (is_over := all(one.test() for one in list(pending))) and time.monotonic() < until_s:
            time.sleep(PAUSE_S)
    except TransportError:
        is_over = False
    for group in groups:
        if is_over:
            group.shutdown()
        else:
            group.abort()
    for group in sums.values():
        group.abort()


class NcclTransport:
    """Tensors over NCCL, everything else over the control transport (`open_nccl`).

    members : the groups' ranks of this transport's ranks.
    """

    tag_ub = 2**31 - 1
    in_streams = True
    needs_progress = False

    def __init__(self, control: Transport, groups: _Groups, members: Sequence[int]) -> None:
        self._control, self._groups, self._members = control, groups, tuple(members)
        self.rank, self.size = control.rank, control.size
        self.local_rank, self.local_size = control.local_rank, control.local_size

    def close(self) -> None:
        """End the process groups, which transports from `split` share."""
        self._groups.end()

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Request:
        """Start to send a contiguous tensor's bytes; host memory goes over the control transport."""
        if tensor.device.type != self._groups.device_type:
            return self._control.isend(tensor, dest, tag)
        import torch

        groups, data, peer = self._groups, as_bytes(tensor), self._members[dest]
        group = groups.up if peer > groups.rank else groups.down
        with torch.cuda.stream(groups.side) if received is not None else contextlib.nullcontext():
            if received is not None:
                received.wait()
            return groups.begin(group.send([data], peer, 0), data)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """Start to receive into a contiguous tensor; host memory is received over the control transport."""
        if tensor.device.type != self._groups.device_type:
            return self._control.irecv(tensor, source, tag)
        groups, data, peer = self._groups, as_bytes(tensor), self._members[source]
        group = groups.up if peer < groups.rank else groups.down
        return groups.begin(group.recv([data], peer, 0), data)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks. NCCL sums in one order, and all ranks receive the same bits.

        bfloat16 is summed as it is, as in Megatron-LM: half the bytes of float32, and no conversions. In float16, a sum
        could overflow.
        """
        if tensor.device.type != self._groups.device_type:
            self._control.all_reduce(tensor)
        elif self.size > 1:
            if self._members not in self._groups.sums:
                self.renew_sums()
            import torch

            def reduce(total: torch.Tensor) -> None:
                self._groups.sums[self._members].allreduce([total]).wait()

            if tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.numel():
                reduce(tensor.view(-1))
            else:
                in_float32(tensor, reduce)

    def abort_sums(self) -> None:
        """End this rank's part in sums that other ranks do not join; the next ones raise an error."""
        abort = self._groups.sums[self._members].abort
        if self._groups.graphs:  # the sums end at once, but this returns only after `renew_sums` has reset the graphs
            threading.Thread(target=abort, daemon=True, name="abort").start()
        else:
            abort()

    def renew_sums(self) -> None:
        """Prepare for sums after `abort_sums`, without the graphs that were recorded; every rank calls this."""
        _reset(self._groups.graphs)
        self._groups.make_sums(self._members)

    def keep_graph(self, graph: Any) -> None:
        """Reset a CUDA graph, if it still exists, before the group of the sums in it is replaced or ended."""
        self._groups.graphs.add(graph)

    def barrier(self) -> None:
        self._control.barrier()

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        return self._control.broadcast(data, root)

    def gather(self, data: bytes) -> list[bytes]:
        return self._control.gather(data)

    def split(self, color: int) -> NcclTransport:
        """Make a transport for the ranks with the same color, which uses the same groups."""
        control = self._control.split(color)
        return type(self)(control, self._groups, share_json(control, gather_json(control, self._members[self.rank])))

    def abort(self, exit_code: int) -> None:
        self._control.abort(exit_code)


def open_nccl(control: Transport, device: torch.device) -> NcclTransport:
    """Connect all ranks of the control transport, each with its own GPU; every rank calls this.

    Raises
    ------
    TransportError
        On all ranks, if the rendezvous fails or this torch lacks NCCL.
    """
    return NcclTransport(control, _Groups(control, device), range(control.size))


def connect_store(control: Transport) -> Any:
    """Open a store on rank 0 and connect the other ranks to it; the control transport distributes its address."""
    dist = _distributed()

    host = "127.0.0.1" if control.local_size == control.size else socket.gethostname()

    def open_store() -> Any:
        if control.rank:
            return None
        return dist.TCPStore(host, 0, control.size, True, RENDEZVOUS_TIMEOUT, wait_for_workers=False)

    opened = together(control, lambda: _explained(open_store, f"opening a rendezvous on {host}"))
    address: list[Any] = share_json(control, [host, opened.port] if control.rank == 0 else None)

    def join() -> Any:
        return opened or dist.TCPStore(address[0], address[1], control.size, False, RENDEZVOUS_TIMEOUT)

    return together(control, lambda: _explained(join, f"joining rank 0 at {address[0]}:{address[1]}"))


def _make(store: Any, name: str, rank: int, size: int, *, sums: bool = False) -> Any:
    """Make a process group; nothing else runs during sums, which therefore get all blocks and usual streams."""
    dist = _distributed()
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=not sums)  # run ahead of large kernels
    options._timeout = TIMEOUT
    if not sums:
        options.config.max_ctas = MAX_BLOCKS
    return _explained(
        lambda: dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options), "starting NCCL"
    )


def write_last_messages(rank: int, environ: Mapping[str, str] = os.environ) -> str:
    """Write what torch's flight recorder remembers, as NCCL does after its own timeout; return the file's name.

    Nothing is written unless the recorder is on (TORCH_FR_BUFFER_SIZE) and has a file (TORCH_FR_DUMP_TEMP_FILE).
    """
    import torch

    dump: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace", None)
    prefix = environ.get("TORCH_FR_DUMP_TEMP_FILE", "")
    if dump is None or not prefix or environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return ""
    file = Path(f"{prefix}{rank}")
    with contextlib.suppress(OSError, RuntimeError):
        file.write_bytes(dump())
        return str(file)
    return ""


def _distributed() -> Any:
    """Import torch.distributed; its type stubs are incomplete."""
    import torch.distributed

    return torch.distributed


def _explained(work: Any, doing: str) -> Any:
    dist = _distributed()

    try:
        return work()
    except (RuntimeError, OSError, ValueError, dist.DistError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TransportError(
            f"torch.distributed, {doing}: {reason}; check that the hosts can reach each other by name, or use another "
            f"transport"
        ) from error
