"""The ranks of one chain at work: waves of prompts, prefilled one behind the other and then decoded together.

Stands between the engine, which runs one prompt, and the batch, which has the documents. A wave goes on until the
ranks' memory is full or nothing is left. While it does, prompts follow each other through the chain without a barrier,
each with another rank last (the *decode rank*, which keeps the cache), so that all ranks come to hold their share; prompts
too short for a chain are prefilled packed, by one rank each. Then every rank decodes all it holds at once, and a new
wave begins when a quarter is left: what has not ended yet goes on with the next wave's.

All ranks of a chain go the same way: what one of them decides (which document, whether to end a wave) or knows (an
answer) is told to the others. Sums are made of the same numbers everywhere.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from kvr_mpi.decode.batch import DecodeBatch, Finished
from kvr_mpi.documents import Document
from kvr_mpi.documents.prompts import Prompt
from kvr_mpi.errors import DocumentError
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.runtime.chain_runner import PACK_TOKENS, ChainRunner
from kvr_mpi.runtime.requests import DocumentRequest, Outcome, error_record
from kvr_mpi.schedule.forecast import MOST_TOGETHER
from kvr_mpi.store.outputs import Record
from kvr_mpi.transport import gather_json, share_json

# A wave's prefill ends after this time even if there is memory left, so that answers come to be written.
WAVE_S = 300.0


class Desk(Protocol):
    """Where documents come from and results go."""

    def take(self, crew: ChainWorker) -> int | None:
        """Take the next document's number; None if there is none, or none is to be begun."""

    def read(self, number: int) -> tuple[Document, int]:
        """Return a document and how much work it is."""

    def hand_in(self, record: Record, work: int, prefill: Prefill | None = None) -> None:
        """Store a result, and with it what the prompt's cache holds if that is wanted."""

    def prefilled(self, document_id: str, prefill: Prefill, work: int) -> None:
        """Tell of a prompt whose answer is yet to come, and how much of the document's work its tokens are."""

    def look(self) -> None:
        """Tell the others if this rank was told to stop."""

    @property
    def is_over(self) -> bool:
        """Whether there is no time left even for what is begun."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt of a document."""

    key: str
    reading: DocumentRequest
    part: int

    @property
    def prompt(self) -> Prompt:
        """The prompt itself."""
        return self.reading.prompts[self.part]

    @property
    def work(self) -> int:
        """This prompt's share of its document's work, by tokens of the document itself."""
        reading = self.reading
        if reading.past:  # an answer about answers
            return 0
        return reading.work * self.prompt.tokens // sum(prompt.tokens for prompt in reading.prompts)


class Kept:
    """The prompts a rank keeps and decodes, whatever chains it was in when they were prefilled.

    Parameters
    ----------
    pool : Pool
    """

    def __init__(self, pool: DecodeBatch) -> None:
        self.pool = pool
        self.tasks: dict[str, PromptRequest] = {}

    def add(self, task: PromptRequest, prefill: Prefill, seed: int) -> None:
        """Take in a prompt behind its prefill."""
        self.tasks[task.key] = task
        self.pool.add(task.key, prefill, task.prompt.ids, seed)

    def step(self) -> list[tuple[PromptRequest, Finished]]:
        """Write one token of every answer, and return those that are finished."""
        return [(self.tasks.pop(finished.key), finished) for finished in self.pool.step()]

    def drain(self, desk: Desk) -> Tally:
        """Finish all answers, when there is nothing else to do."""
        began, tally = time.monotonic(), Tally()
        while self.pool.running and not desk.is_over:
            for task, finished in self.step():
                tally.count(task, finished)
                hand_in(desk, task, finished)
            desk.look()
        tally.decode_s = time.monotonic() - began
        return tally


def hand_in(desk: Desk, task: PromptRequest, finished: Finished) -> None:
    """Store the answer to a document's final prompt, or why there is none."""
    reading = task.reading
    if finished.answer is None:
        desk.hand_in(error_record(reading.document, finished.error or "unknown"), reading.work)
    else:
        desk.hand_in(reading.record(finished.prefill, finished.answer), reading.work, finished.prefill)


@dataclass(slots=True)
class Tally:
    """What a rank did, and how long it took."""

    phase_s: float = 0.0  # in prefill phases
    busy_s: float = 0.0  # of them, computing
    decode_s: float = 0.0
    prompt_tokens: int = 0  # of prompts this rank kept
    new_tokens: int = 0

    def count(self, task: PromptRequest, finished: Finished) -> None:
        """Count an answer."""
        if finished.answer is not None:
            self.prompt_tokens += task.prompt.tokens
            self.new_tokens += len(finished.answer.token_ids)

    def add(self, other: Tally) -> None:
        """Add what was done elsewhere."""
        for spec in fields(self):
            setattr(self, spec.name, getattr(self, spec.name) + getattr(other, spec.name))


class ChainWorker:
    """One rank's view of its chain at work.

    Parameters
    ----------
    engine : Engine
        On this chain.
    desk : Desk
    kept : Kept
        What this rank decodes; with what earlier crews left in it.
    """

    def __init__(self, engine: ChainRunner, desk: Desk, kept: Kept) -> None:
        self._engine, self._desk, self._chain, self._mine = engine, desk, engine.chain, kept
        self._forwarder = engine.open_forwarder()
        self._packs: list[PromptRequest] = []  # to be prefilled by this rank alone
        self._told: list[tuple[str, Outcome]] = []  # by this rank, when the wave ends
        # The same on every rank:
        self._waiting: deque[PromptRequest] = deque()
        self._parted: dict[str, PromptRequest] = {}  # parts of documents that are split, until their outcome is known
        self._kept_bytes = [0] * self._chain.size
        self._kept = [0] * self._chain.size
        self._numbers = self._numbers_begun = 0
        self._tally = Tally()
        # For the time a document will take:
        self._began = self._wave_began = time.monotonic()
        self._work = self._wave_work = 0

    def run(self) -> Tally:
        """Work until no document is left to prefill, or none is to be begun; what is kept then is decoded later."""
        more = True
        self._meet()
        while (more or self._waiting or self._parted) and not self._chain_is_over():
            self._wave_began, self._wave_work = time.monotonic(), 0
            more = self._prefill_wave(more)
            if more or self._waiting or self._parted:
                self._decode(leaving=more)
                self._meet()
            self._work += self._wave_work
        if self._forwarder is not None:
            self._forwarder.close()
        return self._tally

    def _chain_is_over(self) -> bool:
        """Say whether the chain has no time left; its first rank looks at the clock for all."""
        is_over = self._desk.is_over
        return is_over if self._chain.size == 1 else bool(share_json(self._chain, is_over))

    def seconds_for(self, work: int) -> float:
        """Estimate how long it takes from now until a document of so much work is answered, with all in hand."""
        now = time.monotonic()
        if self._work:
            rate = (self._wave_began - self._began) / self._work
        elif self._wave_work:
            rate = 2 * (now - self._wave_began) / self._wave_work  # decoding is yet to come: say, as long again
        else:
            return 0.0
        return max(0.0, rate * (self._wave_work + work) - (now - self._wave_began))

    def _prefill_wave(self, more: bool) -> bool:
        """Prefill what fits; say whether documents may be left."""
        began, is_open = time.monotonic(), True
        while is_open:
            order = self._decide(more)
            if order == "end":
                more = is_open = False
            elif order == "close":
                is_open = False
            elif order == "next":
                is_open = self._begin_next()
            else:
                self._open(int(order))
        for tasks in _packs(self._packs):
            prefills = self._engine.prefill_packed([task.prompt for task in tasks])
            for task, prefill in zip(tasks, prefills, strict=True):
                self._tally.busy_s += prefill.seconds / len(tasks)
                self._keep(task, prefill)
        self._packs = []
        self._tally.phase_s += time.monotonic() - began
        return more

    def _decide(self, more: bool) -> str:
        """Say what comes next; the chain's first rank decides for all."""
        order = ""
        if self._chain.rank == 0:
            if any(self._kept) and time.monotonic() - self._wave_began > WAVE_S:
                order = "close"
            elif self._waiting:
                order = "next"
            else:
                number = self._desk.take(self) if more else None
                order = "end" if number is None else str(number)
        return order if self._chain.size == 1 else str(share_json(self._chain, order))

    def _open(self, number: int) -> None:
        """Make a document's prompts."""
        document, work = self._desk.read(number)
        self._wave_work += work
        try:
            reading = DocumentRequest(document, self._engine.prompt_config, work)
            for prompt in reading.prompts:
                self._engine.check_fits(prompt)
        except DocumentError as error:
            self._refuse(document, work, str(error))
        else:
            self._wait(reading)

    def _wait(self, reading: DocumentRequest) -> None:
        for part in range(len(reading.prompts)):
            self._numbers += 1
            task = PromptRequest(f"{self._chain.size}.{self._numbers}", reading, part)
            self._waiting.append(task)
            if not reading.is_final:
                self._parted[task.key] = task

    def _refuse(self, document: Document, work: int, reason: str) -> None:
        """Hand in an error that all ranks of the chain know of."""
        if self._chain.rank == 0:
            self._desk.hand_in(error_record(document, reason), work)

    def _begin_next(self) -> bool:
        """Prefill the next prompt, if there is room for it; say whether there was."""
        task, engine = self._waiting[0], self._engine
        decode_rank = self._next_decode_rank()
        if any(self._kept) and (
            self._kept[decode_rank] >= MOST_TOGETHER or not engine.has_room(task.prompt, decode_rank, self._kept_bytes)
        ):
            return False
        self._waiting.popleft()
        self._numbers_begun += 1
        if engine.new_tokens:
            self._kept[decode_rank] += 1
            self._kept_bytes[decode_rank] += engine.kept_bytes(task.prompt)
        if engine.goes_alone(task.prompt):
            if self._chain.rank == decode_rank:
                self._packs.append(task)
        else:
            prefill = engine.prefill(task.prompt, decode_rank, self._forwarder)
            self._tally.busy_s += prefill.seconds - prefill.wait_s - prefill.send_wait_s
            if self._chain.rank == decode_rank:
                self._keep(task, prefill)
        return True

    def _next_decode_rank(self) -> int:
        """Choose the rank that keeps the next prompt: in turn, as long as all keep as much."""
        ranks = range(self._chain.size)
        turn = self._numbers_begun % self._chain.size
        return min(ranks, key=lambda rank: (self._kept[rank], self._kept_bytes[rank], (rank - turn) % len(ranks)))

    def _keep(self, task: PromptRequest, prefill: Prefill) -> None:
        """Take a prompt that was prefilled into the pool."""
        self._desk.look()
        if prefill.error is not None:
            self._fail(task, prefill.error)
            return
        if self._engine.new_tokens:
            self._desk.prefilled(task.reading.document.id, prefill, task.work)
        self._mine.add(task, prefill, self._engine.seed_of(task.reading.document.id))
        if not self._engine.new_tokens:  # nothing to decode: it need not wait for the others
            self._step()

    def _decode(self, *, leaving: bool) -> None:
        """Decode what this rank holds; leave when little is left and other documents wait."""
        began, held = time.monotonic(), self._mine.pool.running
        few = max(0, held - 1) if self._chain.size == 1 else held // 4
        while self._mine.pool.running > (few if leaving or self._waiting else 0) and not self._desk.is_over:
            self._step()
            self._desk.look()
        self._tally.decode_s += time.monotonic() - began

    def _step(self) -> None:
        for task, finished in self._mine.step():
            self._tally.count(task, finished)
            if finished.answer is None:
                self._fail(task, finished.error or "unknown")
            elif task.reading.is_final:
                hand_in(self._desk, task, finished)
            else:
                self._told.append((task.key, task.reading.outcome(task.part, finished.prefill, finished.answer)))

    def _fail(self, task: PromptRequest, reason: str) -> None:
        """Take note of a prompt that failed on this rank."""
        if task.reading.is_final:
            self._desk.hand_in(error_record(task.reading.document, reason), task.reading.work)
        else:
            self._told.append((task.key, Outcome(error=reason)))

    def _meet(self) -> None:
        """Tell each other what is kept and was answered."""
        mine: dict[str, Any] = {
            "kept": len(self._mine.tasks),
            "bytes": sum(self._engine.kept_bytes(task.prompt) for task in self._mine.tasks.values()),
            "told": [(key, asdict(outcome)) for key, outcome in self._told],
        }
        self._told = []
        if self._chain.size > 1:
            self._chain.barrier()  # it sleeps, so that those that still decode have their cores
            ranks = share_json(self._chain, gather_json(self._chain, mine))
        else:
            ranks = [mine]
        self._kept, self._kept_bytes = [rank["kept"] for rank in ranks], [rank["bytes"] for rank in ranks]
        for rank in ranks:
            for key, outcome in rank["told"]:
                self._hear(key, Outcome(**outcome))

    def _hear(self, key: str, outcome: Outcome) -> None:
        """Take what became of a part of a document."""
        task = self._parted.pop(key, None)
        if task is None:  # of a document that failed before
            return
        reading = task.reading
        try:
            if reading.hear(task.part, outcome):
                for prompt in reading.prompts:
                    self._engine.check_fits(prompt)
                self._wait(reading)
        except DocumentError as error:
            self._parted = {key: task for key, task in self._parted.items() if task.reading is not reading}
            self._waiting = deque(task for task in self._waiting if task.reading is not reading)
            self._refuse(reading.document, reading.work, str(error))


def _packs(tasks: list[PromptRequest]) -> list[list[PromptRequest]]:
    """Group prompts, as they come, so that none but a single one exceeds `PACK_TOKENS`."""
    packs: list[list[PromptRequest]] = []
    room = 0
    for task in tasks:
        room -= task.prompt.tokens
        if room < 0 or not packs:
            packs.append([])
            room = PACK_TOKENS - task.prompt.tokens
        packs[-1].append(task)
    return packs
