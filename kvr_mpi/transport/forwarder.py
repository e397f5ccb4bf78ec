"""Transfers in the background while a rank computes, including segments that are forwarded as soon as they arrive.

MPI makes no progress by itself: without further MPI calls, a transfer posted before a long computation mostly runs
after it. A `Forwarder` calls MPI from a thread every millisecond, and forwards a received segment to the next rank
before the computation needs it (cut-through).

With NCCL this happens in streams of the GPU: the onward send is posted together with its receive, in a stream that
waits for the receive. Waiting for a transfer then blocks the computing stream, not the host.

Prompts follow each other over the same ranks without a barrier: the remaining transfers of one prompt run during the
next. At most two prompts are in progress on a rank. Their messages have different tags and cannot be mixed up; on
transports without tags, messages keep the order of the prompts.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvr_mpi.trace import Recorder, Span
from kvr_mpi.transport.base import Request, Transport

if TYPE_CHECKING:
    import torch

POLL_S = 1e-3
# A waiting rank polls this often without a pause, then sleeps between polls to free the core for other ranks.
SPINS = 200
PAUSE_S = 5e-5


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer managed by a forwarder, and its onward transfer if it is forwarded.

    Only the received rows from `onward_from` on are forwarded.
    """

    tensor: torch.Tensor
    tag: int
    prompt: int
    span: Span  # for the trace; begins with the request
    dest: int | None = None
    onward_from: int = 0
    request: Request | None = None  # None: not started yet, or completed
    received: Request | None = None  # for an onward transfer: the receive that fills its tensor
    arrived: bool = False
    onward: Transfer | None = None

    @property
    def through(self) -> bool:
        """Whether it is complete, including any onward transfer, so that its buffer can be reused."""
        return self.arrived and (self.dest is None or (self.onward is not None and self.onward.arrived))


class Forwarder:
    """Transfers the segments of successive prompts on one rank of a chain; close it after the last prompt.

    forwards : whether this rank forwards segments; None: yes in chains of three or more ranks.
    device : device of the tensors; None: host memory.
    recorder : records every completed transfer, with the layer passed to `send` or `receive`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        forwards: bool | None = None,
        device: torch.device | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.transport, self.device = transport, device
        self.recorder = Recorder() if recorder is None else recorder
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._receiving: Any = None  # stream that receives are posted from
        if self._gpu is not None:
            import torch

            self._receiving = torch.cuda.Stream(self._gpu)  # type: ignore[no-untyped-call]
        self._prompt = 0  # number of the prompt that began last
        self._pending: list[Transfer] = []
        # Without tags: tags of announced messages by destination, in its receive order, and sends before their turn.
        self._turns: dict[int, deque[int]] = defaultdict(deque)
        self._early: dict[tuple[int, int], Transfer] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        # On one host, the receiver's wait copies the bytes from host memory; a thread would only cost core time.
        forwards = transport.size > 2 if forwards is None else forwards
        needs_thread = forwards or self._gpu is not None or transport.local_size < transport.size
        self._thread = threading.Thread(target=self._run, daemon=True, name="forwarder") if needs_thread else None
        if self._thread is not None:
            self._thread.start()

    def begin(self) -> int:
        """Begin a prompt, once all but the previous one are complete; return which tag set to use (0 or 1)."""
        self._until(lambda: self._is_through_before(self._prompt))
        self._prompt += 1
        return self._prompt % 2

    def announce(self, dest: int, tag: int) -> None:
        """Announce a message; announcements must be in the order in which `dest` receives."""
        if not self.transport.has_tags:
            with self._lock:
                self._turns[dest].append(tag)

    def send(self, tensor: torch.Tensor, dest: int, tag: int, *, layer: int = -1) -> Transfer:
        """Start to send; the tensor must not change until the transfer is complete."""
        with self._lock:
            span = Span("send", 0.0, 0.0, self.recorder.prompt, layer, dest, tensor.nbytes)
            return self._send(Transfer(tensor, tag, self._prompt, span), dest)

    def receive(
        self,
        tensor: torch.Tensor,
        source: int,
        tag: int,
        forward_to: int | None = None,
        forward_from: int = 0,
        *,
        layer: int = -1,
        free: Any = None,
    ) -> Transfer:
        """Start to receive in place; on arrival, forward the rows from `forward_from` on to `forward_to`.

        `free` is the event on a GPU after which no earlier work uses the tensor; None: all work queued so far.
        """
        with self._lock:
            span = Span("receive", time.perf_counter(), 0.0, self.recorder.prompt, layer, source, tensor.nbytes)
            transfer = Transfer(tensor, tag, self._prompt, span, forward_to, forward_from)
            with self._after(free):
                transfer.request = self.transport.irecv(tensor, source, tag)
            if forward_to is not None and not self.transport.has_tags:
                self._turns[forward_to].append(tag)
            self._pending.append(transfer)
            if self.transport.in_streams:
                self._forward(transfer)
            return transfer

    def is_through(self, transfer: Transfer) -> bool:
        """Progress all transfers, and return whether this one's buffer can be reused."""
        if not transfer.through:
            self._poll()
        return transfer.through

    def wait(self, transfer: Transfer) -> None:
        """Wait until a transfer has arrived."""
        if not self.transport.in_streams:
            self._until(lambda: transfer.arrived)
            return
        self._until(lambda: transfer.arrived or transfer.request is not None)
        if (request := transfer.request) is not None:  # this or another thread may see it end meanwhile
            request.wait()

    def wait_through(self, transfer: Transfer) -> None:
        """Wait until a transfer's buffer can be reused."""
        if not self.transport.in_streams:
            self._until(lambda: transfer.through)
            return
        self.wait(transfer)
        if transfer.onward is not None:
            self.wait(transfer.onward)

    def wait_for_compute(self) -> None:
        """Wait until the GPU has finished all queued work, including the transfers that this work waits for.

        Unlike torch's synchronize, this raises the error of a failed transfer.
        """
        if self._gpu is not None:
            import torch

            self._until(torch.cuda.current_stream(self._gpu).record_event().query)

    def settle(self) -> None:
        """Wait until everything is received and forwarded."""
        import torch

        with torch.inference_mode():  # the buffers are inference tensors
            self._until(lambda: self._is_through_before(self._prompt + 1))

    def close(self) -> None:
        """Wait until everything is received and forwarded, then stop the thread."""
        self.settle()
        self.abandon()

    def abandon(self) -> None:
        """Stop the thread without waiting for transfers, after a failure."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _is_through_before(self, prompt: int) -> bool:
        self._poll()
        with self._lock:
            return all(transfer.prompt >= prompt for transfer in (*self._pending, *self._early.values()))

    def _until(self, done: Callable[[], bool]) -> None:
        """Progress the transfers until `done` returns True."""
        looks = 0
        while not done():
            if looks > SPINS:
                time.sleep(PAUSE_S)
            self._poll()
            looks += 1

    @contextmanager
    def _after(self, free: Any) -> Iterator[None]:
        """Run the block in a stream that waits for the event `free` only, not for all queued work."""
        if free is None:
            yield
            return
        import torch

        self._receiving.wait_event(free)
        with torch.cuda.stream(self._receiving):
            yield

    def _forward(self, transfer: Transfer) -> None:
        """Send a received tensor on, in its turn, if it is to be forwarded."""
        if transfer.dest is not None:
            rows = transfer.tensor[transfer.onward_from :]
            span = transfer.span._replace(kind="forward", peer=transfer.dest, amount=rows.nbytes)
            transfer.onward = Transfer(rows, transfer.tag, transfer.prompt, span, received=transfer.request)
            self._send(transfer.onward, transfer.dest)

    def _send(self, transfer: Transfer, dest: int) -> Transfer:
        if self.transport.has_tags:
            self._hand_over(transfer, dest)
            return transfer
        self._early[dest, transfer.tag] = transfer
        turns = self._turns[dest]
        while turns and (dest, turns[0]) in self._early:
            self._hand_over(self._early.pop((dest, turns.popleft())), dest)
        return transfer

    def _hand_over(self, transfer: Transfer, dest: int) -> None:
        transfer.span = transfer.span._replace(began_s=time.perf_counter())
        transfer.request = self.transport.isend(transfer.tensor, dest, transfer.tag, transfer.received)
        transfer.received = None
        self._pending.append(transfer)

    def _poll(self) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            for transfer in [
                transfer for transfer in self._pending if transfer.request is not None and transfer.request.test()
            ]:
                self._pending.remove(transfer)
                if not self.transport.in_streams:
                    self._forward(transfer)
                transfer.request, transfer.arrived = None, True
                self.recorder.add(transfer.span._replace(ended_s=time.perf_counter()))

    def _run(self) -> None:
        import torch

        if self._gpu is not None:  # per thread; otherwise this one would create a context on GPU 0
            torch.cuda.set_device(self._gpu)
        with torch.inference_mode():  # per thread; the buffers are inference tensors
            while not self._closed.wait(POLL_S):
                try:
                    self._poll()
                except BaseException as error:
                    self._failure = error  # raised by the next poll of the rank
                    return
