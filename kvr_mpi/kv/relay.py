"""What each place of a chain computes, sends, receives and attends to, and its messages in flight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from kvr_mpi.errors import TransportError
from kvr_mpi.kv.clock import Clock, Wait
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import Partition, cut_range
from kvr_mpi.topology import Rotation
from kvr_mpi.transport.base import FIRST_PROMPT_TAG
from kvr_mpi.transport.forwarder import Forwarder, Transfer

Range = tuple[int, int]

# Segment number of a layer's recurrent states, which each rank sends to the next.
STATES = -1


class Segment(NamedTuple):
    """Tokens that cross the links together: a slice, or a chunk of one.

    number : among all segments of a layer.
    """

    number: int
    bounds: Range


class Relay:
    """What one place of a chain does with a prompt's segments (KV-Runahead, section 4.1, Fig. 5; cut-through is ours).

    Segments pass down the chain, forwarded as they arrive. A rank attends to its own slice while the prefix is in
    flight, and then to each segment of the prefix, beginning with the nearest rank's, which arrive first. In a layer
    with a window or chunks, a rank sends only tokens that the next rank, or a later one, can attend to. Each chunk is a
    segment, sent as soon as it is computed. The first chunk that attends waits for the whole prefix; later chunks need
    not wait. The last place ends with all keys and values, and computes the last token.

    position : the place, which is the index of the slice; places need not be in the order of the chain's ranks.
    known : number of first tokens that every rank has already, all within the first slice.
    chunk_tokens : ranks compute and send their tokens in chunks that end at multiples of this; None: at once.
    receives_all : also in layers with a window or chunks.
    saves_last_layer : output of the last layer that is not used is not computed.
    is_last : whether this place has the last slice.
    slices : the tokens that each place computes.
    own : those that this place computes; a layer's buffer ends with them.
    chunks : those that a layer of this place computes together, in order.
    """

    def __init__(
        self,
        partition: Partition,
        position: int,
        known: int = 0,
        chunk_tokens: int | None = None,
        *,
        receives_all: bool = False,
        saves_last_layer: bool = True,
    ) -> None:
        self.partition, self.position, self.known, self.chunk_tokens = partition, position, known, chunk_tokens
        self.receives_all, self.saves_last_layer = receives_all, saves_last_layer
        self.is_last, self.slices = position == partition.size - 1, partition.slices(known)
        self.own = self.slices[position]
        self.chunks = list(cut_range(*self.own, chunk_tokens))

    @cached_property
    def segments(self) -> list[list[Segment]]:
        """Each place's segments of a layer."""
        numbers = itertools.count()
        return [
            [Segment(next(numbers), part) for part in cut_range(*bounds, self.chunk_tokens)] for bounds in self.slices
        ]

    @cached_property
    def received(self) -> list[Segment]:
        """The segments of earlier places in the order of arrival: the nearest place's first, as computed there."""
        return list(itertools.chain(*reversed(self.segments[: self.position])))

    def messages(self, visibility: Visibility) -> Iterator[tuple[Segment, Range, Range | None]]:
        """Yield the segments of a layer that are sent or received, with the tokens that are here and those sent on.

        They are in the order in which they can be sent: later chunks of a place are computed after the first one has
        attended to all earlier places. Tokens of a layer with a window or chunks that no query of the receiver sees are
        left out.
        """

        def seen_from(position: int, bounds: Range) -> Range | None:
            first = bounds[0] if self.receives_all else max(bounds[0], visibility.first_key(position))
            return (first, bounds[1]) if first < bounds[1] else None

        (start, stop), places = self.own, self.segments[: self.position + (not self.is_last)]
        firsts, rests = [place[:1] for place in reversed(places)], [place[1:] for place in places]
        for segment in itertools.chain(*firsts, *rests):
            sent = None if self.is_last else seen_from(stop, segment.bounds)
            here = sent if segment.bounds[0] >= start else seen_from(start, segment.bounds)
            if here is not None:
                yield segment, here, sent

    def first_held(self, visibility: Visibility) -> int:
        """Position of the first token after the known ones from which this rank holds all of a layer."""
        return (
            self.known if self.receives_all or not self.position else max(self.known, visibility.first_key(self.own[0]))
        )


def relays(partition: Partition, known: int = 0, chunk_tokens: int | None = None) -> list[Relay]:
    """Return what every place does, first slice first."""
    return [Relay(partition, position, known, chunk_tokens) for position in range(partition.size)]


def in_two_groups(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Combine received segments into two groups; adjacent ones of a group become one call of attention.

    On a GPU, one call and one merge for each segment cost more time than overlapping with transfers saves. The first
    group has at least half of the tokens.
    """
    tokens, seen = sum(last - first for _, (first, last) in segments), 0
    groups: list[list[Segment]] = [[], []]
    for segment in segments:
        groups[2 * seen >= tokens].append(segment)
        seen += segment.bounds[1] - segment.bounds[0]
    return [group for group in groups if group]


def join_ranges(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Sort ranges, and join adjacent ones."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return tuple(found)


class PromptTransfers:
    """What a prompt's `LayerTransfers` share on one rank: forwarder, tags, waiting times, and bytes sent.

    It begins when at most one earlier prompt is in flight on this rank.

    forwarder : to the other ranks of the chain.
    relay : what this rank does.
    rotation : maps places to ranks of the chain.

    Raises `TransportError` if its messages need more tags than the transport has.
    """

    def __init__(self, forwarder: Forwarder, relay: Relay, layers: int, rotation: Rotation) -> None:
        self.forwarder, self.relay, self.layers, self.rotation = forwarder, relay, layers, rotation
        self._turn, segments, transport = 0, sum(map(len, relay.segments)), forwarder.transport
        self._tags_per_layer = max(segments, transport.size) + 1  # one more for states
        if (largest := self.tag(layers, self._tags_per_layer - 1) + 1) > transport.tag_ub:
            raise TransportError(
                f"{layers} layers in {segments} segments need message tags up to {largest}, and this MPI allows "
                f"{transport.tag_ub}: use larger chunks (parallel.chunk_tokens), fewer ranks per chain, or another MPI"
            )
        self.clock = Clock(forwarder.device)
        self.sent_bytes = 0  # including forwarded bytes
        with self.waiting("send wait"):
            self._turn = forwarder.begin()

    @contextmanager
    def waiting(self, kind: Wait, layer_idx: int = -1, peer: int = -1) -> Iterator[None]:
        """Count the time of a block as waiting for a rank of the chain, or for the link."""
        self.clock.mark(kind, layer_idx, peer)
        try:
            yield
        finally:
            self.clock.mark("continue")

    def tag(self, layer_idx: int, segment: int) -> int:
        """Return the tag of a segment's messages, unique among this prompt and its neighbors."""
        # Tags alternate between two turns, since a neighboring prompt may have another number of segments.
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
    posted: list[Transfer] = field(default_factory=list)
    _arriving: dict[int, Transfer] = field(default_factory=dict)  # by segment
    _own: list[tuple[int, Transfer]] = field(default_factory=list)  # with the position after their last token
    _is_begun: bool = False

    def post(self, *, is_filled: bool = False) -> None:
        """Announce the layer's sends and post its receives before it computes, once.

        With `is_filled`, this rank's own rows can be sent at once.
        """
        assert self.rows is not None, "its memory is allocated"
        relay = self.prompt.relay
        messages, self._is_begun = () if self._is_begun else relay.messages(self.visibility), True
        for (number, (first, last)), here, sent in messages:
            if first < relay.own[0]:
                self.receive(number, self.rows(*here), None if sent is None else sent[0] - here[0])
                continue
            self._own.append((last, self.announce(number, self.rows(*here))))
            if is_filled:
                self.share(last)
        if is_filled:
            self.share(relay.own[1])

    def receive(self, number: int, tensor: torch.Tensor, skipped: int | None = None) -> None:
        """Post the receive of a segment, which is forwarded without its first `skipped` rows (None: not at all)."""
        prompt = self.prompt
        source, tag = prompt.rotation.rank_of(prompt.relay.position - 1), prompt.tag(self.layer_idx, number)
        dest = None if skipped is None else prompt.rotation.rank_of(prompt.relay.position + 1)
        transfer = prompt.forwarder.receive(
            tensor, source, tag, dest, skipped or 0, layer=self.layer_idx, free=self.free if number != STATES else None
        )
        self._arriving[number] = transfer
        self.posted.append(transfer)
        prompt.sent_bytes += 0 if skipped is None else tensor[skipped:].nbytes

    def announce(self, number: int, tensor: torch.Tensor) -> Transfer:
        prompt = self.prompt
        dest, tag = prompt.rotation.rank_of(prompt.relay.position + 1), prompt.tag(self.layer_idx, number)
        transfer = prompt.forwarder.announce(tensor, dest, tag, layer=self.layer_idx)
        self.posted.append(transfer)
        prompt.sent_bytes += tensor.nbytes
        return transfer

    def share(self, stop: int) -> None:
        """Send this rank's segments that end at position `stop` or before, and are complete in the buffer."""
        for last, transfer in self._own:
            if last <= stop and not transfer.is_ready:
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
            with self.prompt.waiting("wait", self.layer_idx, transfer.span.peer):
                self.prompt.forwarder.wait(transfer)

    def is_through(self, *, wait: bool) -> bool:
        """Whether all messages have arrived and are forwarded; with `wait`, wait for that, and count the time."""
        forwarder = self.prompt.forwarder
        if not wait:
            forwarder.progress()
            return all(transfer.through for transfer in self.posted)
        with self.prompt.waiting("send wait", self.layer_idx):
            for transfer in self.posted:
                forwarder.wait(transfer, through=True)
        return True
