"""What a rank decodes, whatever chains it was in when the prompts were prefilled, and where the answers go.

An answer to a document's only prompt is its record. That to a part of a document is told to the other ranks of its
chain, which make the next prompt of all of them (`PromptOutcome`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvr_mpi.decode.batch import DecodeBatch, Finished
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.runtime.requests import PromptOutcome, PromptRequest, error_record
from kvr_mpi.runtime.result_sink import ResultSink
from kvr_mpi.runtime.stopping import SharedStop
from kvr_mpi.runtime.tally import Tally
from kvr_mpi.runtime.waves import Held


class Decoder:
    """One rank's answers under way.

    Parameters
    ----------
    batch : DecodeBatch
    sink : ResultSink
    stop : SharedStop
    tally : Tally
        Of this rank.
    decodes : bool
        Whether there is anything to decode after the first logits.
    """

    def __init__(
        self,
        batch: DecodeBatch[PromptRequest],
        sink: ResultSink,
        stop: SharedStop,
        tally: Tally,
        *,
        decodes: bool,
    ) -> None:
        self._batch, self._sink, self._stop, self._tally, self._decodes = batch, sink, stop, tally, decodes
        self._outcomes: list[tuple[str, PromptOutcome]] = []

    @property
    def running(self) -> int:
        """Answers under way."""
        return self._batch.running

    def held(self, bytes_of: Callable[[PromptRequest], int]) -> Held:
        """Say what this rank holds."""
        return Held(self._batch.running, sum(map(bytes_of, self._batch.keys)))

    def start(self, request: PromptRequest, prefill: Prefill, seed: int) -> None:
        """Take in a prompt after its prefill."""
        self._stop.announce()
        if prefill.error is not None:
            self._fail(request, prefill.error)
            return
        if self._decodes:
            self._sink.report_prefill(request.document.id, prefill, request.work)
        self._batch.add(request, prefill, request.prompt.ids, seed, request.document.document.generation)
        if not self._decodes:  # its record need not wait for the others
            self._step()

    def decode(self, leave: int = 0) -> None:
        """Decode until no more than so many answers are under way, or the time is over."""
        began = time.monotonic()
        while self._batch.running > leave and not self._stop.is_over:
            self._step()
            self._stop.announce()
        self._tally.decode_s += time.monotonic() - began

    def take_outcomes(self) -> list[tuple[str, PromptOutcome]]:
        """Return what became of parts of documents since this was asked last, by their requests' keys."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _step(self) -> None:
        """Write one token of every answer, and deliver what is finished."""
        for finished in self._batch.step():
            self._deliver(finished)

    def _deliver(self, finished: Finished[PromptRequest]) -> None:
        request, answer = finished.key, finished.answer
        if answer is None:
            self._fail(request, finished.error or "unknown")
            return
        self._tally.prompt_tokens += request.prompt.tokens - finished.prefill.known_tokens
        self._tally.new_tokens += len(answer.token_ids)
        document = request.document
        if document.is_final:
            record = document.record(finished.prefill, answer)
            self._sink.write_answer(record, document.work, finished.prefill, request.prompt)
        else:
            self._outcomes.append((request.key, document.outcome(request.part, finished.prefill, answer)))

    def _fail(self, request: PromptRequest, reason: str) -> None:
        """Take note of a prompt that failed on this rank."""
        document = request.document
        if document.is_final:
            self._sink.write_record(error_record(document.document, reason), document.work)
        else:
            self._outcomes.append((request.key, PromptOutcome(error=reason)))
