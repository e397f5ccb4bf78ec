"""One rank of a chain: prefills and decodes wave after wave, until no document is left.

Sits between one prompt's run (`ChainRunner`) and the whole job (``batch``). Prompts follow each other through the chain
without a barrier; prompts too short for a chain are packed into rows, each prefilled by one rank. Then every rank
decodes all of its answers together. The next wave begins when a quarter of them are left, which continue in it.

The first rank of a chain is its leader (``leader``): it reads the documents and broadcasts complete prompts and plans.
Between two waves, the other ranks send it the outcomes that it needs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from kvr_mpi.errors import DataError, UnavailableError, counted, record_error
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.runtime.chain_runner import ChainRunner
from kvr_mpi.runtime.decoder import Decoder
from kvr_mpi.runtime.host_memory import HeapTrimmer
from kvr_mpi.runtime.leader import Leader
from kvr_mpi.runtime.plan import EndPrefill, Plan, share_message
from kvr_mpi.runtime.tracing import begin_row, end_row
from kvr_mpi.runtime.waves import Held
from kvr_mpi.store.record import Record
from kvr_mpi.topology import first_of_each
from kvr_mpi.transport import Transport, gather_json


class ChainWorker:
    """One rank of a chain.

    leader : on the first rank: decides for all.
    members : all ranks of the chain, for decisions and outcomes; `runner.chain` has one rank of each tensor-parallel
        group.
    """

    def __init__(self, runner: ChainRunner, leader: Leader | None, decoder: Decoder, members: Transport) -> None:
        self._runner, self._decoder, self._chain, self._members = runner, decoder, runner.chain, members
        self._sink, self._events = decoder.sink, decoder.events
        self._leader = leader
        self._heap = HeapTrimmer()
        self._rows: list[Plan] = []  # waiting on this rank for a packed row
        self._put_off = 0  # number of prompts waiting for a row on the whole chain

    def run(self) -> None:
        """Work until no document is left or no more may be started.

        Answers that ranks decode together are then complete. Those that a rank decodes alone may still be in progress;
        the caller decodes them.
        """
        self._exchange_parts()
        while (end := self._prefill_wave()).goes_on:
            self._decode_wave(end)
            self._exchange_parts()
        if self._runner.is_sharded or self._decoder.shares_heads:  # this chain's ranks do not meet again
            self._decode_together()
        self._runner.close()

    def _prefill_wave(self) -> EndPrefill:
        """Prefill until the leader ends the wave."""
        self._heap.trim()
        began_s = time.perf_counter()
        while True:
            self._events.begin("waiting", "for its chain's next document")
            decided = None if self._leader is None else self._leader.next_message(self._put_off)
            message = share_message(self._members, decided, self._runner.read_plan)
            if isinstance(message, EndPrefill):
                break
            self._prefill(message)
        self._prefill_rows()
        self._runner.end_wave()
        self._events.end("wave", began_s)
        return message

    def _prefill(self, plan: Plan) -> None:
        """Prefill the next prompt, or collect it for a packed row on the ranks that run it."""
        runner, rank = self._runner, self._chain.rank
        runner.expect(plan)
        if not runner.holds(plan):
            self._prefill_rows()
            runner.hold(plan)
        takes_part = plan.takes_all or rank == plan.decode_rank
        if plan.in_rows:
            self._put_off += 1
            if takes_part:
                self._rows.append(plan)
            return
        prefill = None
        if takes_part:
            self._begin([plan])
            prefill = self._prefill_slice(plan)
            end_row(self._events, [prefill])
        if plan.prompt.is_prefix:
            runner.hold_computed(plan, prefill)
        elif prefill is not None and (runner.is_sharded or rank == plan.decode_rank):
            self._decoder.start(plan.prompt, prefill)

    def _begin(self, row: Sequence[Plan]) -> None:
        begin_row(self._events, row, self._chain, self._runner.first_rank)

    def _prefill_slice(self, plan: Plan) -> Prefill:
        """Prefill this rank's slice, and store its keys and values if every rank stores its own."""
        prompt, runner = plan.prompt, self._runner
        is_written, is_home = prompt.is_final and runner.writes_own, self._chain.rank == plan.decode_rank
        if not is_written or is_home or not self._sink.keeps_kv:
            (prefill,) = runner.prefill([plan])
            if is_written:  # this rank stores its slice with the answer
                prefill.stored_tokens, _ = plan.bounds_on(self._chain.rank)
            return prefill
        assert plan.partition is not None
        bounds = plan.bounds_on(self._chain.rank)
        with self._sink.writing_slice(prompt.begun_record(plan.partition), bounds, prompt) as layers:
            (prefill,) = runner.prefill([plan], layers.add_layer)
            if prefill.error is not None:
                layers.drop()
        return prefill

    def _prefill_rows(self) -> None:
        """Prefill the waiting prompts, row by row."""
        waiting, self._rows, self._put_off = self._rows, [], 0
        for row in _rows(waiting, self._runner.pack_tokens):
            self._begin(row)
            try:
                prefills = self._runner.prefill(row)
            except (DataError, UnavailableError) as error:  # of stored keys and values
                for plan in row:
                    record = plan.prompt.error_record(record_error(error))
                    self._sink.write_record(record, plan.prompt.document_work)
                continue
            end_row(self._events, prefills)
            self._runner.count_prefix(row, prefills)
            for plan, prefill in zip(row, prefills, strict=True):
                self._decoder.start(plan.prompt, prefill)

    def _decode_wave(self, end: EndPrefill) -> None:
        """Decode this rank's answers; leave some in progress if the next wave has prompts."""
        decoder = self._decoder
        if decoder.shares_heads:
            self._decode_together()
            return
        self._events.begin("decoding", counted(decoder.running, "answer"))
        few = max(0, decoder.running - 1) if self._chain.size == 1 else decoder.running // 4
        decoder.decode(leave=few if end.has_more else 0)

    def _decode_together(self) -> None:
        """Decode the chain's answers to the end, once all segments have been sent."""
        if self._runner.forwarder is not None:
            self._runner.forwarder.settle()
        self._chain.barrier()
        self._events.begin("decoding", f"{counted(self._decoder.running, 'answer')} with its chain")
        self._decoder.decode()

    def _exchange_parts(self) -> None:
        """Send the leader the memory in use on the ranks, and new records of document parts."""
        self._events.begin("waiting", "for its chain's other ranks")
        shared = self._runner.shared
        held = self._decoder.held(None if shared is None else shared.sequence)
        parts = [(key, asdict(record)) for key, record in self._decoder.take_parts()]
        self._members.barrier()  # sleeps while it waits, so that decoding ranks get the cores
        ranks = gather_json(self._members, [asdict(held), parts])
        if self._leader is not None:
            ranks = first_of_each(ranks, self._chain.size)
            known = [(key, Record(**record)) for _, received in ranks for key, record in received]
            self._leader.begin_wave([Held(**each) for each, _ in ranks], known)


def _rows(waiting: Sequence[Plan], pack_tokens: int) -> list[list[Plan]]:
    """Group prompts into rows of at most `pack_tokens` (or one longer prompt) that continue the same prefix."""
    rows: list[list[Plan]] = []
    left = 0
    for plan in waiting:
        left -= plan.row_tokens
        if left < 0 or not rows or plan.prefix is not rows[-1][0].prefix:
            rows.append([])
            left = pack_tokens - plan.row_tokens
        rows[-1].append(plan)
    return rows
