"""The wave scheduler keeps its promises, whatever comes: alone, without ranks and without a clock."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvr_mpi.documents import Document
from kvr_mpi.errors import DocumentError
from kvr_mpi.events import Events
from kvr_mpi.runtime.leader import Leader
from kvr_mpi.runtime.plan import EndPrefill, Plan, Way
from kvr_mpi.runtime.prompt import Prompt
from kvr_mpi.runtime.waves import MAX_WAVE_S, Held, Next, WaveScheduler
from kvr_mpi.runtime.work_queue import WorkQueue
from kvr_mpi.transport.counters import open_counters
from kvr_mpi.transport.local import LocalTransport, run_local

FREE = 100


@dataclass(frozen=True)
class Request:
    """A prompt of so many bytes; or a prefix that the next prompts share."""

    document_id: str
    part: int
    bytes: int
    is_prefix: bool = False


@dataclass(frozen=True)
class Planned:
    """A prompt on a rank, and what it keeps there."""

    prompt: Request
    decode_rank: int
    kept: dict[int, int]


class Ranks:
    """A chain's memory; a prompt takes its bytes where it decodes, and half of them elsewhere while it is prefilled."""

    def __init__(self, size: int, *, decodes: bool = True) -> None:
        self.size, self.decodes = size, decodes

    def plan(self, request: Request, decode_rank: int) -> Planned:
        if request.bytes > FREE:
            raise DocumentError(f"{request.bytes} bytes")
        return Planned(request, decode_rank, {decode_rank: request.bytes} if self.decodes else {})

    def fits_shared(self, held_bytes: Sequence[int], largest: int) -> bool:
        return True

    def fits_beside(self, plan: Planned, held_bytes: Sequence[int]) -> bool:
        return all(
            self.needs(plan.prompt, plan.decode_rank, rank) + held <= FREE for rank, held in enumerate(held_bytes)
        )

    @staticmethod
    def needs(request: Request, decode_rank: int, rank: int) -> int:
        return request.bytes if rank == decode_rank else request.bytes // 2


documents = st.lists(st.lists(st.integers(1, FREE + 5), min_size=1, max_size=3), max_size=20)


@given(documents, st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_every_prompt_runs_once_and_memory_is_never_exceeded(
    documents: list[list[int]], size: int, most: int, left: int, decodes: bool
) -> None:
    ranks = Ranks(size, decodes=decodes)
    scheduler: Any = WaveScheduler(ranks, most)  # type: ignore[arg-type]
    queue = [
        [Request(str(number), part, size) for part, size in enumerate(one)] for number, one in enumerate(documents)
    ]
    expected: Counter[Request] = Counter()
    for one in queue:  # parts that come before one that is too large have started already
        expected.update(itertools.takewhile(lambda each: each.bytes <= FREE, one))
    held: list[list[Request]] = [[] for _ in range(size)]
    run: Counter[Request] = Counter()
    refused: list[str] = []
    waves = 0
    while queue or scheduler.has_waiting:
        assert (waves := waves + 1) <= 1 + sum(map(len, documents)), "a wave without a prompt"
        scheduler.begin_wave(Held(len(one), sum(each.bytes for each in one)) for one in held)
        while True:
            try:
                decision = scheduler.decide(wave_s=0.0, has_documents=bool(queue))
            except DocumentError as error:
                document = scheduler.next_prompt.document_id
                assert any(f"{size} bytes" == str(error) for size in documents[int(document)])
                refused.append(document)
                scheduler.drop_document(document)
                continue
            match decision:
                case Next.DECODE:
                    break
                case Next.DOCUMENT:
                    assert not scheduler.has_waiting
                    scheduler.add(queue.pop(0))
                case Planned(request, rank):
                    alone = not any(held)
                    for other in range(size):
                        total = ranks.needs(request, rank, other) + sum(each.bytes for each in held[other])
                        assert total <= FREE or alone
                    run[request] += 1
                    if decodes:
                        held[rank].append(request)
                        assert len(held[rank]) <= most or alone
        for one in held:  # the ranks decode, and some is left for the next wave
            del one[: max(0, len(one) - left) or 1]
    assert run == expected
    assert sorted(refused) == sorted(str(number) for number, one in enumerate(documents) if max(one) > FREE)


@given(st.integers(1, 6), st.integers(1, 40))
def test_no_rank_starves(size: int, prompts: int) -> None:
    scheduler: Any = WaveScheduler(Ranks(size), 1000)  # type: ignore[arg-type]
    scheduler.add(Request(str(number), 0, 1) for number in range(prompts))
    order = []
    while isinstance(decision := scheduler.decide(wave_s=0.0, has_documents=False), Planned):
        order.append(decision.decode_rank)
        held = [one.sequences for one in scheduler.held]
        assert max(held) - min(held) <= 1
    assert order == [number % size for number in range(len(order))]
    assert len(order) == min(prompts, len(order)) and (len(order) == prompts or sum(held) > FREE // 2)


def test_a_long_wave_ends_as_soon_as_there_is_something_to_decode() -> None:
    scheduler: Any = WaveScheduler(Ranks(2), 9)  # type: ignore[arg-type]
    scheduler.add([Request("0", 0, 1), Request("1", 0, 1)])
    late = MAX_WAVE_S + 1
    assert isinstance(scheduler.decide(wave_s=late, has_documents=True), Planned)  # else it would wait for ever
    assert scheduler.decide(wave_s=late, has_documents=True) is Next.DECODE
    assert isinstance(scheduler.decide(wave_s=MAX_WAVE_S, has_documents=True), Planned)


def leader_of(plan: Any, parts: list[Prompt], written: list[Any]) -> Leader:
    """A leader on one rank with room for everything, and a document in parts."""
    document: Any = SimpleNamespace(document=Document("a", ""), is_final=False, make_prompts=lambda keys: parts)
    source: Any = SimpleNamespace(read=lambda number: document.document, request=lambda document_, work: document)
    left = [0]
    fits: dict[str, Any] = {"fits_beside": lambda plan, held: True, "fits_shared": lambda held, largest: True}
    planner: Any = SimpleNamespace(size=1, first_rank=0, plan=plan, **fits)
    queue: Any = SimpleNamespace(
        peek_document=lambda: next(iter(left), None),
        may_take=lambda put_off: True,
        take_document=left.pop,
        work_of=lambda number: 1,
    )
    sink: Any = SimpleNamespace(write_record=lambda record, work: written.append(record))
    stop: Any = SimpleNamespace(
        announce=lambda: None, listen=lambda: None, has_time_for=lambda seconds: True, is_over=False
    )
    leader = Leader(planner, queue, source, sink, stop, Events())
    leader.begin_wave([Held()], [])
    return leader


def parts_of(count: int) -> list[Prompt]:
    about: dict[str, Any] = {"document_id": "a", "new_tokens": 1, "parts": count, "is_final": False}
    return [Prompt(ids=(1, 2), key=f"{part}", part=part, **about) for part in range(count)]


def test_a_part_that_does_not_fit_fails_its_document_once() -> None:
    """Also if another part is being answered, whose record comes later."""
    parts, written = parts_of(3), list[Any]()

    def plan(prompt: Prompt, decode_rank: int) -> Plan:
        if prompt.part == 1:
            raise DocumentError("too large")
        return Plan(Way.ALONE, prompt, None, decode_rank, needs=[1], kept={0: 1})

    leader = leader_of(plan, parts, written)
    first = leader.next_message(0)
    assert isinstance(first, Plan) and first.prompt.part == 0
    assert leader.next_message(0) == EndPrefill(has_more=False, goes_on=False)
    leader.begin_wave([Held()], [("0", parts[0].error_record(""))])
    assert [(record.id, record.error) for record in written] == [("a", "too large")]
    assert leader.next_message(0) == EndPrefill(has_more=False, goes_on=False)


def test_many_short_prompts_are_decoded_together_where_memory_allows() -> None:
    """A GPU decodes 128 short prompts in hardly more time than 64."""
    leader = leader_of(
        lambda prompt, rank: Plan(Way.ALONE, prompt, None, rank, needs=[1], kept={0: 1}), parts_of(300), []
    )
    planned = list(
        itertools.takewhile(lambda message: isinstance(message, Plan), iter(lambda: leader.next_message(0), None))
    )
    assert 128 <= len(planned) < 300


# Queues: every document is taken once, by whoever is free


lists_of_documents = st.lists(st.lists(st.integers(1, 1000), max_size=8), min_size=1, max_size=5)


def numbered(works: list[list[int]]) -> tuple[list[Any], Any]:
    flat = np.array([work for one in works for work in one], np.int64)
    ends = np.cumsum([len(one) for one in works])
    return [np.arange(end - len(one), end) for one, end in zip(works, ends, strict=True)], flat


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
    assert sorted(taken) == list(range(len(flat)))
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
