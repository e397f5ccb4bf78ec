"""A tensor-parallel group: ranks that together hold one copy of a model's weights.

Each rank of a group runs the same tokens through its heads and its share of the rest, at once with the others: they
meet in every sum over the group (Megatron-LM, Shoeybi et al. 2019, section 3). A rank that fails on its way would leave
the others waiting there. So before a sum all tell each other, in a word, that they are here, and a rank that fails says
that instead; the others then fail, too, in the same place. What failed for want of memory they take for their own want
of memory, and what was stored and cannot be read for data that they cannot read, so that all of a group go on alike: in
halves, or with the next prompt.
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

# The word that a rank tells the others.
GOES_ON, NO_MEMORY, FAILED, BAD_DATA = 0, 1, 2, 3


class OtherRankMemoryError(MemoryError):
    """Another rank of the tensor-parallel group ran out of memory; all its ranks treat it as their own error."""


class OtherRankDataError(DataError):
    """Another rank of the tensor-parallel group cannot read stored data; no rank of it continues."""


class TensorParallelError(KvrError):
    """A tensor-parallel group cannot continue: a rank failed, or the connection was lost."""


class TensorParallelGroup:
    """This rank's membership in a tensor-parallel group.

    reduce : sums a contiguous tensor over the group's ranks, in place, to the same bits on all of them.
    tell : tells a word to all of them, and returns every rank's, in rank order.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        reduce: Callable[[torch.Tensor], None],
        tell: Callable[[int], Sequence[int]],
        is_memory_error: Callable[[BaseException], bool],
    ) -> None:
        self.rank, self.size = rank, size
        self._reduce, self._tell, self._is_memory_error = reduce, tell, is_memory_error
        self.is_alone = False
        self._has_told = False
        self._thread = threading.get_ident()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the group; return it, or a copy if it was not contiguous.

        Raises
        ------
        OtherRankMemoryError, OtherRankDataError, TensorParallelError
            If another rank has failed, and does not come.
        """
        if self.is_alone:
            return tensor
        total = tensor.contiguous()
        total.new_empty(total.numel() + 1)  # what the sum takes beside: if there is no memory for that, fail here
        if threading.get_ident() != self._thread:  # the others could not tell its sums from those of another thread
            raise TensorParallelError(
                "ranks of a tensor-parallel group meet in one thread each, and a chain of threads was to run on them"
            )
        self._meet(GOES_ON)
        try:
            self._reduce(total)
        except Exception as error:  # the others wait for data, and hear nothing else
            raise TensorParallelError(
                f"a sum over the {self.size} ranks of a tensor-parallel group failed: {error}"
            ) from error
        return total

    def total(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Sum integers over the group on its device."""
        import torch

        found: list[float] = self.all_reduce(torch.tensor(counts, dtype=torch.float64, device=device)).tolist()
        return [round(one) for one in found]

    def agree_on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast the first rank's tensor."""
        if self.rank and not self.is_alone:
            tensor = tensor.new_zeros(tensor.shape)
        return self.all_reduce(tensor)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run a function on all ranks of the group, and fail on all if it fails on any.

        What is undone after a failure has to be undone around this, and what may fail be within it; one may be in
        another.

        Raises
        ------
        OtherRankMemoryError, OtherRankDataError
            Where memory ran out, or stored data cannot be read, on another rank only.
        TensorParallelError
            Where another rank failed in another way than this one, or in any other.
        """
        if self.is_alone:
            yield
            return
        self._has_told = False
        try:
            yield
            self._meet(GOES_ON)
        except (OtherRankMemoryError, OtherRankDataError, TensorParallelError):  # all know
            self._has_told = True
            raise
        except Exception as error:
            if not self._has_told:  # by one within this one
                self._has_told = True
                own = self._word_of(error)
                if {*self._tell(own)} - {GOES_ON, own}:  # ranks would go on in different ways
                    raise TensorParallelError(
                        f"ranks of a tensor-parallel group of {self.size} failed in different ways at once"
                    ) from error
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use this rank's part as a model of its own within the block, without sums."""
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    def _word_of(self, error: Exception) -> int:
        """Encode how this rank failed."""
        if self._is_memory_error(error):
            return NO_MEMORY
        return BAD_DATA if isinstance(error, DataError) else FAILED

    def _meet(self, word: int) -> None:
        """Exchange with the other ranks whether to continue."""
        words = list(self._tell(word))
        if FAILED in words:
            raise TensorParallelError(
                f"rank {words.index(FAILED)} of the {self.size} ranks of this tensor-parallel group failed"
            )
        if {NO_MEMORY, BAD_DATA} <= {*words}:
            raise TensorParallelError(
                f"ranks of a tensor-parallel group of {self.size} failed in different ways at once"
            )
        if BAD_DATA in words:
            raise OtherRankDataError(
                f"rank {words.index(BAD_DATA)} of the {self.size} ranks of this tensor-parallel group cannot read "
                f"what is stored of it"
            )
        if NO_MEMORY in words:
            raise OtherRankMemoryError(
                f"out of memory on rank {words.index(NO_MEMORY)} of the {self.size} ranks of this tensor-parallel group"
            )


def guarded(tp_group: TensorParallelGroup | None) -> AbstractContextManager[Any]:
    """Run a function on all ranks of a group, if there is one (`TensorParallelGroup.guarded`)."""
    return nullcontext() if tp_group is None else tp_group.guarded()


def alone(tp_group: TensorParallelGroup | None) -> AbstractContextManager[Any]:
    """Use a rank's part as a model of its own, if it is in a group (`TensorParallelGroup.alone`)."""
    return nullcontext() if tp_group is None else tp_group.alone()
