"""Where a rank's documents come from, and where its results go.

Stands between the whole corpus and the crews that work on it. What is taken and what is done is counted in counters all
ranks share, so that a chain that runs dry helps the others, and every rank can say how far the whole job is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvr_mpi.documents import Corpus, Document
from kvr_mpi.kv.cache import layer_kv
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.report.progress import Progress
from kvr_mpi.runtime.requests import error_record
from kvr_mpi.runtime.stopping import Stop
from kvr_mpi.runtime.worker import ChainWorker
from kvr_mpi.store.outputs import Record
from kvr_mpi.store.shards import ShardWriter
from kvr_mpi.transport.counters import Counters


class Queue:
    """Documents of all chains of one length: a list for each, taken from the front, by whoever.

    Parameters
    ----------
    lists : sequence of sequences of int
        Documents' numbers.
    works : mapping of int to int
        How much work each is.
    own : int
        The list to take from first.
    counters, first_slot
        How many have been taken of each list.
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

    def peek(self) -> int | None:
        """Say what would be taken now, if nobody else took it."""
        found = self._fullest()
        return None if found is None else self._lists[found[0]][found[1]]

    def take(self) -> int | None:
        """Take a document: of the own list, or else of the one with most work left; None if all are empty."""
        while (found := self._fullest()) is not None:
            at = self._counters.add(self._first_slot + found[0])
            if at < len(self._lists[found[0]]):  # else another rank was faster
                return self._lists[found[0]][at]
        return None

    def _fullest(self) -> tuple[int, int] | None:
        """Find the list to take from, and how far it is used up."""
        taken = self._counters.read()[self._first_slot :][: len(self._lists)]
        if taken[self._own] < len(self._lists[self._own]):
            return self._own, taken[self._own]
        left = [sum(self._works[number] for number in one[at:]) for one, at in zip(self._lists, taken, strict=True)]
        fullest = max(range(len(left)), key=left.__getitem__)
        return (fullest, taken[fullest]) if taken[fullest] < len(self._lists[fullest]) else None


class Desk:
    """One rank's end of the whole corpus.

    Parameters
    ----------
    counters : Counters
        The first `SLOTS` of them are used here.
    keeps_kv : bool
        Whether keys and values are stored.
    check : callable, optional
        Raises if this job must not go on.
    """

    SLOTS = 4
    DONE, WORK, STOP, PREFILLED = range(SLOTS)  # WORK of what is done, PREFILLED: work whose tokens are prefilled

    def __init__(
        self,
        corpus: Corpus,
        counters: Counters,
        writer: ShardWriter,
        progress: Progress,
        stop: Stop,
        *,
        keeps_kv: bool,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._corpus, self._counters, self._writer, self._progress = corpus, counters, writer, progress
        self._stop, self._keeps_kv, self._check = stop, keeps_kv, check
        self._queue: Queue | None = None
        self._works: Mapping[int, int] = {}
        self._has_told = False

    def work_from(self, lists: Sequence[Sequence[int]], works: Mapping[int, int], own: int, first_slot: int) -> None:
        """Take documents from these lists from now on; see `Queue`."""
        self._queue, self._works = Queue(lists, works, own, self._counters, first_slot), works

    def refuse(self, number: int, reason: str) -> None:
        """Store why a document is not done."""
        self.hand_in(error_record(self._corpus.read(number), reason), 0)

    def take(self, crew: ChainWorker) -> int | None:
        """Take the next document's number; None if there is none, or it is not to be begun."""
        assert self._queue is not None, "work_from comes first"
        self.look()
        if not self._stop.reason and self._counters.read()[self.STOP]:
            self._stop.ask("another rank was told to stop")
        following = self._queue.peek()
        if following is None or not self._stop.has_time_for(crew.seconds_for(self._works[following])):
            return None
        return self._queue.take()

    def read(self, number: int) -> tuple[Document, int]:
        """Return a document and how much work it is; it is in flight from now on."""
        document = self._corpus.read(number)
        self._writer.begin([document.id])
        return document, self._works[number]

    def hand_in(self, record: Record, work: int, prefill: Prefill | None = None) -> None:
        """Store a result, and tell of it."""
        if self._keeps_kv and prefill is not None:
            cache = prefill.cache
            self._writer.write(record, [layer_kv(cache, layer) for layer in range(len(cache.layers))])
        else:
            self._writer.write(record)
        done = self._counters.add(self.DONE) + 1
        worked = self._counters.add(self.WORK, work) + work
        self._progress.document(record, done, worked, self._counters.read()[self.PREFILLED])

    def prefilled(self, document_id: str, prefill: Prefill, work: int) -> None:
        """Tell of a prompt whose answer is yet to come, and how much of the document's work its tokens are."""
        prefilled = self._counters.add(self.PREFILLED, work) + work
        self._progress.prefilled(document_id, prefill.partition.tokens, prefill.seconds, prefilled)

    @property
    def is_over(self) -> bool:
        """Whether there is no time left even for what is begun."""
        return self._stop.is_over

    def look(self) -> None:
        """Tell the others if this rank was told to stop."""
        if self._check is not None:
            self._check()
        if self._stop.heard and not self._has_told:
            self._has_told = True
            self._counters.add(self.STOP)
