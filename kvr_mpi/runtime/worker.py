"""One rank of a chain at work: wave after wave of prompts is prefilled and then decoded, until no document is left.

Stands between one prompt's run (`ChainRunner`) and the whole job (``batch``). Prompts follow each other through the
chain without a barrier; those too short for a chain are prefilled by one rank each, packed into rows. Then every rank
decodes all of its answers together. A new wave begins when a quarter of them is left, and these continue with it.

The first rank of a chain is its leader (``leader``): it reads the documents and sends complete prompts and plans, which
all ranks carry out. Outcomes that only one rank knows go to the leader between two waves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from kvr_mpi.errors import DataError
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import PACK_TOKENS
from kvr_mpi.requests.prompt_request import PromptOutcome, PromptRequest
from kvr_mpi.requests.sources import Source
from kvr_mpi.runtime.chain_runner import ChainRunner
from kvr_mpi.runtime.decoder import Decoder
from kvr_mpi.runtime.leader import Leader
from kvr_mpi.runtime.messages import EndPrefill, share_message
from kvr_mpi.runtime.planned_prompt import PlannedPrompt
from kvr_mpi.runtime.result_sink import ResultSink
from kvr_mpi.runtime.stopping import SharedStop
from kvr_mpi.runtime.tally import Tally
from kvr_mpi.runtime.tracing import Trace
from kvr_mpi.runtime.waves import Held
from kvr_mpi.runtime.work_queue import WorkQueue
from kvr_mpi.setup.host_memory import HeapTrimmer
from kvr_mpi.topology import first_of_each
from kvr_mpi.transport import Transport, gather_json, share_json


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a rank works with, independent of its chain.

    source : where documents come from, if this rank leads a chain.
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


class ChainWorker:
    """One rank of a chain.

    Parameters
    ----------
    runner : ChainRunner
    queue : WorkQueue
        Which documents this chain takes.
    context : WorkerContext
    members : Transport or None
        All ranks of the chain, if its groups have several: `runner` then has one rank of each group, while decisions
        and outcomes are exchanged among all of them.
    """

    def __init__(
        self, runner: ChainRunner, queue: WorkQueue, context: WorkerContext, members: Transport | None = None
    ) -> None:
        self._runner, self._context, self._chain = runner, context, runner.chain
        self._members = members or runner.chain
        self._forwarder = runner.open_forwarder(context.trace.recorder)
        self._heap = HeapTrimmer()
        self._packed: list[tuple[PromptRequest, PlannedPrompt]] = []  # to be prefilled in rows
        self._put_off = 0  # prompts of the whole chain that wait for a row
        self._leader: Leader | None = None
        if self._members.rank == 0:
            self._leader = Leader(runner, queue, context.source, context.sink, context.stop, context.trace)

    def run(self) -> None:
        """Work until no document is left to prefill, or none may be started any more.

        Answers that a rank decodes alone may then be unfinished, and the caller decodes them; those that the ranks of
        the chain decode together are finished here.
        """
        self._exchange_outcomes()
        while self._has_work():
            self._heap.trim()
            end = self._prefill_wave()
            if end.goes_on:
                self._decode_wave(end)
                self._exchange_outcomes()
        if self._runner.is_spread or self._context.decoder.shares_heads:  # with these ranks, or never
            self._decode_together()
        if self._forwarder is not None:
            self._forwarder.close()

    def _has_work(self) -> bool:
        """Whether the chain goes on: its leader knows what is left, and checks the clock for all of them."""
        is_over = self._context.stop.is_over
        return bool(share_json(self._members, self._leader is not None and self._leader.has_work and not is_over))

    def _prefill_wave(self) -> EndPrefill:
        """Prefill until the leader ends the wave."""
        began = time.monotonic()
        while True:
            self._context.trace.tell("waiting", "for its chain's next document")
            decided = None if self._leader is None else self._leader.next_message(self._put_off)
            message = share_message(self._members, decided, self._runner)
            if isinstance(message, EndPrefill):
                break
            self._prefill(message.request, message.plan)
        self._prefill_packed()
        self._runner.forget_stored()
        self._context.tally.phase_s += time.monotonic() - began
        return message

    def _prefill(self, request: PromptRequest, plan: PlannedPrompt) -> None:
        """Prefill the next prompt; one for a packed row is queued by the rank that decodes it, or by all."""
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
            self._context.tally.busy_s += prefill.seconds - prefill.wait_s - prefill.send_wait_s
            if self._runner.is_spread or self._chain.rank == plan.decode_rank:
                self._context.decoder.start(request, prefill)
        else:
            self._put_off += 1
            if self._chain.rank == plan.decode_rank:
                self._packed.append((request, plan))

    def _prefill_slice(self, request: PromptRequest, plan: PlannedPrompt) -> Prefill:
        """Prefill this rank's slice, and store its keys and values if every rank stores its own."""
        if not self._runner.writes_own(plan) or not request.is_final:
            return self._runner.prefill(plan, self._forwarder)
        assert plan.partition is not None
        bounds = plan.bounds_on(self._chain.rank)
        if self._chain.rank == plan.decode_rank:  # its own are stored with the answer
            return replace(self._runner.prefill(plan, self._forwarder), stored_tokens=bounds[0])
        record = request.begun_record(plan.partition)
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
                self._context.decoder.start(request, prefill)

    def _fail(self, requests: Sequence[PromptRequest], reason: str) -> None:
        """Give up questions about a document whose stored keys and values cannot be read to the end."""
        for request in requests:
            self._context.sink.write_record(request.error_record(reason), request.document_work)

    def _decode_wave(self, end: EndPrefill) -> None:
        """Decode this rank's answers; leave some for the next wave if prompts are waiting for it."""
        decoder = self._context.decoder
        if decoder.shares_heads:
            self._decode_together()
            return
        self._context.trace.tell("decoding", answers_text(decoder.running))
        few = max(0, decoder.running - 1) if self._chain.size == 1 else decoder.running // 4
        decoder.decode(leave=few if end.has_more else 0)

    def _decode_together(self) -> None:
        """Decode the chain's answers to the end, after all segments are sent and the links are free."""
        if self._forwarder is not None:
            self._forwarder.settle()
        self._chain.barrier()
        self._context.trace.tell("decoding", f"{answers_text(self._context.decoder.running)} with its chain")
        self._context.decoder.decode()

    def _exchange_outcomes(self) -> None:
        """Send the leader how much memory the ranks hold, and what has become of parts of documents."""
        self._context.trace.tell("waiting", "for its chain's other ranks")
        held = self._context.decoder.held(self._runner.held_bytes, self._runner.documents.held)
        outcomes = [(key, asdict(outcome)) for key, outcome in self._context.decoder.take_outcomes()]
        self._members.barrier()  # waits asleep, leaving the cores to ranks that are still decoding
        ranks = gather_json(self._members, [asdict(held), outcomes])
        if self._leader is not None:
            ranks = first_of_each(ranks, self._chain.size)
            known = [(key, PromptOutcome(**outcome)) for _, received in ranks for key, outcome in received]
            self._leader.begin_wave([Held(**each) for each, _ in ranks], known)


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
