"""The queue from which chains take documents.

Documents are shared out beforehand, a list to each chain, and drawn from the front. A chain whose list is empty draws
from the list with most left, so that all chains end together, but not more at a time than it leaves there. Counters
that any rank can add to say how far each list is used up: nobody coordinates, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from kvr_mpi.transport.counters import Counters


class Slot(IntEnum):
    """Index of each counter that all ranks of a job share; those of the lists follow them."""

    DONE = 0  # documents
    WORK = 1  # of documents that are done
    STOP = 2  # ranks that were told to stop
    PREFILLED = 3  # work whose tokens are prefilled
    TOKENS = 4  # of prompts and answers that are done


FIRST_LIST = len(Slot)


class WorkQueue:
    """Lists of documents; each document is taken by exactly one chain.

    Parameters
    ----------
    lists : sequence of sequences of int
        Documents' numbers, for each chain; the same on every rank.
    works : mapping
        How much work each document is.
    own : int
        The list to take from first.
    counters : Counters
    first_slot : int
        Of the counters, that of the first list; it says how many are taken of each list.
    """

    def __init__(
        self,
        lists: Sequence[Sequence[int]],
        works: Mapping[int, int],
        own: int,
        counters: Counters,
        first_slot: int,
    ) -> None:
        self._lists, self._works, self._own = lists, works, own
        self._counters, self._first_slot = counters, first_slot

    def peek_document(self) -> int | None:
        """Return the document that would be taken now, without taking it."""
        found = self._fullest()
        return None if found is None else self._lists[found[0]][found[1]]

    def may_take(self, put_off: int) -> bool:
        """Whether to take more documents in addition to prompts that wait to be packed.

        Putting off takes no time: a chain that was first would empty the lists of others that are about to begin.
        """
        found = self._fullest()
        if found is None or found[0] == self._own:
            return True
        return put_off < len(self._lists[found[0]]) - found[1]

    def take_document(self) -> int | None:
        """Take a document from the own list, else from the list with the most work left; None if all are empty."""
        while (found := self._fullest()) is not None:
            at = self._counters.add(self._first_slot + found[0])
            if at < len(self._lists[found[0]]):  # else another rank was faster
                return self._lists[found[0]][at]
        return None

    def work_of(self, number: int) -> int:
        """Work of a document."""
        return self._works[number]

    def _fullest(self) -> tuple[int, int] | None:
        """Return the list to take from, and how much of it is used."""
        taken = self._counters.read()[self._first_slot :][: len(self._lists)]
        if taken[self._own] < len(self._lists[self._own]):
            return self._own, taken[self._own]
        left = [sum(self._works[number] for number in one[at:]) for one, at in zip(self._lists, taken, strict=True)]
        fullest = max(range(len(left)), key=left.__getitem__)
        return (fullest, taken[fullest]) if taken[fullest] < len(self._lists[fullest]) else None
