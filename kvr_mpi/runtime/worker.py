"""One rank of a chain at work: wave after wave of prompts is prefilled and then decoded, until no document is left.

Stands between one prompt's run (`ChainRunner`) and the whole job (``batch``). Prompts follow each other through the
chain without a barrier; those too short for a chain are prefilled by one rank each, packed into rows. Then every rank
decodes all of its answers together. A new wave begins when a quarter of them is left, and these continue with it.

All ranks of a chain take the same decisions: the first rank decides, and broadcasts the decision. Whatever only one
rank knows, such as an answer, is exchanged between two waves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvr_mpi.decode.batch import MAX_SEQUENCES
from kvr_mpi.documents import Document
from kvr_mpi.errors import DataError, DocumentError
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import PACK_TOKENS
from kvr_mpi.requests.document_request import DocumentRequest, PromptOutcome, PromptRequest, error_record, seed_of
from kvr_mpi.requests.sources import Source
from kvr_mpi.runtime.chain_runner import ChainRunner
from kvr_mpi.runtime.decoder import Decoder
from kvr_mpi.runtime.pace import Pace
from kvr_mpi.runtime.planned_prompt import PlannedPrompt
from kvr_mpi.runtime.result_sink import ResultSink
from kvr_mpi.runtime.stopping import SharedStop
from kvr_mpi.runtime.tally import Tally
from kvr_mpi.runtime.tracing import Trace
from kvr_mpi.runtime.waves import EndWave, Held, PrefillPrompt, RefuseDocument, TakeDocument, WaveScheduler
from kvr_mpi.runtime.work_queue import WorkQueue
from kvr_mpi.setup.host_memory import HeapTrimmer
from kvr_mpi.topology import first_of_each
from kvr_mpi.transport import Transport, gather_json, share_json


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a rank works with, independent of its chain.

    source : where documents come from.
    sink : where results go.
    decoder : the answers that this rank decodes.
    trace : the rank's recording of its own work.
    """

    source: Source
    sink: ResultSink
    decoder: Decoder
    stop: SharedStop
    tally: Tally
    trace: Trace


@dataclass(frozen=True, slots=True)
class OpenDocument:
    """A document was taken, by its number in the corpus."""

    number: int


@dataclass(frozen=True, slots=True)
class NoDocuments:
    """No document is left, or none may be started any more: the last wave ends."""


Decision = OpenDocument | NoDocuments | RefuseDocument | PrefillPrompt[PlannedPrompt] | EndWave


class ChainWorker:
    """One rank of a chain.

    Parameters
    ----------
    runner : ChainRunner
    queue : WorkQueue
        Which documents this chain takes.
    context : WorkerContext
    members : Transport or None
        All ranks of the chain, if its stages have several: `runner` then has one rank of each stage, while decisions
        and outcomes are exchanged among all of them.
    """

    def __init__(
        self, runner: ChainRunner, queue: WorkQueue, context: WorkerContext, members: Transport | None = None
    ) -> None:
        self._runner, self._queue, self._context, self._chain = runner, queue, context, runner.chain
        self._members = members or runner.chain
        self._forwarder = runner.open_forwarder(context.trace.recorder)
        self._pace, self._heap = Pace(time.monotonic()), HeapTrimmer()
        self._packed: list[tuple[PromptRequest, PlannedPrompt]] = []  # to be prefilled in rows
        # The same on every rank of the chain:
        self._scheduler: WaveScheduler[PromptRequest, PlannedPrompt] = WaveScheduler(
            self._chain.size,
            runner,
            max_sequences=MAX_SEQUENCES,
            decodes=runner.new_tokens > 0,
            is_spread=runner.is_spread,
        )
        self._has_documents = True
        self._put_off = 0  # prompts of the chain that wait for a row
        self._requests = 0
        self._parts: dict[str, PromptRequest] = {}  # of documents that are split, until their outcome is known

    def run(self) -> None:
        """Work until no document is left to prefill, or none may be started any more.

        Answers that a rank decodes alone may then be unfinished, and the caller decodes them; those that the ranks of
        the chain decode together are finished here.
        """
        self._exchange_outcomes()
        while self._has_work and not self._is_over():
            self._heap.trim()
            self._pace.begin_wave(time.monotonic())
            self._prefill_wave()
            if self._has_work:
                self._decode_wave()
                self._exchange_outcomes()
        if self._runner.is_spread or self._context.decoder.shares_heads:  # with these ranks, or never
            self._decode_together()
        if self._forwarder is not None:
            self._forwarder.close()

    @property
    def _has_work(self) -> bool:
        return self._has_documents or self._scheduler.has_waiting or bool(self._parts)

    def _is_over(self) -> bool:
        """Whether the chain has no time left; its first rank checks the clock for all of them."""
        return bool(share_json(self._members, self._context.stop.is_over))

    def _prefill_wave(self) -> None:
        """Prefill until a decision ends the wave."""
        began = time.monotonic()
        while not isinstance(decision := self._agree_on_decision(), EndWave | NoDocuments):
            match decision:
                case OpenDocument(number):
                    self._open_document(number)
                case RefuseDocument(reason):
                    self._refuse_document(self._scheduler.next_request.document, reason)
                case PrefillPrompt(plan):
                    self._prefill(plan)
        self._has_documents &= not isinstance(decision, NoDocuments)
        self._prefill_packed()
        self._context.tally.phase_s += time.monotonic() - began

    def _agree_on_decision(self) -> Decision:
        """Let the chain's first rank decide what comes next, and broadcast that."""
        word = None
        self._context.trace.tell("waiting", "for its chain's next document")
        if self._members.rank == 0:
            wave_s = time.monotonic() - self._pace.wave_began_s
            decision = self._scheduler.decide(wave_s=wave_s, has_documents=self._has_documents)
            word = _to_wire(self._take_document() if isinstance(decision, TakeDocument) else decision)
        return self._from_wire(share_json(self._members, word))

    def _take_document(self) -> OpenDocument | NoDocuments | EndWave:
        """Take the next document, unless there is none, or not enough time for it, or it should be left to others."""
        stop, following = self._context.stop, self._queue.peek_document()
        stop.announce()
        stop.listen()
        if following is None:
            return NoDocuments()
        if not self._queue.may_take(self._put_off):
            return EndWave()
        seconds = self._pace.seconds_for(self._queue.work_of(following), time.monotonic())
        number = self._queue.take_document() if stop.has_time_for(seconds) else None
        return NoDocuments() if number is None else OpenDocument(number)

    def _open_document(self, number: int) -> None:
        """Make a document's prompts; from now on it counts as begun."""
        document, work = self._context.source.read(number), self._queue.work_of(number)
        self._context.trace.tell("reading", document.id)
        self._context.sink.begin_document(document.id)
        self._pace.add_work(work)
        try:
            request = self._context.source.request(document, work)
            self._add_prompts(request)
        except (DocumentError, DataError) as error:
            self._write_error(document, work, str(error))

    def _add_prompts(self, document: DocumentRequest) -> None:
        requests = []
        for part in range(len(document.prompts)):
            self._requests += 1
            requests.append(PromptRequest(f"{self._chain.size}.{self._requests}", document, part))
            self._runner.check_shareable(requests[-1])
        self._scheduler.add(requests)
        if not document.is_final:
            self._parts |= {request.key: request for request in requests}

    def _refuse_document(self, document: DocumentRequest, reason: str) -> None:
        """Give up a document for a reason that all ranks of the chain know."""
        self._parts = {key: request for key, request in self._parts.items() if request.document is not document}
        self._scheduler.drop_document(document)
        self._write_error(document.document, document.work, reason)

    def _write_error(self, document: Document, work: int, reason: str) -> None:
        """Store an error that all ranks of the chain know of; only the first of them writes it."""
        if self._members.rank == 0:
            self._context.sink.write_record(error_record(document, reason), work)

    def _prefill(self, plan: PlannedPrompt) -> None:
        """Prefill the next prompt; one for a packed row is queued by the rank that decodes it, or by all."""
        request = self._scheduler.start_next(plan.decode_rank)
        documents = self._runner.documents
        if documents.is_other(plan.prefix):
            self._prefill_packed()
            documents.begin(plan)
        if (plan.shared_tokens or self._runner.has_shared) and not self._runner.goes_on(plan):
            self._prefill_shared(request, plan)
        if documents.holds(plan.prefix):  # all ranks run its questions together
            documents.start(plan)
            self._put_off += 1
            self._packed.append((request, plan))
        elif plan.partition is not None and not plan.shared_tokens:
            self._context.trace.begin_prompt(request, plan, self._chain, self._runner.first_rank)
            prefill = self._prefill_slice(request, plan)
            self._context.trace.end_prompt(prefill)
            request.document.prefix = None  # frees it, and closes the file it is loaded from
            self._context.tally.busy_s += prefill.seconds - prefill.wait_s - prefill.send_wait_s
            if self._runner.is_spread or self._chain.rank == plan.decode_rank:
                self._start_decoding(request, prefill)
        else:
            self._put_off += 1
            if self._chain.rank == plan.decode_rank:
                self._packed.append((request, plan))

    def _prefill_slice(self, request: PromptRequest, plan: PlannedPrompt) -> Prefill:
        """Prefill this rank's slice, and store its keys and values if every rank stores its own."""
        if not self._runner.writes_own(plan) or not request.document.is_final:
            return self._runner.prefill(plan, self._forwarder)
        assert plan.partition is not None
        bounds = plan.bounds_on(self._chain.rank)
        if self._chain.rank == plan.decode_rank:  # its own are stored with the answer
            return replace(self._runner.prefill(plan, self._forwarder), stored_tokens=bounds[0])
        record = request.document.begun_record(plan.partition)
        with self._context.sink.writing_slice(record, bounds, request.prompt) as layers:
            prefill = self._runner.prefill(plan, self._forwarder, write_layer=layers.add_layer)
            if prefill.error is not None:
                layers.drop()
        return prefill

    def _prefill_shared(self, request: PromptRequest, plan: PlannedPrompt) -> None:
        """Prefill what a prompt shares with others; what was shared before is no longer used."""
        self._prefill_packed()
        if plan.shared_tokens:
            self._context.trace.begin_prompt(request, plan, self._chain, self._runner.first_rank)
        prefill = self._runner.prefill_shared(plan, self._forwarder)
        self._context.trace.end_prompt(prefill)
        if prefill is not None:
            self._context.tally.busy_s += prefill.seconds - prefill.wait_s - prefill.send_wait_s

    def _from_wire(self, word: list[Any]) -> Decision:
        """Read a decision; for a prompt it holds only the parts of the plan that other ranks cannot know."""
        name, fields = word
        if name == PrefillPrompt.__name__:
            return PrefillPrompt(self._runner.planned(self._scheduler.next_request, **fields))
        kinds: dict[str, Any] = {kind.__name__: kind for kind in (OpenDocument, NoDocuments, RefuseDocument, EndWave)}
        decision: Decision = kinds[name](**fields)
        return decision

    def _prefill_packed(self) -> None:
        """Prefill the queued prompts, row by row."""
        packed, self._packed, self._put_off = self._packed, [], 0
        for row in _rows(packed):
            self._context.trace.begin_row(row, self._runner.first_rank + self._chain.rank)
            began = time.monotonic()
            try:
                prefills = self._runner.prefill_packed([planned for _, planned in row])
            except DataError as error:
                self._fail([request for request, _ in row], str(error))
                continue
            # Not their own times: that of the document they share, counted already, is in the first prompt's.
            self._context.tally.busy_s += time.monotonic() - began
            self._context.trace.end_row(prefills)
            for (request, _), prefill in zip(row, prefills, strict=True):
                request.document.prefix = None
                self._start_decoding(request, prefill)

    def _fail(self, requests: Sequence[PromptRequest], reason: str) -> None:
        """Give up questions about a document whose stored keys and values cannot be read to the end."""
        for request in requests:
            self._context.sink.write_record(error_record(request.document.document, reason), request.document.work)

    def _start_decoding(self, request: PromptRequest, prefill: Prefill) -> None:
        self._context.decoder.start(request, prefill, seed_of(request.document.document, self._runner.seed))

    def _decode_wave(self) -> None:
        """Decode this rank's answers; leave some for the next wave if prompts are waiting for it."""
        decoder = self._context.decoder
        if decoder.shares_heads:
            self._decode_together()
            return
        self._context.trace.tell("decoding", answers_text(decoder.running))
        few = max(0, decoder.running - 1) if self._chain.size == 1 else decoder.running // 4
        decoder.decode(leave=few if self._has_documents or self._scheduler.has_waiting else 0)

    def _decode_together(self) -> None:
        """Decode the chain's answers to the end, after all segments are sent and the links are free."""
        if self._forwarder is not None:
            self._forwarder.settle()
        self._chain.barrier()
        self._context.trace.tell("decoding", f"{answers_text(self._context.decoder.running)} with its chain")
        self._context.decoder.decode()

    def _exchange_outcomes(self) -> None:
        """Exchange how much memory the ranks hold, and what has become of their prompts."""
        self._context.trace.tell("waiting", "for its chain's other ranks")
        held = self._context.decoder.held(self._runner.held_bytes, self._runner.documents.held)
        outcomes = [(key, asdict(outcome)) for key, outcome in self._context.decoder.take_outcomes()]
        self._members.barrier()  # waits asleep, leaving the cores to ranks that are still decoding
        ranks = share_json(self._members, gather_json(self._members, [asdict(held), outcomes]))
        ranks = first_of_each(ranks, self._chain.size)
        self._scheduler.begin_wave(Held(**each) for each, _ in ranks)
        for _, told in ranks:
            for key, outcome in told:
                self._receive_outcome(key, PromptOutcome(**outcome))

    def _receive_outcome(self, key: str, outcome: PromptOutcome) -> None:
        """Process the outcome of a part of a document."""
        request = self._parts.pop(key, None)
        if request is None:  # of a document that failed before
            return
        document = request.document
        try:
            if document.receive_outcome(request.part, outcome):
                self._add_prompts(document)
        except DocumentError as error:
            self._refuse_document(document, str(error))


def answers_text(count: int) -> str:
    """Say how many answers are under way."""
    return f"{count} answer{'s' * (count != 1)}"


def _rows(packed: Sequence[tuple[PromptRequest, PlannedPrompt]]) -> list[list[tuple[PromptRequest, PlannedPrompt]]]:
    """Group prompts in order into rows of at most `PACK_TOKENS` (or one longer prompt) with the same prefix each."""
    rows: list[list[tuple[PromptRequest, PlannedPrompt]]] = []
    left = 0
    for each in packed:
        plan = each[1]
        left -= plan.row_tokens
        if left < 0 or not rows or not plan.goes_with(rows[-1][0][1]):
            rows.append([])
            left = PACK_TOKENS - plan.row_tokens
        rows[-1].append(each)
    return rows


def _to_wire(decision: Decision) -> list[Any]:
    if isinstance(decision, PrefillPrompt):
        plan = decision.plan
        bounds = None if plan.partition is None else plan.partition.bounds
        fields = {
            "decode_rank": plan.decode_rank,
            "strategy": plan.strategy.name,
            "bounds": bounds,
            "shared_tokens": plan.shared_tokens,
            "chunk_tokens": plan.chunk_tokens,
        }
    else:
        fields = asdict(decision)
    return [type(decision).__name__, fields]
