"""The queue from which chains take documents.

Each chain starts with its own list of documents and takes them from the front. A chain whose list is empty takes from
the list with the most work left, so that all chains end together, but collects no more documents for packed rows than
it leaves there. Shared counters record how much of each list is taken, so there is no coordinator and nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvr_mpi.transport.counters import Counters


class Slot(IntEnum):
    """Index of each counter that all ranks of a job share; the counters of the lists follow."""

    DONE = 0  # documents that are done
    WORK = 1  # work of documents that are done
    STOP = 2  # ranks that received a signal
    PREFILLED = 3  # work of prefilled prompts


FIRST_LIST = len(Slot)


class WorkQueue:
    """Lists of documents; each document is taken by exactly one chain.

    lists : document numbers for each chain; the same on every rank.
    works : work of each document, by number.
    own : index of this chain's list.
    first_slot : index of the first list's counter; each list's counter is the number of documents taken.
    """

    def __init__(
        self,
        lists: Sequence[npt.NDArray[np.int64]],
        works: npt.NDArray[np.int64],
        own: int,
        counters: Counters,
        first_slot: int,
    ) -> None:
        self._lists, self._works, self._own = lists, works, own
        self._sums = [np.concatenate([[0], np.cumsum(works[one])]) for one in lists]
        self._counters, self._first_slot = counters, first_slot

    def peek_document(self) -> int | None:
        """Return the next document without taking it."""
        found = self._fullest()
        return None if found is None else int(self._lists[found[0]][found[1]])

    def may_take(self, put_off: int) -> bool:
        """Whether to take more documents while `put_off` prompts wait to be packed.

        Collecting takes no time, so without a limit the first chain would empty the lists of chains that start later.
        """
        found = self._fullest()
        if found is None or found[0] == self._own:
            return True
        return put_off < len(self._lists[found[0]]) - found[1]

    def take_document(self) -> int | None:
        """Take a document from this chain's list, else from that with the most work left; None if all are empty."""
        while (found := self._fullest()) is not None:
            at = self._counters.add(self._first_slot + found[0])
            if at < len(self._lists[found[0]]):  # otherwise another rank has taken the last one
                return int(self._lists[found[0]][at])
        return None

    def work_of(self, number: int) -> int:
        """Work of a document."""
        return int(self._works[number])

    def _fullest(self) -> tuple[int, int] | None:
        """Return the list to take from, and the number of its documents taken; None if all are empty."""
        taken = self._counters.read()[self._first_slot :][: len(self._lists)]
        if taken[self._own] < len(self._lists[self._own]):
            return self._own, taken[self._own]
        left = [sums[-1] - sums[min(at, len(sums) - 1)] for sums, at in zip(self._sums, taken, strict=True)]
        fullest = max(range(len(left)), key=left.__getitem__)
        return (fullest, taken[fullest]) if taken[fullest] < len(self._lists[fullest]) else None
