"""Transfers in the background while a rank computes, including segments that are forwarded as soon as they arrive.

MPI moves nothing by itself: a transfer posted before a long computation mostly runs after it, unless somebody
calls MPI in between. A `Forwarder` calls it from a thread, once a millisecond, and hands a received segment on to
the next rank without waiting for the computation to reach it (cut-through).

Prompts follow each other over the same ranks without a barrier: what is left of one when this rank has computed its
part goes on beside the next. At most two prompts are under way on a rank, and their messages have different tags, so
that none is taken for one of the other's; where there are no tags, messages keep the order of the prompts.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvr_mpi.trace import Recorder, Span
from kvr_mpi.transport.base import Request, Transport

if TYPE_CHECKING:
    import torch

POLL_S = 1e-3
# A waiting rank looks this often without pause, then leaves the core to whoever shares it.
SPINS = 200
PAUSE_S = 5e-5


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer managed by a forwarder, and its onward transfer if it is forwarded.

    Of what is received the rows from `onward_from` on are passed on.
    """

    tensor: torch.Tensor
    tag: int
    prompt: int
    span: Span  # for the trace; it has begun when there is a request
    dest: int | None = None
    onward_from: int = 0
    request: Request | None = None  # None: to be sent when its turn comes
    received: Request | None = None  # for one that passes on: the request that has filled its tensor
    arrived: bool = False
    onward: Transfer | None = None

    @property
    def through(self) -> bool:
        """Whether it has arrived and is forwarded if need be, so that its buffer is free."""
        return self.arrived and (self.dest is None or (self.onward is not None and self.onward.arrived))


class Forwarder:
    """Carries the segments of successive prompts over one rank of a chain; close it after the last one.

    forwards : this rank passes segments on; None: of three and more ranks each will, in some prompt.
    device : where the tensors are; None: in host memory.
    recorder : told of every transfer that is over, with the layer that `send` and `receive` are given.
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
        self._prompt = 0  # the number of the one that has begun last
        self._pending: list[Transfer] = []
        # Where messages have no tags: those to come, by destination, in the order the other side receives them.
        self._turns: dict[int, deque[int]] = defaultdict(deque)
        self._early: dict[tuple[int, int], Transfer] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        # On one host the receiver's own wait moves the bytes of host memory; a thread would only take the core's time.
        forwards = transport.size > 2 if forwards is None else forwards
        needs_thread = forwards or self._gpu is not None or transport.local_size < transport.size
        self._thread = threading.Thread(target=self._run, daemon=True, name="forwarder") if needs_thread else None
        if self._thread is not None:
            self._thread.start()

    def begin(self) -> int:
        """Begin a prompt when the one before the last is complete; return which of two sets of tags it uses."""
        self._until(lambda: self._is_through_before(self._prompt))
        self._prompt += 1
        return self._prompt % 2

    def announce(self, dest: int, tag: int) -> None:
        """Announce a message, in the order in which `dest` receives."""
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
    ) -> Transfer:
        """Start to receive in place; rows from `forward_from` on are announced and sent on to `forward_to` at once."""
        with self._lock:
            span = Span("receive", time.perf_counter(), 0.0, self.recorder.prompt, layer, source, tensor.nbytes)
            transfer = Transfer(tensor, tag, self._prompt, span, forward_to, forward_from)
            transfer.request = self.transport.irecv(tensor, source, tag)
            if forward_to is not None and not self.transport.has_tags:
                self._turns[forward_to].append(tag)
            self._pending.append(transfer)
            return transfer

    def is_through(self, transfer: Transfer) -> bool:
        """Progress the transfers, and return whether the buffer of this one is free."""
        if not transfer.through:
            self._poll()
        return transfer.through

    def wait(self, transfer: Transfer) -> None:
        """Wait until a transfer has arrived."""
        self._until(lambda: transfer.arrived)

    def wait_through(self, transfer: Transfer) -> None:
        """Wait until a transfer's buffer is free."""
        self._until(lambda: transfer.through)

    def settle(self) -> None:
        """Wait until everything is received and forwarded."""
        import torch

        with torch.inference_mode():  # the buffers that are filled were made in it
            self._until(lambda: self._is_through_before(self._prompt + 1))

    def close(self) -> None:
        """Wait until everything is received and forwarded, and end."""
        self.settle()
        self.abandon()

    def abandon(self) -> None:
        """End without waiting, after a failure."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _is_through_before(self, prompt: int) -> bool:
        self._poll()
        with self._lock:
            return all(transfer.prompt >= prompt for transfer in (*self._pending, *self._early.values()))

    def _until(self, done: Callable[[], bool]) -> None:
        """Progress the transfers until something is done."""
        looks = 0
        while not done():
            if looks > SPINS:
                time.sleep(PAUSE_S)
            self._poll()
            looks += 1

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
                if transfer.dest is not None:
                    rows = transfer.tensor[transfer.onward_from :]
                    span = transfer.span._replace(kind="forward", peer=transfer.dest, amount=rows.nbytes)
                    transfer.onward = Transfer(rows, transfer.tag, transfer.prompt, span, received=transfer.request)
                    self._send(transfer.onward, transfer.dest)
                transfer.request, transfer.arrived = None, True
                self.recorder.add(transfer.span._replace(ended_s=time.perf_counter()))

    def _run(self) -> None:
        import torch

        if self._gpu is not None:  # set per thread, too: otherwise it is GPU 0, with a context of its own there
            torch.cuda.set_device(self._gpu)
        with torch.inference_mode():  # set per thread, and the buffers it fills were made in it
            while not self._closed.wait(POLL_S):
                try:
                    self._poll()
                except BaseException as error:
                    self._failure = error  # raised where the rank waits
                    return
