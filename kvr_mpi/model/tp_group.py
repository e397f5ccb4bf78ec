"""A tensor-parallel group: ranks that together hold one copy of a model's weights.

All ranks of a group run the same tokens at the same time, each with its heads and its share of the other weights, and
communicate in every all-reduce over the group (Megatron-LM, Shoeybi et al. 2019, section 3). A rank that fails between
two all-reduces would leave the others waiting. So before each all-reduce, all ranks exchange a status word; a failed
rank sends its failure instead, and the others fail at the same point. With NCCL, GPUs all-reduce without their hosts:
the status is exchanged once, at the end of a prefill or a step, and a failure that arrives earlier aborts the
all-reduces. Such all-reduces can also be recorded in a CUDA graph, which is void after a failure.

If a rank runs out of memory or cannot read stored data, the others raise the same error, so that all ranks of the group
handle it in the same way: they split the work, or continue with the next prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import DataError, KvrError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

# Status words that ranks exchange.
GOES_ON, NO_MEMORY, FAILED, BAD_DATA = 0, 1, 2, 3


class TensorParallelError(KvrError):
    """A tensor-parallel group cannot continue: a rank failed, or the connection was lost."""


class TensorParallelGroup:
    """This rank's membership in a tensor-parallel group.

    reduce : sums a contiguous tensor over the group's ranks, in place, bitwise equal on all of them.
    tell : sends a status word to all ranks, and returns every rank's, in rank order.
    hears : returns whether another rank has sent a failure, so that sums are aborted; None: words are exchanged before
        every sum.
    keep_graph : called with each CUDA graph before sums are recorded in it; None: sums cannot be recorded.
    failures : number of failures of any rank so far. Graphs that were recorded before the last one are void.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        reduce: Callable[[torch.Tensor], None],
        tell: Callable[[int], Sequence[int]],
        is_memory_error: Callable[[BaseException], bool],
        hears: Callable[[], bool] | None = None,
        keep_graph: Callable[[Any], None] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._reduce, self._tell, self._is_memory_error = reduce, tell, is_memory_error
        self._hears, self._keep_graph, self.failures = hears, keep_graph, 0
        self._is_recording = False  # in a block of `recording`
        self.is_alone = False  # in a block of `alone`
        self._all_know = False  # of the failure in the current `guarded` block
        self._thread = threading.get_ident()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the group; return it, or a copy if it was not contiguous.

        Raises the errors of `guarded` if another rank has failed before.
        """
        if self.is_alone:
            return tensor
        total = tensor.contiguous()
        total.new_empty(total.numel() + 1)  # fail here if there is no memory for the sum's buffers
        if threading.get_ident() != self._thread:  # ranks cannot match the sums of two threads
            self._all_know = True
            raise TensorParallelError(
                "an all-reduce of a tensor-parallel group was called from a second thread; expected the thread "
                "that made the group"
            )
        if self._is_recording:
            self._reduce(total)
            return total
        self.raise_failures()
        try:
            self._reduce(total)
        except Exception as error:  # the other ranks wait for data, so the failure cannot be announced
            if self._hears is not None and self._hears():
                self._meet(GOES_ON)
            self._all_know = True
            raise TensorParallelError(
                f"an all-reduce over the {self.size} ranks of a tensor-parallel group failed: {error}"
            ) from error
        return total

    def raise_failures(self) -> None:
        """Raise the error of `guarded` if another rank has failed; call it before sums that are recorded."""
        if self._hears is None or self._hears():
            self._meet(GOES_ON)

    @property
    def can_record(self) -> bool:
        """Whether sums can be recorded in a CUDA graph."""
        return self._keep_graph is not None

    @contextmanager
    def recording(self, graph: Any) -> Iterator[None]:
        """Record the sums of the block in a CUDA graph; ranks neither wait for each other nor look for failures."""
        assert self._keep_graph is not None, "sums can be recorded"
        self._keep_graph(graph)
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def largest(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Return the largest of all ranks' integers at each place; every rank calls this."""
        own = self.rank * len(numbers)
        every = [0] * (self.size * len(numbers))
        every[own : own + len(numbers)] = numbers
        found = self.total(every, device)
        return [max(found[place :: len(numbers)]) for place in range(len(numbers))]

    def total(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Sum integers over the group on its device."""
        import torch

        found: list[float] = self.all_reduce(torch.tensor(counts, dtype=torch.float64, device=device)).tolist()
        return [round(one) for one in found]

    def agree_on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the first rank's tensor on all ranks."""
        if self.rank and not self.is_alone:
            tensor = tensor.new_zeros(tensor.shape)
        return self.all_reduce(tensor)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run a block on all ranks of the group; if it fails on any rank, it fails on all.

        The block contains everything that may fail; cleanup belongs around it. Blocks can be nested.

        Raises `MemoryError` or `DataError` if only other ranks ran out of memory, or only other ranks cannot read
        stored data; `TensorParallelError` if another rank failed with another error, or ranks failed in different ways.
        """
        if self.is_alone:
            yield
            return
        self._all_know = False
        try:
            yield
            self._meet(GOES_ON)
        except Exception as error:
            if not self._all_know:
                self._meet(self._word_of(error))
            raise

    def _word_of(self, error: Exception) -> int:
        """Return the status word for an error on this rank."""
        if self._is_memory_error(error):
            return NO_MEMORY
        return BAD_DATA if isinstance(error, DataError) else FAILED

    def _meet(self, word: int) -> None:
        """Exchange status words with the other ranks; raise an error if another rank failed differently."""
        self._all_know = True  # if this exchange fails, no rank would answer a second one
        words = list(self._tell(word))
        self._all_know = {*words} != {GOES_ON}
        self.failures += self._all_know
        failures = {*words} - {GOES_ON, word}
        if not failures:
            return
        failure = FAILED if FAILED in failures else failures.pop()
        which = f"rank {words.index(failure)} of the {self.size} ranks of this tensor-parallel group"
        if failure == FAILED:
            raise TensorParallelError(f"{which} failed")
        if failures or word != GOES_ON:  # ranks would continue differently
            raise TensorParallelError(
                f"ranks of a tensor-parallel group of {self.size} failed in different ways at once"
            )
        if failure == BAD_DATA:
            raise DataError(f"{which} cannot read its stored keys and values")
        raise MemoryError(f"out of memory on {which}")


def guarded(tp_group: TensorParallelGroup | None) -> AbstractContextManager[Any]:
    """Run a block on all ranks of a group, if there is one (`TensorParallelGroup.guarded`)."""
    return nullcontext() if tp_group is None else tp_group.guarded()


def recording(tp_group: TensorParallelGroup | None, graph: Any) -> AbstractContextManager[Any]:
    """Record the sums of a block in a CUDA graph, if there are any (`TensorParallelGroup.recording`)."""
    return nullcontext() if tp_group is None else tp_group.recording(graph)


@contextmanager
def alone(tp_group: TensorParallelGroup | None) -> Iterator[None]:
    """Within the block, use this rank's part, if it is in a group, as a separate model without all-reduces."""
    if tp_group is not None:
        tp_group.is_alone = True
    try:
        yield
    finally:
        if tp_group is not None:
            tp_group.is_alone = False
