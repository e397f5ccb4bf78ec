"""A rank that fails within a prompt still takes part in all transfers, so that the chain can continue.

A rank fails if it runs out of memory, or cannot read the stored prefix of the prompt.

The other ranks wait for segments from this rank, and for it to receive theirs. So it continues to receive, forward and
send through the last layer; its own segments then contain arbitrary data. At the end all ranks send their status to the
rank with the last slice, which drops its result. The next prompt is not affected.

The status of a rank that has not failed is a digest of the prompt's token ids and its plan. If the digests differ, the
job ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from kvr_mpi.errors import AgreementError, DataError
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.transfers import PromptTransfers
from kvr_mpi.model.tp_group import TensorParallelGroup, guarded
from kvr_mpi.topology import Rotation

# Status of a rank that has failed; the status of other ranks is a digest.
FAILED = -1
# Beginning of the error message if the stored prefix of a prompt cannot be read.
UNREADABLE = "the stored keys and values of the prompt's prefix cannot be used"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a computation failed: memory ran out, or a stored document is unreadable."""

    why: str
    is_unreadable: bool = False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch's error on a GPU, its RuntimeError on a CPU, or Python's MemoryError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        mark in str(error) for mark in ("can't allocate memory", "ALLOC_FAILED", "out of memory")
    )


def attempt(
    work: Callable[[], T], tp_group: TensorParallelGroup | None = None, *, reads_stored: bool = False
) -> T | Failure:
    """Call `work`; if memory runs out, return a `Failure`, since the exception's traceback would hold tensors.

    Parameters
    ----------
    tp_group : TensorParallelGroup or None
        Ranks that compute it together: if it fails on one, it fails on all.
    reads_stored : bool
        Return a `Failure` also if a stored document cannot be read; otherwise its `DataError` is raised.
    """
    try:
        with guarded(tp_group):
            return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Failure(next(iter(str(error).splitlines()), type(error).__name__))
    except DataError as error:
        if not reads_stored:
            raise
        return Failure(str(error), is_unreadable=True)


def play_on(cache: SliceCache) -> None:
    """Take part in the remaining transfers of a prompt that failed on this rank, with little memory."""
    slots: list[torch.Tensor] = []
    for layer in cache.layers:
        if layer.is_over or layer.segments is None:
            continue
        if layer.shape.elements:
            if layer.buffer is None:
                if not slots:  # layers with buffers come first, and have given them back
                    slots = cache.buffers.scratch(cache.route.longest_segment, cache.route.slots)
                layer.segments.do_without(slots, layer.shape.elements)
            layer.segments.post(cache.route)
            layer.segments.share(cache.route, cache.route.owned)
        if layer.shape.states:
            layer.play_on()
        layer.release(wait=True)


def digest_of(ids: Sequence[int], bounds: Sequence[int], strategy: str) -> int:
    """Return a 63-bit hash of a prompt's token ids, partition and strategy."""
    digest = hashlib.sha256(np.asarray(ids, "<i8").tobytes())
    digest.update(f"{strategy} {list(bounds)}".encode())
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def agree(
    transfers: PromptTransfers | None, place: int, decode_place: int, device: torch.device, digest: int | None
) -> list[int]:
    """Send this rank's status to the decode rank; every rank calls this after its slice.

    Status messages are forwarded like segments, from the place of each slice to the next, up to the decode rank.

    Parameters
    ----------
    place, decode_place : int
        Places of this rank's slice and of the decode rank's slice.
    digest : int or None
        Result of `digest_of`; None if this rank has failed.

    Returns
    -------
    list of int
        On the decode rank, the places of all ranks that failed, first slice first; on the others, only their own place
        if they failed.

    Raises
    ------
    AgreementError
        On the decode rank, if another rank has computed another prompt or plan.
    """
    has_failed = digest is None
    if transfers is None:
        return [place] if has_failed else []
    forwarder, size = transfers.forwarder, transfers.forwarder.transport.size
    # Steps along the chain: the decode rank has the last one, and the rank after it the first.
    way = Rotation.ending_at(size, decode_place)
    step = way.place_of(place)

    def tag(step: int) -> int:
        return transfers.tag(transfers.layers, step)

    after = None if place == decode_place else transfers.rank_of(place + 1)
    if after is not None:
        forwarder.announce(after, tag(step))
    words, receives = [], []
    for source in reversed(range(step)):
        word = torch.zeros(1, dtype=torch.int64, device=device)
        receives.append(forwarder.receive(word, transfers.rank_of(place - 1), tag(source), after))
        words.append((way.rank_of(source), word))
    if after is not None:
        status = FAILED if digest is None else digest
        forwarder.send(torch.full((1,), status, dtype=torch.int64, device=device), after, tag(step))
        return [place] if has_failed else []
    for receive in receives:
        forwarder.wait(receive)
    forwarder.wait_for_compute()
    found = {source: int(word) for source, word in words}
    for source, other in found.items():
        if digest is not None and other not in (FAILED, digest):
            raise AgreementError(
                f"rank {transfers.rank_of(source)} of the chain has computed another prompt or another plan (digest "
                f"{other:016x}) than rank {transfers.rank_of(place)} ({digest:016x}): the job ends before a wrong "
                f"answer is stored; please report this"
            )
    return sorted([place] * has_failed + [source for source, other in found.items() if other == FAILED])


def describe_failure(
    ranks: Sequence[int], computed: Sequence[int], failure: Failure | None, tokens: int, size: int
) -> str:
    """Describe which ranks of the chain failed, and what to do; `failure` is this rank's own."""
    if failure is not None and failure.is_unreadable:
        return f"{UNREADABLE}: {failure.why}"
    why = "" if failure is None else f" ({failure.why})"
    return (
        f"a prompt of {tokens} tokens: rank {', '.join(map(str, ranks))} of the {size} in its chain ran out of memory "
        f"with a slice of {', '.join(map(str, computed))} tokens{why}; use longer chains, or reserve less memory for "
        f"other prompts (parallel.memory_gib)"
    )
