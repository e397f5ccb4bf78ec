"""A rank that fails within a prompt still takes part in all transfers, so that the chain can continue.

A rank fails if it runs out of memory, or cannot read the stored prefix of the prompt; with plain transformers, also if
the model's own code fails, such as past its last position.

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
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch

from kvr_mpi.errors import NOT_NOW, AgreementError, DataError, UnavailableError, record_error
from kvr_mpi.kv.chain import SliceRow
from kvr_mpi.kv.relay import LayerTransfers, PromptTransfers
from kvr_mpi.model.tp_group import TensorParallelGroup, guarded
from kvr_mpi.transport.forwarder import Transfer

# Status of a rank that has failed; the status of other ranks is a digest.
FAILED = -1
# Beginning of the error message if the stored prefix of a prompt cannot be read.
UNREADABLE = "the stored keys and values of the prompt's prefix cannot be used"

# What a model's code may raise if it does not support a prompt, a chain, or another attention than its own.
FAILURES = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, AssertionError)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a computation failed: memory ran out, a stored document is unreadable, or the model's own code failed."""

    why: str
    cause: Literal["memory", "stored", "model"] = "memory"

    def explain(self, work: str) -> str:
        """Return the reason as shown to users; `work` says what there was not enough memory for."""
        return f"not enough memory {work}: {self.why}" if self.cause == "memory" else self.why


def explain_unreadable(why: str) -> str:
    """Return the error of a prompt whose stored prefix cannot be read."""
    return why if why.startswith(NOT_NOW) else f"{UNREADABLE}: {why}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch's error on a GPU, its RuntimeError on a CPU, or Python's MemoryError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        mark in str(error) for mark in ("can't allocate memory", "ALLOC_FAILED", "out of memory")
    )


def attempt(
    work: Callable[[], T],
    tp_group: TensorParallelGroup | None = None,
    *,
    reads_stored: bool = False,
    is_plain: bool = False,
) -> T | Failure:
    """Call `work`; if memory runs out, return a `Failure`, since the exception's traceback would hold tensors.

    tp_group : ranks that compute it together: if it fails on one, it fails on all.
    reads_stored : return a `Failure` also if a stored document cannot be read; otherwise its `DataError` is raised.
    is_plain : return a `Failure` also if the model's own code fails, without chains and kernels of ours.
    """
    try:
        with guarded(tp_group):
            return work()
    except (DataError, UnavailableError) as error:
        if not reads_stored:
            raise
        return Failure(record_error(error), "stored")
    except (MemoryError, *FAILURES) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        if is_out_of_memory(error):
            return Failure(why)
        if not is_plain or isinstance(error, torch.AcceleratorError):  # after which a GPU computes nothing more
            raise
        why = f"transformers' own code fails ({type(error).__name__}: {why})"
        return Failure(f"{why}; if the prompt is too long for this model, lower prompt.max_tokens", "model")


def complete_transfers(cache: SliceRow) -> None:
    """Take part in the remaining transfers of a prompt that failed on this rank, with little memory."""
    slot: torch.Tensor | None = None
    for layer in cache.layers:
        if layer.segments is None:  # released, after everything was sent
            continue
        if layer.shape.elements:
            if layer.slab is None:
                if slot is None:  # layers with buffers come first, and have given them back
                    longest = max(last - first for each in cache.relay.segments for _, (first, last) in each)
                    slot = cache.buffers.scratch(longest)
                layer.segments.rows = partial(_scratch_rows, layer.segments, slot, layer.shape.elements)
                layer.segments.free = None
            layer.segments.post(is_filled=True)
        if layer.shape.states:
            layer.complete()
        layer.release(wait=True)


def _scratch_rows(segments: LayerTransfers, slot: torch.Tensor, elements: int, first: int, last: int) -> torch.Tensor:
    """Return memory for a message (tokens, elements), a view of the flat slot, after the message before is through."""
    if segments.posted:
        segments.prompt.forwarder.wait(segments.posted[-1], through=True)
    return slot[: (last - first) * elements].view(-1, elements)


def digest_of(ids: Sequence[int], bounds: Sequence[int]) -> int:
    """Return a 63-bit hash of a prompt's token ids and partition."""
    digest = hashlib.sha256(np.asarray(ids, "<i8").tobytes())
    digest.update(f"{list(bounds)}".encode())
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def agree(
    transfers: PromptTransfers | None,
    device: torch.device,
    digest: int | None,
    read: torch.Tensor | None = None,
    size_of: Callable[[int], int] = lambda place: 0,
) -> tuple[list[int], list[torch.Tensor]]:
    """Send this rank's status, and what it has read of the prompt, to the decode rank; all ranks call it after a slice.

    These messages are forwarded like segments, from each place to the next, up to the last, the decode rank.

    transfers : None: no other rank takes part.
    digest : result of `digest_of`; None if this rank has failed.
    read : values (values,), float64; None: none, or this rank has failed.
    size_of : number of values from a place.

    Returns the places of the ranks that failed: on the decode rank of all, first slice first; on the others only their
    own; and on the decode rank the values from each place, in order. Raises `AgreementError` on the decode rank, if
    another rank has computed another prompt or plan.
    """
    place = 0 if transfers is None else transfers.relay.position
    failed = [place] if digest is None else []
    values = torch.zeros(size_of(place), dtype=torch.float64, device=device) if read is None else read
    if transfers is None:
        return failed, [values]
    forwarder, rank_of = transfers.forwarder, transfers.rotation.rank_of
    after = None if transfers.relay.is_last else rank_of(place + 1)
    status = torch.full((1,), FAILED if digest is None else digest, dtype=torch.int64, device=device)
    if after is not None:
        message = torch.cat([status, values.view(torch.int64)])
        sent = forwarder.announce(message, after, transfers.tag(transfers.layers, place))
    received: dict[int, Transfer] = {}
    for source in reversed(range(place)):
        word, tag = status.new_zeros(1 + size_of(source)), transfers.tag(transfers.layers, source)
        received[source] = forwarder.receive(word, rank_of(place - 1), tag, after)
    if after is not None:
        forwarder.send(sent)
        return failed, []
    for transfer in received.values():
        forwarder.wait(transfer)
    forwarder.wait_for_compute()
    found = {source: int(transfer.tensor[0]) for source, transfer in received.items()}
    for source, other in found.items():
        if digest is not None and other not in (FAILED, digest):
            raise AgreementError(
                f"rank {rank_of(source)} of the chain has computed another prompt or another plan (digest "
                f"{other:016x}) than rank {rank_of(place)} ({digest:016x}): the job ends before a wrong answer is "
                f"stored; please report this"
            )
    parts = {source: transfer.tensor[1:].view(torch.float64) for source, transfer in received.items()} | {place: values}
    return sorted(failed + [source for source, other in found.items() if other == FAILED]), [
        parts[source] for source in sorted(parts)
    ]


def describe_failure(
    ranks: Sequence[int], computed: Sequence[int], failure: Failure | None, tokens: int, size: int
) -> str:
    """Describe which ranks of the chain failed, and what to do; `failure` is this rank's own."""
    if failure is not None and failure.cause == "stored":
        return explain_unreadable(failure.why)
    why = "" if failure is None else f" ({failure.why})"
    return (
        f"a prompt of {tokens} tokens: rank {', '.join(map(str, ranks))} of the {size} in its chain ran out of memory "
        f"with a slice of {', '.join(map(str, computed))} tokens{why}; use longer chains, or reserve less memory for "
        f"other prompts (parallel.memory_gib)"
    )
