"""What a rank decodes, whatever chains it was in when the prompts were prefilled, and where the answers go.

An answer to a document's only prompt is its record. That to a part of a document goes to the leader of the chain,
which makes the next prompt of all of them (`PromptOutcome`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvr_mpi.compress.compression import Compression
from kvr_mpi.decode.batch import DecodeBatch, Finished
from kvr_mpi.decode.head_parallel import HeadParallelWave
from kvr_mpi.decode.shares_batch import SharesBatch
from kvr_mpi.kv.document_share import DocumentShare
from kvr_mpi.model.tp_group import guarded
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.requests.prompt_request import PromptOutcome, PromptRequest
from kvr_mpi.runtime.result_sink import ResultSink
from kvr_mpi.runtime.stopping import SharedStop
from kvr_mpi.runtime.tally import Tally
from kvr_mpi.runtime.waves import Held
from kvr_mpi.trace import Recorder
from kvr_mpi.transport import Transport, share_json


class Decoder:
    """One rank's answers under way.

    Parameters
    ----------
    batch : DecodeBatch, SharesBatch or HeadParallelWave
    sink : ResultSink
    stop : SharedStop
    tally : Tally
        Of this rank.
    decodes : bool
        Whether there is anything to decode after the first logits.
    chain : Transport or None
        The ranks that decode together. Where keys and values stay spread over them (SharesBatch) all make the same
        calls, and the one with a prompt's last share delivers its answer; where they share heads (HeadParallelWave)
        each starts and delivers its own prompts, and all call `decode`. None: a rank decodes alone.
    compression : Compression or None
        Which keys and values are kept of a prompt; it says how much that is.
    recorder : Recorder, optional
        Told when answers are decoded, and how many.
    """

    def __init__(
        self,
        batch: DecodeBatch[PromptRequest] | SharesBatch[PromptRequest] | HeadParallelWave[PromptRequest],
        sink: ResultSink,
        stop: SharedStop,
        tally: Tally,
        *,
        decodes: bool,
        chain: Transport | None = None,
        compression: Compression | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._compression = compression
        self._recorder = Recorder() if recorder is None else recorder
        self._batch, self._sink, self._stop, self._tally, self._decodes = batch, sink, stop, tally, decodes
        self._chain = chain
        self._wave = batch if isinstance(batch, HeadParallelWave) else None
        self._spread_over = None if self._wave is not None else chain
        self._outcomes: list[tuple[str, PromptOutcome]] = []

    @property
    def running(self) -> int:
        """Answers under way."""
        return self._batch.running

    @property
    def shares_heads(self) -> bool:
        """Whether all ranks of the chain decode each rank's prompts, from the end of a wave's prefill on."""
        return self._wave is not None

    def held(self, bytes_of: Callable[[PromptRequest], int], document: DocumentShare | None = None) -> Held:
        """Say what this rank holds, with a stored document that more is to be asked about."""
        if isinstance(self._batch, SharesBatch):
            return Held(self._batch.running, self._batch.held_bytes(document))
        return Held(self._batch.running, sum(map(bytes_of, self._batch.keys)))

    def start(self, request: PromptRequest, prefill: Prefill) -> None:
        """Take in a prompt after its prefill."""
        self._stop.announce()
        if self._spread_over is not None:  # only the rank with the last slice knows whether all came through
            error = share_json(self._spread_over, prefill.error, prefill.last)
            prefill = prefill if error is None else replace(prefill, error=error, share=None)
        if prefill.error is not None:
            if self._delivers(prefill):
                self._fail(request, prefill.error)
            return
        if self._compression is not None and prefill.retained is None and prefill.cache.is_ragged:
            with guarded(self._compression.tp_group):
                prefill.retained = self._compression.size_of(prefill.cache)
        if self._decodes and self._delivers(prefill):
            self._sink.report_prefill(request.document_id, prefill, request.work)
        if prefill.share is not None and not self._delivers(prefill) and request.is_final:
            self._sink.write_share(request.begun_record(prefill.partition), prefill.share, request.prompt)
        self._batch.add(request, prefill, request.prompt.ids, request.seed, request.generation)
        if not self._decodes:  # its record need not wait for the others
            self._step()

    def decode(self, leave: int = 0) -> None:
        """Decode until no more than so many answers are under way, or the time is over."""
        began, began_s = time.monotonic(), time.perf_counter()
        if self._wave is not None:
            if self._is_over():  # what waits is not the same on all ranks
                return
            for finished in self._wave.begin():
                self._deliver(finished)
        answers = self._batch.running
        while self._batch.running > leave and not self._is_over():
            self._step()
            self._stop.announce()
        self._tally.decode_s += time.monotonic() - began
        if answers > self._batch.running:
            self._recorder.note("decode", began_s, prompt=-1, amount=answers)

    def take_outcomes(self) -> list[tuple[str, PromptOutcome]]:
        """Return what became of parts of documents since this was asked last, by their requests' keys."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _delivers(self, prefill: Prefill) -> bool:
        """Whether what becomes of a prompt is told by this rank."""
        return self._spread_over is None or self._spread_over.rank == prefill.last

    def _is_over(self) -> bool:
        """Whether there is no time left; ranks that decode together have to see it at once."""
        is_over = self._stop.is_over
        return is_over if self._chain is None else bool(share_json(self._chain, is_over))

    def _step(self) -> None:
        """Write one token of every answer, and deliver what is finished."""
        for finished in self._batch.step():
            self._deliver(finished)

    def _deliver(self, finished: Finished[PromptRequest]) -> None:
        request, answer = finished.key, finished.answer
        if not self._delivers(finished.prefill):
            return
        if answer is None:
            self._fail(request, finished.error or "unknown")
            return
        self._tally.prompt_tokens += request.prompt.tokens - finished.prefill.known_tokens
        self._tally.new_tokens += answer.new_tokens
        if request.is_final:
            record = request.record(finished.prefill, answer)
            self._sink.write_answer(record, request.document_work, finished.prefill, request.prompt)
        else:
            self._outcomes.append((request.key, request.outcome(finished.prefill, answer)))

    def _fail(self, request: PromptRequest, reason: str) -> None:
        """Record a prompt that failed on this rank."""
        if request.is_final:
            self._sink.write_record(request.error_record(reason), request.document_work)
        else:
            self._outcomes.append((request.key, PromptOutcome(error=reason)))
