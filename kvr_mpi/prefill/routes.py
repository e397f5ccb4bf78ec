"""The routes of the strategies: KV-Runahead's relay, the zigzag ring, and the paper's baseline, an all-gather."""

from __future__ import annotations

import itertools

from kvr_mpi.kv.route import Hop, Range, Route, Step
from kvr_mpi.partition import Partition, cut_range
from kvr_mpi.topology import following, others_after, others_before, preceding


def relay(
    partition: Partition,
    position: int,
    known: int = 0,
    *,
    sends_all: bool = False,
    chunk_tokens: int | None = None,
) -> Route:
    """KV-Runahead: segments go down the chain, forwarded as they arrive (section 4.1, Fig. 5; cut-through is ours).

    A rank attends to its own slice while the prefix is on its way, and then to each segment of the prefix, nearest
    first, since that has the shortest way. In a layer with a window or chunks, only those tokens are sent that the next
    rank, or a later one, can attend to. Each chunk is a segment, sent as soon as it is computed. The first chunk that
    attends waits for everything before the slice; later ones find it there.
    """
    last = partition.size - 1
    slices = [_after(partition, each, known) for each in range(partition.size)]
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
        capacity=partition.stop(position),
        hops=(*own, *(Hop(number, part, position - 1, dest) for number, part in before)),
        steps=(*_known_step(known), *(Step((number,), (part,)) for number, part in before)),
        reads_from=None if sends_all or not position else slices[position][0],
        next_reads_from=None if sends_all or dest is None else slices[dest][0],
        in_order=True,
    )


def ring(
    partition: Partition,
    position: int,
    known: int = 0,
    *,
    sends_all: bool = True,
    chunk_tokens: int | None = None,
    saves_last_layer: bool = False,
) -> Route:
    """Zigzag ring attention: rank r owns the r-th stretch from the front and from the back; segments go around.

    Every rank computes the same in every step, without tuning; every segment crosses every link but one. Segments are
    forwarded as they arrive, and attended to in the order of their coming, both stretches of a rank at once: by all
    queries to the near one of a rank before, or by those of the far stretch to both of a rank after. What nobody reads
    of the last layer is left out if that is lent to it.

    It takes no chunks: a rank's last tokens see those of all others, so the ranks would wait for each other's chunks in
    turn, and one of them compute at a time.
    """
    size = partition.size // 2
    halves = [_after(partition, each, known) for each in range(partition.size)]

    def stretches(rank: int) -> list[tuple[int, Range]]:
        return [(half, halves[half]) for half in (rank, 2 * size - 1 - rank)]

    dest, source = following(position, size), preceding(position, size)
    hops = [Hop(half, bounds, None, dest) for half, bounds in stretches(position)]
    steps, (near, far) = list(_known_step(known)), (bounds for _, bounds in stretches(position))
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
        capacity=partition.tokens,
        hops=tuple(hops),
        steps=tuple(steps),
        saves_last_layer=saves_last_layer,
        slots=4,  # both stretches of two ranks: what comes in can wait for nothing but what came in before
    )


def all_gather(
    partition: Partition,
    position: int,
    known: int = 0,
    *,
    sends_all: bool = True,
    chunk_tokens: int | None = None,
    is_dense: bool,
    saves_last_layer: bool = False,
) -> Route:
    """TSP: even slices; every rank receives all keys and values before it attends (section 3, Fig. 4).

    ``is_dense`` as in the paper: every rank computes its slice against the whole prompt and masks what lies after.
    Otherwise causal: what lies after a slice is not computed, and what nobody reads of the last layer is left out if
    that is lent to it. It takes no chunks: a rank attends when it has been sent everything.
    """
    size = partition.size
    own = _after(partition, position, known)
    others = [Hop(rank, _after(partition, rank, known), rank, None) for rank in range(size) if rank != position]
    before = ((0, own[0]),) if own[0] else ()
    return Route(
        partition,
        position,
        size - 1,
        size,
        owned=(own,),
        chunks=((own,),),
        capacity=partition.tokens,
        hops=(*(Hop(position, own, None, dest) for dest in others_after(position, size)), *others),
        steps=(Step(tuple(hop.segment for hop in others), before),),
        saves_last_layer=saves_last_layer and not is_dense,
        is_dense=is_dense,
        slots=2 * (size - 1),
    )


def _after(partition: Partition, position: int, known: int) -> Range:
    return max(partition.start(position), known), partition.stop(position)


def _known_step(known: int) -> tuple[Step, ...]:
    """Attend to the known prefix, which is local."""
    return (Step((), ((0, known),)),) if known else ()
