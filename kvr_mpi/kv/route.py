"""A strategy as data: what each position of a chain owns, sends, receives and attends to, in order.

Tables of routes are made in ``prefill.routes``. One loop runs them: `LayerTransfers` moves segments, `SliceLayer`
attends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvr_mpi.kv.attention import PartialAttention
    from kvr_mpi.model.masks import Visibility
    from kvr_mpi.partition import Partition

Range = tuple[int, int]


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
class Step:
    """One step of attention, and the segments it waits for.

    segments : the segments that have to arrive first.
    ranges : the tokens attended to, one attention call each.
    first_query : index of the first query of this position that attends.
    """

    segments: tuple[int, ...]
    ranges: tuple[Range, ...]
    first_query: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """One strategy at one position of a prompt's slices; positions need not be in the order of the chain's ranks.

    partition : of the prompt.
    position : the position that this route is for.
    decode_position : the position that ends with all keys and values, and computes the last token.
    segments : number of segments of a layer, over all positions.
    owned : the tokens this position computes.
    chunks : the tokens that a layer computes together, in order; a single chunk unless slices are cut into chunks.
    hops : own segments in the order of sending, then the others in the order of arrival.
    steps : attention after that to this position's own tokens.
    reads_from : the first token of this position that attends to received tokens; None: it receives everything, also in
        layers with a window or chunks.
    next_reads_from : the same for the next position.
    in_order : each position's tokens follow those of the position before; only such routes can use chunks.
    saves_last_layer : output of the last layer that is not used is not computed.
    attend : attends to all tokens at once, given a query (1, heads, tokens, head_dim), all keys and values, the layer's
        parameters and the position of the first query; None: step by step. For baselines.
    slots : scratch buffers that a failed rank needs, so that the transfers cannot deadlock (``failure``).
    """

    partition: Partition
    position: int
    decode_position: int
    segments: int
    owned: tuple[Range, ...]
    chunks: tuple[tuple[Range, ...], ...]
    hops: tuple[Hop, ...]
    steps: tuple[Step, ...]
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


# Makes the route of one position, given the partition and the position (`prefill.routes.relay`).
MakeRoute = Callable[..., Route]


def in_two_groups(steps: tuple[Step, ...]) -> list[Step]:
    """Combine the steps that wait for segments into two; adjacent ranges become one call of attention.

    On a GPU, one call and one merge for each segment cost more time than overlapping with transfers saves. The first
    group has at least half of the tokens.
    """
    coming = [step for step in steps if step.segments]
    joined = [step for step in steps if not step.segments]
    tokens, seen, group = sum(total_tokens(step.ranges) for step in coming), 0, list[Step]()
    for step in coming:
        group.append(step)
        before, seen = seen, seen + total_tokens(step.ranges)
        if 2 * before < tokens <= 2 * seen or step is coming[-1]:
            segments = tuple(segment for one in group for segment in one.segments)
            joined.append(Step(segments, join_ranges([each for one in group for each in one.ranges])))
            group = []
    return joined


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
