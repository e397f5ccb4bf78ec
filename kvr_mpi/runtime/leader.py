"""The leader of a chain, its first rank: reads documents, makes prompts, and chooses the next one.

Only the leader uses the queue and holds the waiting prompts. Its messages (``plan``) contain everything the other ranks
need, so all ranks process the same prompts in the same order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from kvr_mpi.decode.batch import MAX_SEQUENCES
from kvr_mpi.errors import DataError, DocumentError, UnavailableError, record_error
from kvr_mpi.events import Events
from kvr_mpi.runtime.plan import ChainMessage, EndPrefill, Plan
from kvr_mpi.runtime.planner import Planner
from kvr_mpi.runtime.prompt import Prompt
from kvr_mpi.runtime.requests import DocumentSource, Split, error_record
from kvr_mpi.runtime.result_sink import ResultSink
from kvr_mpi.runtime.stopping import Stop
from kvr_mpi.runtime.waves import Held, Next, WaveScheduler
from kvr_mpi.runtime.work_queue import WorkQueue
from kvr_mpi.store.record import Record


class Pace:
    """Work (characters or predicted milliseconds) and duration of a chain's waves, by one clock."""

    def __init__(self, now_s: float) -> None:
        self._began_s = self.wave_began_s = now_s
        self._past_work = self._wave_work = 0

    def begin_wave(self, now_s: float) -> None:
        """End the previous wave and begin a new one."""
        self._past_work += self._wave_work
        self.wave_began_s, self._wave_work = now_s, 0

    def add_work(self, work: int) -> None:
        """Add a document's work to this wave."""
        self._wave_work += work

    def seconds_for(self, work: int, now_s: float) -> float:
        """Estimate the seconds until a document of this much work is answered, after all work in progress."""
        if self._past_work:
            rate = (self.wave_began_s - self._began_s) / self._past_work
        elif self._wave_work:
            rate = 2 * (now_s - self.wave_began_s) / self._wave_work  # assume that decoding takes as long as prefill
        else:
            return 0.0
        return max(0.0, rate * (self._wave_work + work) - (now_s - self.wave_began_s))


class Leader:
    """Reads documents for a chain, and decides what it runs."""

    def __init__(
        self, planner: Planner, queue: WorkQueue, source: DocumentSource, sink: ResultSink, stop: Stop, events: Events
    ) -> None:
        self._queue, self._source, self._sink, self._stop, self._events = queue, source, sink, stop, events
        self._pace = Pace(time.monotonic())
        self._scheduler = WaveScheduler(planner, MAX_SEQUENCES)
        self._has_documents = True
        self._keys = (f"{planner.first_rank}-{planner.size}.{number}" for number in itertools.count(1))
        self._split: dict[str, Split] = {}  # documents in parts, by id
        self._parts: dict[str, Prompt] = {}  # their prompts, by key, until the outcome is known

    def begin_wave(self, held: Iterable[Held], parts: Iterable[tuple[str, Record]]) -> None:
        """Begin a wave, given the memory in use on each rank and the new records of document parts, by key."""
        self._pace.begin_wave(time.monotonic())
        self._scheduler.begin_wave(held)
        for key, record in parts:
            self._receive_part(key, record)

    def next_message(self, put_off: int) -> ChainMessage:
        """Decide on the next message to the chain, on which `put_off` prompts of this wave wait for a packed row."""
        while not self._stop.is_over:
            wave_s = time.monotonic() - self._pace.wave_began_s
            try:
                decision = self._scheduler.decide(wave_s=wave_s, has_documents=self._has_documents)
            except DocumentError as error:
                self._refuse_document(self._scheduler.next_prompt, str(error))
                continue
            if isinstance(decision, Plan):
                return decision
            if decision is Next.DECODE or not self._take_document(put_off):
                has_more = self._has_documents or self._scheduler.has_waiting
                return EndPrefill(has_more, has_more or bool(self._parts))
        return EndPrefill(has_more=False, goes_on=False)

    def _take_document(self, put_off: int) -> bool:
        """Take the next document; False if there is none, no time is left, or another chain should take it."""
        self._stop.announce()
        self._stop.listen()
        following = self._queue.peek_document()
        if following is not None:
            if not self._queue.may_take(put_off):
                return False
            seconds = self._pace.seconds_for(self._queue.work_of(following), time.monotonic())
            if self._stop.has_time_for(seconds) and (number := self._queue.take_document()) is not None:
                document, work = self._source.read(number), self._queue.work_of(number)
                self._events.begin("reading", document.id)
                self._pace.add_work(work)
                try:
                    self._add_prompts(self._source.request(document, work))
                except (DocumentError, DataError, UnavailableError) as error:
                    self._sink.write_record(error_record(document, record_error(error)), work)
                return True
        self._has_documents = False
        return False

    def _add_prompts(self, document: Split) -> None:
        prompts = document.make_prompts(self._keys)
        self._scheduler.add(prompts)
        self._split.pop(document.document.id, None)
        if not document.is_final:
            self._split[document.document.id] = document
            self._parts |= {prompt.key: prompt for prompt in prompts}

    def _receive_part(self, key: str, record: Record) -> None:
        """Process the record of a document part."""
        prompt = self._parts.pop(key, None)
        if prompt is None:  # its document has failed already
            return
        document = self._split[prompt.document_id]
        try:
            if document.receive(prompt.part, record):
                self._add_prompts(document)
        except DocumentError as error:
            self._refuse_document(prompt, str(error))

    def _refuse_document(self, prompt: Prompt, reason: str) -> None:
        """Write an error record for a prompt's document, and drop the document's prompts."""
        document_id = prompt.document_id
        self._split.pop(document_id, None)
        self._parts = {key: other for key, other in self._parts.items() if other.document_id != document_id}
        self._scheduler.drop_document(document_id)
        self._sink.write_record(prompt.error_record(reason), prompt.document_work)
