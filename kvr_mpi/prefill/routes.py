"""The routes of the strategies: KV-Runahead's relay, and the zigzag ring."""

from __future__ import annotations

import itertools

from kvr_mpi.kv.route import Hop, Range, Route, Step
from kvr_mpi.partition import Partition, cut_range
from kvr_mpi.topology import following, others_before, preceding


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
    chunk_tokens : ranks compute and send their tokens in chunks that end at multiples of this. Only strategies that are
        `in_order` support chunks.
    """
    slices = partition.slices(known)
    last = len(slices) - 1
    parts = [list(cut_range(*bounds, chunk_tokens)) for bounds in slices]
    numbers = itertools.count()
    segments = [[(next(numbers), part) for part in some] for some in parts]
    dest = position + 1 if position < last else None
    own = [Hop(number, part, None, dest) for number, part in segments[position] if dest is not None]
    before_all = [Step((), ((0, known),))] if known else []  # the known tokens are local
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
        steps=(*before_all, *(Step((number,), (part,)) for number, part in before)),
        reads_from=None if not position else slices[position][0],
        next_reads_from=None if dest is None else slices[dest][0],
        in_order=True,
    )


def ring(
    partition: Partition,
    position: int,
    known: int = 0,
    *,
    chunk_tokens: int | None = None,
) -> Route:
    """Pass segments around a zigzag ring: rank r owns the r-th stretch from the front and the r-th from the back.

    Ranks compute the same amount in every step, without tuning; every segment crosses all links but one. Segments are
    forwarded as they arrive. A rank attends to both stretches of another rank in one step, in the order of arrival: for
    an earlier rank, all queries attend to its near stretch; for a later rank, the far stretch's queries attend to both.

    The ring does not support chunks: a rank's last tokens see those of all other ranks, so ranks would wait for each
    other's chunks, and compute one at a time.
    """
    size = partition.size // 2
    halves = partition.slices(known)

    def stretches(rank: int) -> list[tuple[int, Range]]:
        return [(half, halves[half]) for half in (rank, 2 * size - 1 - rank)]

    dest, source = following(position, size), preceding(position, size)
    hops = [Hop(half, bounds, None, dest) for half, bounds in stretches(position)]
    steps, (near, far) = [Step((), ((0, known),))] if known else [], (bounds for _, bounds in stretches(position))
    for rank in others_before(position, size):
        (_, first), (_, second) = stretches(rank)
        hops += [Hop(half, bounds, source, dest if dest != rank else None) for half, bounds in stretches(rank)]
        segments = tuple(half for half, _ in stretches(rank))
        if rank < position:
            steps.append(Step(segments, (first,)))
        else:
            joined = ((first[0], second[1]),) if first[1] == second[0] else (first, second)
            steps.append(Step(segments, joined, first_query=near[1] - near[0]))
    return Route(
        partition,
        position,
        0,  # owns the last stretch
        partition.size,
        owned=(near, far),
        chunks=((near, far),),
        hops=tuple(hops),
        steps=tuple(steps),
        slots=4,  # both stretches of two ranks: then a receive waits only for earlier receives
    )
