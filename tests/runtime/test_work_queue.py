"""Queues: every document is taken once, by whoever is free."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi.runtime.work_queue import WorkQueue
from kvr_mpi.transport.counters import open_counters
from kvr_mpi.transport.local import LocalTransport, run_local

lists_of_documents = st.lists(st.lists(st.integers(1, 1000), max_size=8), min_size=1, max_size=5)


def numbered(works: list[list[int]]) -> tuple[list[list[int]], dict[int, int]]:
    lists: list[list[int]] = []
    flat: dict[int, int] = {}
    for one in works:
        lists.append(list(range(len(flat), len(flat) + len(one))))
        flat |= dict(zip(lists[-1], one, strict=True))
    return lists, flat


@given(lists_of_documents, st.randoms(use_true_random=False))
def test_every_document_is_taken_once(works: list[list[int]], random: Random) -> None:
    lists, flat = numbered(works)
    counters = open_counters(LocalTransport(), 2 + len(lists))
    queues = [WorkQueue(lists, flat, own, counters, 2) for own in range(len(lists))]
    taken: list[int] = []
    while queues:
        queue = random.choice(queues)
        expected = queue.peek_document()
        number = queue.take_document()
        assert number == expected
        if number is None:
            assert len(taken) == len(flat), "a chain ends only when nothing is left anywhere"
            queues.remove(queue)
        else:
            taken.append(number)
    assert sorted(taken) == sorted(flat)
    assert counters.read()[:2] == [0, 0]


def test_the_own_list_comes_first_and_then_the_fullest() -> None:
    lists, works = numbered([[5], [1, 1], [9, 1]])
    counters = open_counters(LocalTransport(), 3)
    queue = WorkQueue(lists, works, 0, counters, 0)
    assert [queue.take_document() for _ in range(6)] == [0, 3, 1, 2, 4, None]


@pytest.mark.parametrize(
    ("own", "others", "expected"), [(4, 4, 4), (3, 5, 4), (0, 8, 4), (0, 1, 1), (5, 0, 5), (9, 4, 9)]
)
def test_a_chain_that_was_first_does_not_empty_the_lists_of_others(own: int, others: int, expected: int) -> None:
    # Taking what is put off costs no time: the first of two ranks once took seven of eight short documents.
    lists, works = numbered([[1] * own, [1] * others])
    queue = WorkQueue(lists, works, 0, open_counters(LocalTransport(), 2), 0)
    put_off = 0
    while queue.may_take(put_off) and queue.take_document() is not None:
        put_off += 1
    assert put_off == expected
    assert queue.may_take(0), "once they are prefilled, the rest can be taken"


@pytest.mark.parametrize("chains", [2, 4])
def test_chains_that_draw_at_the_same_time(chains: int) -> None:
    lists, works = numbered([[1] * 40, *[[] for _ in range(chains - 1)]])  # all but one are dry from the start

    def work(rank: LocalTransport) -> list[int]:
        counters = open_counters(rank, len(lists))
        queue, taken = WorkQueue(lists, works, rank.rank, counters, 0), []
        while (number := queue.take_document()) is not None:
            taken.append(number)
        return taken

    assert sorted(number for one in run_local(chains, work) for number in one) == list(range(40))
