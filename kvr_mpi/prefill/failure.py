"""A rank that runs out of memory in the middle of a prompt does not end the chain: it plays on as a dead hand.

The others wait for segments that come by way of this rank, and for it to take theirs. So it goes on to receive, to
pass on, and to send, through the last layer; what it sends in its own name has no meaning. Then all tell each other
how they fared, the last rank drops what it has computed, and the next prompt finds everything as if nothing had been.
"""

from __future__ import annotations

import torch

from kvr_mpi.prefill.cache import SliceCache


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch's on a GPU, its plain RuntimeError on a CPU, or Python's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        mark in str(error) for mark in ("can't allocate memory", "ALLOC_FAILED", "out of memory")
    )


def play_on(cache: SliceCache) -> None:
    """Take part in every transfer that is left of a prompt that failed here, in as little memory as that takes.

    Call it when the error is forgotten: its traceback holds what the model had made.
    """
    scratch = None
    for layer in cache.layers:
        if layer.is_over or layer.segments is None:
            continue
        if layer.buffer is None:
            if scratch is None:  # the layers that have buffers come first, and have given them back by now
                scratch = cache.buffers.scratch(cache.exchange.longest_segment())
            layer.segments.do_without(scratch, layer.shape.elements)
        cache.exchange.post(layer.segments)
        cache.exchange.share(layer.segments)
        layer.release(wait=True)


def agree(cache: SliceCache, has_failed: bool) -> list[int]:
    """Tell the ranks behind whether this one has failed; every rank of a chain calls it when its part is computed.

    Returns
    -------
    list of int
        On the last rank the places in the chain, first slice first, whose ranks have failed; on the others only
        whether they have themselves.
    """
    passage, place = cache.passage, cache.exchange.rank
    mine = [place] if has_failed else []
    if passage is None:
        return mine
    courier, last = passage.courier, passage.segments - 1

    def tag(segment: int) -> int:
        return passage.tag(passage.layers, segment)

    if place < last:
        courier.announce(passage.rank_of(place + 1), tag(place))
    words, parcels = [], []
    for segment in reversed(range(place)):
        word = torch.zeros(1, dtype=torch.int64, device=cache.device)
        onward = passage.rank_of(place + 1) if place < last else None
        parcels.append(courier.receive(word, passage.rank_of(place - 1), tag(segment), onward))
        words.append((segment, word))
    if place < last:
        word = torch.full((1,), int(has_failed), dtype=torch.int64, device=cache.device)
        courier.send(word, passage.rank_of(place + 1), tag(place))
        return mine
    for parcel in parcels:
        courier.wait(parcel)
    return sorted(mine + [segment for segment, word in words if int(word)])
