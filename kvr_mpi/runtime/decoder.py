"""One rank's decoding: runs the answers in progress, and delivers finished ones.

The answer to a document's only prompt is stored as its record. Answers to parts of a document go to the chain's leader,
which builds the final prompt from them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvr_mpi.compress.compression import size_of
from kvr_mpi.decode.group import BatchEntry, Group, held_bytes
from kvr_mpi.decode.sampling import Answer
from kvr_mpi.events import Events
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model.tp_group import guarded
from kvr_mpi.prefill.finite import explain_not_finite
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.runtime.prompt import Prompt
from kvr_mpi.runtime.result_sink import ResultSink
from kvr_mpi.runtime.session import Session
from kvr_mpi.runtime.stopping import Stop
from kvr_mpi.runtime.waves import Held
from kvr_mpi.store.record import Record
from kvr_mpi.transport import share_json

# Answers that take longer than this are announced, since no line would be logged before the first one ends.
QUIET_S = 10.0


class Decoder:
    """One rank's answers in progress, and where they go.

    group : the ranks that call `decode` together; None: this rank alone.
    """

    def __init__(
        self, session: Session, sink: ResultSink, stop: Stop, events: Events, group: Group | None = None
    ) -> None:
        self.session, self.sink, self.stop, self.events = session, sink, stop, events
        self._batch, self._kernels = session.open_decode_batch(group, sink.logger), session.kernels
        self._group_size = session.spec.parallel.tensor_parallel
        self._parts: list[tuple[str, Record]] = []

    @property
    def running(self) -> int:
        """Number of answers in progress."""
        return self._batch.running

    @property
    def shares_heads(self) -> bool:
        """Whether the ranks of the chain decode all their prompts together after a wave's prefill."""
        return self._batch.group.waits

    def held(self, shared: SequenceKV | None) -> Held:
        """Return the memory in use on this rank, including the prefix or stored document that prompts share."""
        return Held(self._batch.running, held_bytes(self._batch.prefills, shared))

    def start(self, prompt: Prompt, prefill: Prefill) -> None:
        """Add a prefilled prompt; all ranks that hold a shard of it call this."""
        self.stop.announce()
        if self.session.readout is not None:
            self._read(prompt, prefill)
            return
        is_home, sequence = self._batch.group.is_home(prefill), prefill.cache
        if prefill.error is None and is_home:
            loaded, compression = self.session.loaded, self.session.compression
            if compression is not None and prefill.retained is None and sequence.ragged:
                with guarded(loaded.tp_group):
                    prefill.retained = size_of(loaded, sequence, str(compression.settings))
            self.events.totals.prefilled += 1
            if self.session.spec.generation.max_new_tokens:  # otherwise only the prompt's logits are used
                self.sink.report_prefill(prompt.name, prefill, prompt.work, prompt.document_id)
        came_through = self._batch.add(prompt, prefill, prompt.ids, prompt.seed, prompt.generation)
        if self.session.spec.is_sharded and sequence is not None and came_through and not is_home and prompt.is_final:
            self.sink.write_shard(prompt.begun_record(prefill.partition), sequence, prompt)
        self._deliver(self._batch.take_finished())  # do not hold back finished answers

    def _read(self, prompt: Prompt, prefill: Prefill) -> None:
        """Store what was read of a prompt, which has no answer."""
        readout, why, found = self.session.readout, prefill.error, None
        assert readout is not None
        if prefill.read is not None:
            self.sink.report_prefill(prompt.name, prefill, prompt.work, prompt.document_id)
            found = readout.fields(prompt, prefill.read)
            why = explain_not_finite(self.session.loaded.dtype) if found is None else None
        answer = Answer((), "", "", 0.0)
        self._deliver_one(prompt, prefill, None if found is None else answer, why, more=found or {})

    def decode(self, leave: int = 0) -> None:
        """Decode until at most `leave` answers are in progress, or until time is up."""
        began_s, before, totals = time.perf_counter(), replace(self._batch.decoded), self.events.totals
        if self.shares_heads:
            if self._is_over():  # the number of waiting answers differs between ranks
                return
            self._deliver(self._batch.begin())
        answers, rounds, reported = self._batch.running, 0, None
        while self._batch.running > leave and not self._is_over():
            self._deliver(self._batch.step())
            self.stop.announce()
            rounds, why, seconds = rounds + 1, self.stop.reason, time.perf_counter() - began_s
            if reported != why and (why or seconds > QUIET_S) and (left := self._batch.left):
                reported, decoded = why, self._batch.decoded
                steps, tokens = decoded.steps - before.steps, decoded.tokens - before.tokens
                self.sink.report_decoding(len(left), max(left), seconds / rounds * steps / max(1, tokens), why)
        totals.steps += self._batch.decoded.steps - before.steps
        totals.step_tokens += self._batch.decoded.tokens - before.tokens
        if answers:
            self.events.end("decode", began_s, answers)

    def take_parts(self) -> list[tuple[str, Record]]:
        """Return and clear the new records of document parts, each with its prompt's key."""
        parts, self._parts = self._parts, []
        return parts

    def _is_over(self) -> bool:
        """Whether time is up; ranks that decode together get the same result."""
        is_over, ranks = self.stop.is_over_for_group, self._batch.group.ranks
        return is_over if ranks is None else bool(share_json(ranks, is_over))

    def _deliver(self, answered: Sequence[BatchEntry]) -> None:
        """Store final answers, and keep those to document parts for the leader."""
        for one in answered:
            self._deliver_one(one.key, one.prefill, one.answer, one.error, one.rank_s)

    def _deliver_one(
        self,
        prompt: Prompt,
        prefill: Prefill,
        answer: Answer | None,
        error: str | None,
        decode_rank_s: float = 0.0,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the answer to a prompt, or why there is none; `more` are other fields of its record."""
        if answer is None:
            record = prompt.error_record(error or "unknown")
        else:
            rank_s = self._group_size * (prefill.rank_s + decode_rank_s)
            record = replace(prompt.record(prefill, answer, rank_s), kernels=self._kernels)
            if prompt.is_final and record.status == "done":
                record = replace(record, **(more or {}))
        if not prompt.is_final:
            self._parts.append((prompt.key, record))
        elif record.status == "error":
            self.sink.write_record(record, prompt.document_work)
        else:
            self.sink.write_answer(record, prompt.document_work, prefill, prompt)
        prefill.release()
