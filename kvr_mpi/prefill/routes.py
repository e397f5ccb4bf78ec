"""KV-Runahead's routes."""

from __future__ import annotations

import itertools

from kvr_mpi.kv.route import Hop, Route, Step
from kvr_mpi.partition import Partition, cut_range


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


def relays(partition: Partition, known: int = 0, chunk_tokens: int | None = None) -> list[Route]:
    """Make the route of every position, first slice first."""
    return [relay(partition, position, known, chunk_tokens=chunk_tokens) for position in range(partition.size)]
