"""Ranks as members of a torch.distributed process group: NCCL between GPUs; tests run it with gloo between CPUs.

MPI stays the introduction and the control channel: it hands the rendezvous address round, and barriers and small
messages go over it. Only tensors travel over torch.distributed. No default process group is made, so that nothing
global is touched.

NCCL has no tags: a message goes to the receive posted first. It moves both directions of a pair over one stream, so a
receive posted early would hold up a send to the same rank; hence a group for messages to higher ranks and one for
messages to lower ones.

A transfer of NCCL's is a kernel that holds part of the GPU until the other side has come, too. So each gets a few
blocks only, and receives are posted when their layer begins, not before. Groups are shut down when nobody holds their
transport any more, at the latest at the end of the program; with transfers under way, which is after a failure, they
are aborted, since their peer may never come.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import weakref
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from kvr_mpi.errors import TransportError
from kvr_mpi.transport.base import LAYERS_AHEAD, Request, Transport, as_bytes, share_json, together
from kvr_mpi.transport.collectives import all_reduce

if TYPE_CHECKING:
    import torch

Backend = Literal["nccl", "gloo"]

# A transfer may wait as long as the slowest rank computes; that a rank is dead is the launcher's to notice.
TIMEOUT = timedelta(days=7)
RENDEZVOUS_TIMEOUT = timedelta(seconds=60)
PAUSE_S = 5e-5
JOIN_S = 2.0
# Thread blocks of one transfer, and so multiprocessors that it takes from the computation; NCCL rounds to a power of
# two. With 7 peers both ways that is 56 of an H100's 132. NCCL_MAX_CTAS overrides it.
MAX_BLOCKS = 4


class _GpuWork:
    """A transfer on NCCL's stream, which moves by itself.

    ``under_way`` holds the groups' unended transfers; this one leaves it when it is seen to have ended.
    """

    def __init__(self, work: Any, held: torch.Tensor, under_way: set[Any]) -> None:
        self._work, self._held, self._under_way = work, held, under_way
        under_way.add(work)

    def test(self) -> bool:
        if self._work is not None and self._work.is_completed():
            self._check()
            self._work.wait()  # there is nothing left to wait for: it lets go of what it held
            self._under_way.discard(self._work)
            self._work = None
        return self._work is None

    def _check(self) -> None:
        """Raise what went wrong: a transfer that failed counts as completed, and waiting for it does not say so."""
        try:
            failure = self._work.exception()
        except Exception as error:
            failure = error
        if failure is not None:
            raise TransportError(
                f"NCCL: {failure}; the rank at the other end, or its link, has failed: check the last lines of its log"
            )

    def wait(self) -> None:
        while not self.test():
            time.sleep(PAUSE_S)


class _HostWork:
    """A transfer of gloo's, which moves by itself but tells only those who wait for it.

    Its length travels before it, since gloo takes a message that is too short for a whole one.
    """

    def __init__(self, works: list[Any], length: torch.Tensor, data: torch.Tensor, peer: str) -> None:
        self._works, self._length, self._data, self._peer = works, length, data, peer
        self._ended = threading.Event()
        self._failure: Exception | None = None

    def run(self) -> None:
        """Wait for the length, compare it, and wait for the message; in a thread of its own."""
        try:
            self._works[0].wait(TIMEOUT)
            if int(self._length) != self._data.numel():
                size = self._data.numel()
                raise TransportError(f"expected {size} bytes from {self._peer}, but received {int(self._length)}")
            self._works[1].wait(TIMEOUT)
        except Exception as error:  # raised where the rank waits
            self._failure = error if isinstance(error, TransportError) else TransportError(f"gloo: {error}")
        self._ended.set()

    def test(self) -> bool:
        if self._ended.is_set() and self._failure is not None:
            raise self._failure
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()
        self.test()


class _Waiter:
    """A thread that waits for one link's transfers of one direction, which end in the order they began."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[_HostWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gloo link")
        self._thread.start()

    def watch(self, work: _HostWork) -> _HostWork:
        """Begin to wait for a transfer."""
        self._works.put(work)
        return work

    def end(self) -> None:
        """Let the thread end when what it waits for has ended."""
        self._works.put(None)

    def join(self) -> None:
        """Wait for its end, unless what it waits for never ends.

        A thread that lets go of a transfer while the interpreter ends brings the process down.
        """
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.run()


class _Groups:
    """The process groups of all ranks of the job, and who waits for their links."""

    def __init__(self, control: Transport, backend: Backend, device: torch.device) -> None:
        import torch

        self.backend, self.rank = backend, control.rank
        store = _meet(control)
        self.up, self.down = (_make(backend, store, name, control.rank, control.size) for name in ("up", "down"))
        self.waiters: dict[tuple[str, int], _Waiter] = defaultdict(_Waiter)
        # What is passed on waits for no computation: NCCL lets a send wait for the stream it is called under.
        self.side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.under_way: set[Any] = set()
        self.end = weakref.finalize(self, _end, [self.up, self.down], self.under_way, self.waiters)

    def send(self, data: torch.Tensor, dest: int, tag: int, *, passed_on: bool) -> Request:
        import torch

        group = self.up if dest > self.rank else self.down
        if self.backend == "gloo":
            length = torch.tensor([data.numel()])
            works = [group.send([part], dest, tag) for part in (length, data)]
            return self.waiters["to", dest].watch(_HostWork(works, length, data, f"rank {dest}"))
        with torch.cuda.stream(self.side) if passed_on else contextlib.nullcontext():
            return _GpuWork(group.send([data], dest, 0), data, self.under_way)

    def receive(self, data: torch.Tensor, source: int, tag: int) -> Request:
        import torch

        group = self.up if source < self.rank else self.down
        if self.backend == "gloo":
            length = torch.zeros(1, dtype=torch.int64)
            works = [group.recv([part], source, tag) for part in (length, data)]
            return self.waiters["from", source].watch(_HostWork(works, length, data, f"rank {source} (tag {tag})"))
        return _GpuWork(group.recv([data], source, 0), data, self.under_way)


def _end(groups: list[Any], under_way: set[Any], waiters: dict[tuple[str, int], _Waiter]) -> None:
    """Give back what NCCL or gloo holds."""
    for waiter in waiters.values():
        waiter.end()
    for waiter in waiters.values():
        waiter.join()
    for group in groups:
        if under_way:
            group.abort()
        else:
            group.shutdown()


class TorchDistTransport:
    """Tensors over torch.distributed, everything else over the transport that introduced the ranks.

    Parameters
    ----------
    control : Transport
        For barriers and small messages.
    backend : {'nccl', 'gloo'}
    device : torch.device
        Where the tensors are; for NCCL a GPU that no other rank uses.

    Raises
    ------
    TransportError
        On all ranks, if the ranks cannot meet or this torch lacks the backend.
    """

    has_tags = False  # gloo's waiters go by order, too
    tag_ub = 2**31 - 1

    def __init__(self, control: Transport, backend: Backend, device: torch.device) -> None:
        self._take(control, _Groups(control, backend, device), tuple(range(control.size)))

    def _take(self, control: Transport, groups: _Groups, members: tuple[int, ...]) -> None:
        self._control, self._groups, self._members = control, groups, members
        self.rank, self.size = control.rank, control.size
        self.local_rank, self.local_size = control.local_rank, control.local_size

    @property
    def layers_ahead(self) -> int:
        """None where a posted receive holds a part of the GPU until it is served."""
        return 0 if self._groups.backend == "nccl" else LAYERS_AHEAD

    def close(self) -> None:
        """End the process groups, of all transports that were split off, too: nobody uses them any more."""
        self._groups.end()

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Request | None = None) -> Request:
        """Begin to send a contiguous tensor's bytes."""
        return self._groups.send(as_bytes(tensor), self._members[dest], tag, passed_on=received is not None)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """Begin to receive into a contiguous tensor."""
        return self._groups.receive(as_bytes(tensor), self._members[source], tag)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        all_reduce(self, tensor)

    def barrier(self) -> None:
        """Return when all ranks are here."""
        self._control.barrier()

    def broadcast(self, data: bytes, root: int = 0) -> bytes:
        """Give every rank the root's bytes."""
        return self._control.broadcast(data, root)

    def gather(self, data: bytes, root: int = 0) -> list[bytes]:
        """Give the root every rank's bytes."""
        return self._control.gather(data, root)

    def split(self, color: int) -> TorchDistTransport:
        """Make a transport among the ranks of the same color, over the same links."""
        part = object.__new__(TorchDistTransport)
        control = self._control.split(color)
        everyone = [int(rank) for rank in _gather_all(control, self._members[self.rank])]
        part._take(control, self._groups, tuple(everyone))
        return part

    def abort(self, exit_code: int) -> None:
        """End all ranks of the job."""
        self._control.abort(exit_code)


def _gather_all(control: Transport, value: int) -> list[int]:
    found = control.gather(str(value).encode())
    everyone: list[int] = share_json(control, [int(data) for data in found])
    return everyone


def _meet(control: Transport) -> Any:
    """Open the store on rank 0, and let the others join it; its address goes round over the control transport."""
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


def _make(backend: Backend, store: Any, name: str, rank: int, size: int) -> Any:
    dist = _distributed()

    prefixed = dist.PrefixStore(name, store)
    if backend == "gloo":
        return _explained(
            lambda: dist.ProcessGroupGloo(prefixed, rank, size, TIMEOUT),
            "opening gloo's sockets (GLOO_SOCKET_IFNAME names the network interface)",
        )
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # its few blocks wait for no kernel's many
    options._timeout = TIMEOUT
    options.config.max_ctas = MAX_BLOCKS
    return _explained(lambda: dist.ProcessGroupNCCL(prefixed, rank, size, options), "starting NCCL")


def _distributed() -> Any:
    """Import torch.distributed, whose stubs leave out what its documentation names."""
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
