"""The transfers of one prompt on one rank: neighbours, message tags, and each layer's segments in flight.

Translates the routes of a strategy (``route``) into messages of the `Forwarder`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvr_mpi.errors import TransportError
from kvr_mpi.kv.clock import Clock, Kind
from kvr_mpi.kv.route import Range, Route
from kvr_mpi.model.masks import FULL, Visibility
from kvr_mpi.topology import Rotation
from kvr_mpi.transport.base import FIRST_PROMPT_TAG
from kvr_mpi.transport.forwarder import Forwarder, Transfer

# Segment number of a layer's recurrent states, which each rank sends to the next.
STATES = -1


class PromptTransfers:
    """What a prompt's `LayerTransfers` share on one rank: forwarder, tags, waiting times, and bytes sent.

    Parameters
    ----------
    forwarder : Forwarder
        To the other ranks of the chain.
    segments : int
        Number of segments the prompt is cut into, over all ranks.
    layers : int
    rotation : Rotation
        Maps positions of slices to ranks of the chain.

    Raises
    ------
    TransportError
        If its messages need more tags than the transport has.
    """

    def __init__(self, forwarder: Forwarder, segments: int, layers: int, rotation: Rotation) -> None:
        self.forwarder, self.segments, self.layers, self.rotation = forwarder, segments, layers, rotation
        self._turn = 0
        transport = forwarder.transport
        self._tags_per_layer = max(segments, transport.size) + 1  # one more for states
        if (largest := self.tag(layers, self._tags_per_layer - 1) + 1) > transport.tag_ub:
            raise TransportError(
                f"{layers} layers in {segments} segments need message tags up to {largest}, and this MPI allows "
                f"{transport.tag_ub}: use larger chunks (parallel.chunk_tokens), fewer ranks per chain, or another MPI"
            )
        self.clock = Clock(forwarder.device)
        self.sent_bytes = 0  # including forwarded bytes
        self._recorder = forwarder.recorder

    def begin(self) -> None:
        """Begin the prompt, after waiting until at most one earlier prompt is in flight on this rank."""
        with self.waiting("send"):
            self._turn = self.forwarder.begin()

    @contextmanager
    def waiting(self, kind: Kind, layer_idx: int = -1, peer: int = -1) -> Iterator[None]:
        """Count the time of a block as waiting for a rank of the chain, or for the link."""
        began_s = time.perf_counter()
        with self.clock.waiting(kind):
            yield
        self._recorder.note("wait" if kind == "receive" else "send wait", began_s, layer=layer_idx, peer=peer)

    def rank_of(self, place: int) -> int:
        """Return the rank that has the slice at this position."""
        return self.rotation.rank_of(place)

    def tag(self, layer_idx: int, segment: int) -> int:
        """Return the tag of a segment's messages, unique among this prompt and its neighbours."""
        # Tags alternate between two turns, since a neighbouring prompt may have another number of segments.
        number = layer_idx * self._tags_per_layer + segment % self._tags_per_layer
        return FIRST_PROMPT_TAG + 2 * number + self._turn


class LayerTransfers:
    """One layer's messages that this rank sends, forwards and receives; ranks are given by their slice's position.

    A message is a segment of keys and values, given by its range of tokens, or recurrent states (`STATES`), given as a
    tensor (bytes,). `announce`, `send` and `receive` are idempotent, so that an interrupted `post` can be repeated.
    """

    def __init__(self, prompt: PromptTransfers, layer_idx: int, visibility: Visibility = FULL) -> None:
        self.prompt, self.layer_idx, self.visibility = prompt, layer_idx, visibility
        self.buffer: torch.Tensor | None = None  # (tokens, elements)
        self.start = 0  # position of its first row
        self.free: Any = None  # event after which no earlier work of the GPU uses it
        self._slots: list[torch.Tensor] = []  # scratch buffers that replace `buffer` after a failure; used in turn
        self._elements = 0
        self._arriving: dict[int, Transfer] = {}  # by segment, in the order they were posted
        self._transfers: list[Transfer] = []
        self._asked: set[tuple[str, int, int]] = set()

    def post(self, route: Route) -> None:
        """Announce the layer's sends and post its receives before it computes."""
        for hop in route.hops:
            onward = None if hop.dest is None else route.sent(hop.bounds, self.visibility)
            if hop.source is not None:
                if bounds := route.received(hop.bounds, self.visibility):
                    to, first = (hop.dest, onward[0]) if onward else (None, None)
                    self.receive(bounds, hop.source, hop.segment, to, first)
            elif hop.dest is not None and onward:
                self.announce(hop.dest, hop.segment)
                if self._slots:  # after a failure: nothing to compute first
                    self.send(onward, hop.dest, hop.segment)

    def share(self, route: Route, ranges: Sequence[Range]) -> None:
        """Send this rank's segments that lie within `ranges`, which are complete in the buffer."""
        for hop in route.hops:
            is_made = any(first <= hop.bounds[0] and hop.bounds[1] <= last for first, last in ranges)
            if hop.source is None and hop.dest is not None and is_made:
                if bounds := route.sent(hop.bounds, self.visibility):
                    self.send(bounds, hop.dest, hop.segment)

    def announce(self, dest: int, segment: int = STATES) -> None:
        """Announce a message that will be sent; announce messages in the order in which `dest` receives them."""
        if ("announce", dest, segment) not in self._asked:
            self.prompt.forwarder.announce(self.prompt.rank_of(dest), self.prompt.tag(self.layer_idx, segment))
            self._asked.add(("announce", dest, segment))

    def send(self, what: Range | torch.Tensor, dest: int, segment: int = STATES) -> None:
        """Send a message."""
        if ("send", dest, segment) in self._asked:
            return
        prompt, rows = self.prompt, self._rows(what)
        tag = prompt.tag(self.layer_idx, segment)
        self._transfers.append(prompt.forwarder.send(rows, prompt.rank_of(dest), tag, layer=self.layer_idx))
        self._asked.add(("send", dest, segment))
        prompt.sent_bytes += rows.nbytes

    def receive(
        self,
        what: Range | torch.Tensor,
        source: int,
        segment: int = STATES,
        forward_to: int | None = None,
        forward_from: int | None = None,
    ) -> None:
        """Post the receive of a message; a segment may be forwarded, from token `forward_from` on if given."""
        if ("receive", source, segment) in self._asked:
            return
        prompt, rows = self.prompt, self._rows(what)
        onward = None if forward_to is None else prompt.rank_of(forward_to)
        tag = prompt.tag(self.layer_idx, segment)
        skipped = 0 if forward_from is None or isinstance(what, torch.Tensor) else forward_from - what[0]
        if self._slots:
            skipped *= self._elements
        free = None if isinstance(what, torch.Tensor) or self._slots else self.free
        more: Any = {"layer": self.layer_idx, "free": free}
        transfer = prompt.forwarder.receive(rows, prompt.rank_of(source), tag, onward, skipped, **more)
        self._asked.add(("receive", source, segment))
        prompt.sent_bytes += 0 if onward is None else rows[skipped:].nbytes
        self._arriving[segment] = transfer
        self._transfers.append(transfer)

    def wait_for(self, segment: int = STATES) -> None:
        """Wait for a posted message; the time is counted.

        Callers wait in a fixed order, not in the order of arrival: merging in another order would change the last bits,
        and a job must give the same answers every time.
        """
        transfer = self._arriving.pop(segment)
        with self.prompt.waiting("receive", self.layer_idx, transfer.span.peer):
            self.prompt.forwarder.wait(transfer)

    def collect(self) -> None:
        """Wait for all segments."""
        for segment in [segment for segment in self._arriving if segment != STATES]:
            self.wait_for(segment)

    def are_through(self) -> bool:
        """Progress the transfers, and return whether all messages have arrived and are forwarded."""
        return all(self.prompt.forwarder.is_through(transfer) for transfer in self._transfers)

    def wait_through(self) -> None:
        """Wait until all messages have arrived and are forwarded; the time is counted."""
        with self.prompt.waiting("send", self.layer_idx):
            for transfer in self._transfers:
                self.prompt.forwarder.wait_through(transfer)

    def do_without(self, slots: Sequence[torch.Tensor], elements: int) -> None:
        """Complete the layer's transfers with a few scratch buffers after a failure; the data are meaningless.

        Parameters
        ----------
        slots : sequence of Tensor
            Flat buffers that hold the longest segment. A transfer begins when the last one in its slot is complete.
        elements : int
            Elements of K and V of all heads, per token.
        """
        self._slots, self._elements = list(slots), elements

    def _rows(self, what: Range | torch.Tensor) -> torch.Tensor:
        if isinstance(what, torch.Tensor):
            return what
        first, last = what
        if self._slots:
            before = len(self._transfers) - len(self._slots)
            if before >= 0:
                self.prompt.forwarder.wait_through(self._transfers[before])
            return self._slots[len(self._transfers) % len(self._slots)][: (last - first) * self._elements]
        assert self.buffer is not None
        return self.buffer[first - self.start : last - self.start]
