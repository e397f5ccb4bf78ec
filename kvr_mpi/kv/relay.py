"""What each position of a chain owns, sends, receives and attends to, and its messages in flight.

A `Route` is a strategy as data: KV-Runahead's is `relay`; benchmarks make those of other strategies. One loop runs them
all: `LayerTransfers` makes messages of the `Forwarder` of its hops, and `chain.SliceLayer` attends in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvr_mpi.errors import TransportError
from kvr_mpi.kv.attention import PartialAttention
from kvr_mpi.kv.clock import Clock, Wait
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import Partition, cut_range
from kvr_mpi.topology import Rotation
from kvr_mpi.transport.base import FIRST_PROMPT_TAG
from kvr_mpi.transport.forwarder import Forwarder, Transfer

Range = tuple[int, int]


# Segment number of a layer's recurrent states, which each rank sends to the next, and their range of tokens.
STATES, NO_TOKENS = -1, (-1, -1)


@dataclass(frozen=True, slots=True)
class Hop:
    """What one position does with one segment.

    segment : its number among all segments of the layer.
    bounds : its tokens.
    source : position that it is received from; None: this position computes it.
    dest : position that it is sent to, or forwarded to as it arrives; None: it is not sent.
    """

    segment: int
    bounds: Range
    source: int | None
    dest: int | None


@dataclass(frozen=True, slots=True)
class Route:
    """One strategy at one position of a prompt's slices; positions need not be in the order of the chain's ranks.

    partition : of the prompt.
    position : the position that this route is for.
    decode_position : the position that ends with all keys and values, and computes the last token.
    segments : number of segments of a layer, over all positions.
    owned : the tokens this position computes.
    chunks : the tokens that a layer computes together, in order; a single chunk unless slices are cut into chunks.
    hops : own segments in the order of sending, then the others in the order of arrival, in which they are attended to.
    reads_from : the first token of this position that attends to received tokens; None: it receives everything, also in
        layers with a window or chunks.
    next_reads_from : the same for the next position.
    in_order : each position's tokens follow those of the position before; only such routes can use chunks.
    saves_last_layer : output of the last layer that is not used is not computed.
    attend : attends to all tokens at once, given a query (1, heads, tokens, head_dim), all keys and values, the layer's
        parameters and the position of the first query; None: segment by segment. For baselines.
    slots : scratch buffers that a failed rank needs, so that the transfers cannot deadlock (``failure``).
    """

    partition: Partition
    position: int
    decode_position: int
    segments: int
    owned: tuple[Range, ...]
    chunks: tuple[tuple[Range, ...], ...]
    hops: tuple[Hop, ...]
    reads_from: int | None = None
    next_reads_from: int | None = None
    in_order: bool = False
    saves_last_layer: bool = True
    attend: Callable[..., PartialAttention] | None = None
    slots: int = 1

    @property
    def capacity(self) -> int:
        """Tokens that a layer's buffer holds: those that this position computes or receives, and those before."""
        return max(last for _, last in (*self.owned, *(hop.bounds for hop in self.hops)))

    @property
    def received(self) -> list[Hop]:
        """The segments of other positions, in the order of arrival."""
        return [hop for hop in self.hops if hop.source is not None]

    @property
    def known(self) -> int:
        """Number of first tokens that every rank has already."""
        return min(first for first, _ in (*self.owned, *(hop.bounds for hop in self.hops)))

    def first_query(self, bounds: Range) -> int:
        """Return the index of this position's first token after a range of another position's."""
        return total_tokens(own for own in self.owned if own[0] < bounds[0])

    def messages(self, visibility: Visibility) -> Iterator[tuple[Hop, Range, Range | None]]:
        """Yield the hops of a layer with the tokens that are received or computed here, and those that are sent.

        Tokens of a layer with a window or chunks that no query of the receiver sees are left out.
        """

        def seen_from(position: int | None, bounds: Range) -> Range | None:
            first = bounds[0] if position is None else max(bounds[0], visibility.first_key(position))
            return (first, bounds[1]) if first < bounds[1] else None

        for hop in self.hops:
            sent = None if hop.dest is None else seen_from(self.next_reads_from, hop.bounds)
            here = sent if hop.source is None else seen_from(self.reads_from, hop.bounds)
            if here is not None:
                yield hop, here, sent

    def first_held(self, visibility: Visibility) -> int:
        """Position of the first token from which this rank holds all keys and values of a layer."""
        first = 0 if self.reads_from is None else visibility.first_key(self.reads_from)
        received_from = min((hop.bounds[0] for hop in self.hops if hop.source is not None), default=0)
        return 0 if first <= received_from else first


# Makes the route of one position, given the partition and the position (`relay`).
MakeRoute = Callable[..., Route]


def relay(
    partition: Partition,
    position: int,
    known: int = 0,
    *,
    chunk_tokens: int | None = None,
) -> Route:
    """Relay segments down the chain, forwarded as they arrive (KV-Runahead, section 4.1, Fig. 5; cut-through is ours).

    A rank attends to its own slice while the prefix is in flight, and then to each segment of the prefix, beginning
    with the nearest rank's, which arrive first. In a layer with a window or chunks, a rank sends only tokens that the
    next rank, or a later one, can attend to. Each chunk is a segment, sent as soon as it is computed. The first chunk
    that attends waits for the whole prefix; later chunks need not wait.

    position : of the slices that the route is for.
    known : number of first tokens that every rank has already, all within the first slice.
    chunk_tokens : ranks compute and send their tokens in chunks that end at multiples of this.
    """
    slices = partition.slices(known)
    last = len(slices) - 1
    parts = [list(cut_range(*bounds, chunk_tokens)) for bounds in slices]
    numbers = itertools.count()
    segments = [[(next(numbers), part) for part in some] for some in parts]
    dest = position + 1 if position < last else None
    own = [Hop(number, part, None, dest) for number, part in segments[position] if dest is not None]
    # The nearest rank's segments come first, in the order in which they are computed there.
    before = [each for some in reversed(segments[:position]) for each in some]
    return Route(
        partition,
        position,
        last,
        next(numbers),
        owned=(slices[position],),
        chunks=tuple((part,) for part in parts[position]),
        hops=(*own, *(Hop(number, part, position - 1, dest) for number, part in before)),
        reads_from=None if not position else slices[position][0],
        next_reads_from=None if dest is None else slices[dest][0],
        in_order=True,
    )


def relays(partition: Partition, known: int = 0, chunk_tokens: int | None = None) -> list[Route]:
    """Make the route of every position, first slice first."""
    return [relay(partition, position, known, chunk_tokens=chunk_tokens) for position in range(partition.size)]


def in_two_groups(hops: Sequence[Hop]) -> list[list[Hop]]:
    """Combine received segments into two groups; adjacent ones of a group become one call of attention.

    On a GPU, one call and one merge for each segment cost more time than overlapping with transfers saves. The first
    group has at least half of the tokens.
    """
    tokens, seen = total_tokens(hop.bounds for hop in hops), 0
    groups: list[list[Hop]] = [[], []]
    for hop in hops:
        groups[2 * seen >= tokens].append(hop)
        seen += total_tokens([hop.bounds])
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


def total_tokens(ranges: Iterable[Range]) -> int:
    """Return the number of tokens in ranges."""
    return sum(last - first for first, last in ranges)


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
            with self.prompt.waiting("wait", self.layer_idx, transfer.span.peer):
                self.prompt.forwarder.wait(transfer)

    def is_through(self, *, wait: bool) -> bool:
        """Whether all messages have arrived and are forwarded; with `wait`, wait for that, and count the time."""
        forwarder = self.prompt.forwarder
        if not wait:
            forwarder.progress()
            return all(transfer.through for transfer in self.posted.values())
        with self.prompt.waiting("send wait", self.layer_idx):
            for transfer in self.posted.values():
                forwarder.wait(transfer, through=True)
        return True
