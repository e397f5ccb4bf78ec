"""The transfers of one prompt on one rank: neighbours, message tags, and each layer's messages in flight.

Translates the routes of a strategy (``route``) into messages of the `Forwarder`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvr_mpi.errors import TransportError
from kvr_mpi.kv.clock import Clock, Wait
from kvr_mpi.kv.route import Hop, Range, Route
from kvr_mpi.model.masks import Visibility
from kvr_mpi.topology import Rotation
from kvr_mpi.trace import Span
from kvr_mpi.transport.base import FIRST_PROMPT_TAG
from kvr_mpi.transport.forwarder import Forwarder, Transfer

# Segment number of a layer's recurrent states, which each rank sends to the next, and their range of tokens.
STATES, NO_TOKENS = -1, (-1, -1)


class PromptTransfers:
    """What a prompt's `LayerTransfers` share on one rank: forwarder, tags, waiting times, and bytes sent.

    It begins when at most one earlier prompt is in flight on this rank.

    forwarder : to the other ranks of the chain.
    segments : number of segments the prompt is cut into, over all ranks.
    rotation : maps positions of slices to ranks of the chain.

    Raises `TransportError` if its messages need more tags than the transport has.
    """

    def __init__(self, forwarder: Forwarder, segments: int, layers: int, rotation: Rotation) -> None:
        self.forwarder, self.layers, self.rotation = forwarder, layers, rotation
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
        with self.waiting("send"):
            self._turn = forwarder.begin()

    @contextmanager
    def waiting(self, kind: Wait, layer_idx: int = -1, peer: int = -1) -> Iterator[None]:
        """Count the time of a block as waiting for a rank of the chain, or for the link."""
        began_s = time.perf_counter()
        self.clock.mark(kind)
        try:
            yield
        finally:
            self.clock.mark("go on")
        recorder, ended_s = self.forwarder.recorder, time.perf_counter()
        recorder.add(
            Span("wait" if kind == "receive" else "send wait", began_s, ended_s, recorder.prompt, layer_idx, peer)
        )

    def tag(self, layer_idx: int, segment: int) -> int:
        """Return the tag of a segment's messages, unique among this prompt and its neighbours."""
        # Tags alternate between two turns, since a neighbouring prompt may have another number of segments.
        number = layer_idx * self._tags_per_layer + segment % self._tags_per_layer
        return FIRST_PROMPT_TAG + 2 * number + self._turn


@dataclass(slots=True, eq=False)
class LayerTransfers:
    """One layer's messages that this rank sends, forwards and receives: segments of keys and values, and states.

    rows : returns the memory of a range of tokens (tokens, elements); None: not allocated yet.
    free : event of the GPU after which no earlier work uses this memory.
    posted : in the order in which they were posted.
    """

    prompt: PromptTransfers
    layer_idx: int
    visibility: Visibility
    rows: Callable[[int, int], torch.Tensor] | None = None
    free: Any = None
    posted: dict[Hop, Transfer] = field(default_factory=dict)
    _arriving: dict[int, Transfer] = field(default_factory=dict)  # by segment

    def post(self, route: Route, *, is_filled: bool = False) -> None:
        """Announce the layer's sends and post its receives before it computes; later calls post what is missing.

        With `is_filled`, this rank's own rows can be sent at once.
        """
        assert self.rows is not None, "its memory is allocated"
        for hop, bounds, onward in route.messages(self.visibility):
            if hop not in self.posted:
                skipped = None if onward is None else onward[0] - bounds[0]
                self.add(hop, self.rows(*bounds), skipped, self.free)
            if is_filled and hop.source is None and not self.posted[hop].is_ready:
                self.prompt.forwarder.send(self.posted[hop])

    def add(self, hop: Hop, tensor: torch.Tensor, skipped: int | None = None, free: Any = None) -> Transfer:
        """Post the receive of a message, which is forwarded without its first `skipped` rows (None: not at all).

        A message that this rank computes is announced instead. Repeated calls return the same transfer.
        """
        if hop in self.posted:
            return self.posted[hop]
        prompt, layer_idx = self.prompt, self.layer_idx
        tag, dest = prompt.tag(layer_idx, hop.segment), hop.dest
        to = None if dest is None or skipped is None else prompt.rotation.rank_of(dest)
        if hop.source is not None:
            source = prompt.rotation.rank_of(hop.source)
            transfer = prompt.forwarder.receive(tensor, source, tag, to, skipped or 0, layer=layer_idx, free=free)
            self._arriving[hop.segment] = transfer
        else:
            assert to is not None, "what nobody receives is not posted"
            transfer = prompt.forwarder.announce(tensor, to, tag, layer=layer_idx)
        prompt.sent_bytes += 0 if skipped is None else tensor[skipped:].nbytes
        self.posted[hop] = transfer
        return transfer

    def share(self, ranges: Sequence[Range]) -> None:
        """Send this rank's segments that lie within `ranges`, which are complete in the buffer."""
        for hop, transfer in self.posted.items():
            is_made = any(first <= hop.bounds[0] and hop.bounds[1] <= last for first, last in ranges)
            if hop.source is None and is_made and not transfer.is_ready:
                self.prompt.forwarder.send(transfer)

    def wait_for(self, segments: Iterable[int] | None = None) -> None:
        """Wait for segments, by default for all of keys and values; the time is counted.

        Callers wait in a fixed order, not in the order of arrival: merging in another order would change the last bits,
        and a job must give the same answers every time.
        """
        if segments is None:
            segments = [segment for segment in self._arriving if segment != STATES]
        for segment in segments:
            transfer = self._arriving.pop(segment)
            with self.prompt.waiting("receive", self.layer_idx, transfer.span.peer):
                self.prompt.forwarder.wait(transfer)

    def is_through(self, *, wait: bool) -> bool:
        """Whether all messages have arrived and are forwarded; with `wait`, wait for that, and count the time."""
        forwarder = self.prompt.forwarder
        if not wait:
            forwarder.progress()
            return all(transfer.through for transfer in self.posted.values())
        with self.prompt.waiting("send", self.layer_idx):
            for transfer in self.posted.values():
                forwarder.wait(transfer, through=True)
        return True
