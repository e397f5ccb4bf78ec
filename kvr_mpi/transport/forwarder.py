"""Transfers in the background while a rank computes, including segments that are forwarded as soon as they arrive.

MPI makes no progress by itself: without further MPI calls, a transfer posted before a long computation mostly runs
after it. A `Forwarder` calls MPI from a thread every millisecond, and forwards a received segment to the next rank
before the computation needs it (cut-through).

With NCCL this happens in streams of the GPU: the onward send is posted together with its receive, in a stream that
waits for the receive. Waiting for a transfer then blocks the computing stream, not the host.

Prompts follow each other over the same ranks without a barrier: the remaining transfers of one prompt run during the
next. At most two prompts are in progress on a rank. Their messages have different tags and cannot be mixed up; with
NCCL, which reads no tags, messages keep the order of the prompts.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvr_mpi.errors import TransportError
from kvr_mpi.events import Events, Span
from kvr_mpi.transport.base import Request, Transport, describe_message, describe_wait
from kvr_mpi.transport.liveness import LIMIT_S, Patience
from kvr_mpi.transport.nccl import write_last_messages

if TYPE_CHECKING:
    import torch

POLL_S = 1e-3
# A waiting rank polls this often without a pause, then sleeps between polls to free the core for other ranks.
SPINS = 200
PAUSE_S = 5e-5


@dataclass(slots=True, eq=False)
class Transfer:
    """One message that a forwarder sends or receives.

    is_ready : a message to send: its tensor is filled.
    received : a message to forward: the receive that fills its tensor.
    request : None: not started yet, or completed.
    onward : a received message: what is forwarded of it.
    """

    tensor: torch.Tensor
    tag: int
    prompt: int
    span: Span  # for the trace; begins with the request
    is_ready: bool = False
    received: Request | None = None
    request: Request | None = None
    arrived: bool = False
    onward: Transfer | None = None

    @property
    def through(self) -> bool:
        """Whether it is complete, including any onward transfer, so that its buffer can be reused."""
        return self.arrived and (self.onward is None or self.onward.arrived)


class Forwarder:
    """Transfers the segments of successive prompts on one rank of a chain; close it after the last prompt.

    device : device of the tensors; None: host memory.
    events : get a span for every completed transfer, with the layer passed to `announce` or `receive`.
    limit_s : deadline of each wait for another rank.

    Waits raise a `TransportError` that names the message, if they exceed `limit_s`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        device: torch.device | None = None,
        events: Events | None = None,
    ) -> None:
        self.transport, self.device = transport, device
        self.events = Events() if events is None else events
        self.limit_s = LIMIT_S
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._receiving: Any = None  # stream that receives are posted from
        if self._gpu is not None:
            import torch

            self._receiving = torch.cuda.Stream(self._gpu)  # type: ignore[no-untyped-call]
        self._prompt = 0  # number of the prompt that began last
        self._pending: list[Transfer] = []
        # On GPUs: announced messages that are not sent yet, by destination, in its receive order (NCCL, `staging`).
        self._turns: dict[int, list[Transfer]] = defaultdict(list)
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        # On one host, the receiver's wait mostly copies the bytes from host memory; a thread would only cost core time.
        needs_thread = (
            transport.size > 2
            or self._gpu is not None
            or transport.local_size < transport.size
            or transport.needs_progress
        )
        self._thread = threading.Thread(target=self._run, daemon=True, name="forwarder") if needs_thread else None
        if self._thread is not None:
            self._thread.start()

    def begin(self) -> int:
        """Begin a prompt, once all but the previous one are complete; return which tag set to use (0 or 1)."""
        self.settle(running=1)
        self._prompt += 1
        return self._prompt % 2

    def announce(
        self, tensor: torch.Tensor, dest: int, tag: int, *, layer: int = -1, kind: Literal["send", "forward"] = "send"
    ) -> Transfer:
        """Announce a message that `send` starts; announcements must be in the order in which `dest` receives."""
        with self._lock:
            span = Span(kind, 0.0, 0.0, self.events.prompt, layer, dest, tensor.nbytes)
            transfer = Transfer(tensor, tag, self._prompt, span)
            if self._gpu is not None:
                self._turns[dest].append(transfer)
            return transfer

    def send(self, transfer: Transfer, received: Request | None = None) -> None:
        """Start to send an announced message, in its turn; its tensor must not change until it is complete.

        `received` is the receive of a forwarded message.
        """
        with self._lock:
            transfer.is_ready, transfer.received, ready = True, received, [transfer]
            dest = transfer.span.peer
            if self._gpu is not None:
                turns = self._turns[dest]
                ready = list(itertools.takewhile(lambda one: one.is_ready, turns))
                del turns[: len(ready)]
            for one in ready:
                one.span = one.span._replace(began_s=time.perf_counter())
                one.request, one.received = self.transport.isend(one.tensor, dest, one.tag, one.received), None
                self._pending.append(one)

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
            span = Span("receive", time.perf_counter(), 0.0, self.events.prompt, layer, source, tensor.nbytes)
            transfer = Transfer(tensor, tag, self._prompt, span)
            stream: Any = contextlib.nullcontext()
            if free is not None:
                import torch

                self._receiving.wait_event(free)
                stream = torch.cuda.stream(self._receiving)
            with stream:
                transfer.request = self.transport.irecv(tensor, source, tag)
            self._pending.append(transfer)
            if forward_to is not None:
                rows = tensor[forward_from:]
                transfer.onward = self.announce(rows, forward_to, tag, layer=layer, kind="forward")
                if self.transport.in_streams:
                    self.send(transfer.onward, transfer.request)
            return transfer

    def wait(self, transfer: Transfer, *, through: bool = False) -> None:
        """Wait until a transfer has arrived; with `through`, until its buffer can be reused."""
        if not self.transport.in_streams:
            self._until(lambda: transfer.through if through else transfer.arrived, transfer)
            return
        self._until(lambda: transfer.arrived or transfer.request is not None)
        if (request := transfer.request) is not None:  # this or another thread may see it end meanwhile
            request.wait()
        if through and transfer.onward is not None:
            self.wait(transfer.onward)

    def wait_for_compute(self) -> None:
        """Wait until the GPU has finished all queued work, including the transfers that this work waits for.

        Unlike torch's synchronize, this raises the error of a failed transfer.
        """
        if self._gpu is not None:
            import torch

            self._until(torch.cuda.current_stream(self._gpu).record_event().query)

    def settle(self, *, running: int = 0) -> None:
        """Wait until everything but the messages of the last `running` prompts is received and forwarded."""
        import torch

        def is_through() -> bool:
            self.progress()
            with self._lock:
                ready = [transfer for turns in self._turns.values() for transfer in turns if transfer.is_ready]
                return all(transfer.prompt > self._prompt - running for transfer in (*self._pending, *ready))

        with torch.inference_mode():  # the buffers are inference tensors
            self._until(is_through)

    def close(self) -> None:
        """Wait until everything is received and forwarded, then stop the thread."""
        self.settle()
        self.abandon()

    def abandon(self) -> None:
        """Stop the thread without waiting for transfers, after a failure."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _until(self, done: Callable[[], bool], awaited: Transfer | None = None) -> None:
        """Progress the transfers until `done` returns True; `awaited` is the transfer that it waits for."""
        looks, patience = 0, Patience(self.limit_s)
        while not done():
            if looks > SPINS:
                time.sleep(PAUSE_S)
                if patience.is_over():
                    raise TransportError(self._describe_wait(patience, awaited))
            self.progress()
            looks += 1

    def _describe_wait(self, patience: Patience, awaited: Transfer | None) -> str:
        """Name the message that did not arrive: the one that is waited for, else the first of this rank's."""
        with self._lock:
            open_ = [awaited] if awaited is not None else [one for one in self._pending if not one.arrived]
        first = next((one for one in open_ if one.span.kind == "receive"), open_[0] if open_ else None)
        if first is None:
            what = "its own GPU, and no message is in flight: that GPU hangs"
        else:
            kind, peer, layer = first.span.kind, first.span.peer, first.span.layer
            of = f"layer {layer}" if layer >= 0 else "the status of the prompt"
            what = describe_message(of, first.tag, first.tensor.nbytes, peer, receives=kind == "receive")
        if self.transport.in_streams and (file := write_last_messages(self.transport.rank)):
            what += f"; the last messages of NCCL are in {file} (torchfrtrace reads it)"
        return describe_wait(self.transport, patience.waited_s, what)

    def progress(self) -> None:
        """Progress all transfers, and forward received messages."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            for transfer in [
                transfer for transfer in self._pending if transfer.request is not None and transfer.request.test()
            ]:
                self._pending.remove(transfer)
                if transfer.onward is not None and not self.transport.in_streams:
                    self.send(transfer.onward, transfer.request)
                transfer.request, transfer.arrived = None, True
                self.events.add(transfer.span._replace(ended_s=time.perf_counter()))

    def _run(self) -> None:
        import torch

        if self._gpu is not None:  # per thread; otherwise this one would create a context on GPU 0
            torch.cuda.set_device(self._gpu)
        with torch.inference_mode():  # per thread; the buffers are inference tensors
            while not self._closed.wait(POLL_S):
                try:
                    self.progress()
                except BaseException as error:
                    self._failure = error  # raised by the next poll of the rank
                    return
