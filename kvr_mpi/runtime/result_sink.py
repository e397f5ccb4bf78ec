"""Writes a rank's results to its log and volumes, and adds them to the counters that all ranks share."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from kvr_mpi.documents.prompts import PromptText
from kvr_mpi.kv.chain import layer_kv
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.report.progress import Progress
from kvr_mpi.runtime.session import Session
from kvr_mpi.runtime.work_queue import Slot
from kvr_mpi.store.kv import CachedTokens, KeysValues
from kvr_mpi.store.record import Record
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.topology import KVHeads
from kvr_mpi.transport.counters import Counters

Layers = list[KeysValues | None]  # keys and values of each layer; None for a layer without any


class ResultSink:
    """One rank's results; one rank of each tensor-parallel group stores and reports documents."""

    def __init__(self, session: Session, writer: ResultWriter, counters: Counters, progress: Progress) -> None:
        self._writer, self._counters, self._progress, self._tells = writer, counters, progress, session.ranks.tells
        self.logger = progress.logger.only(self._tells)
        part = session.loaded.part  # of the model, with this rank's KV heads; None: all
        # Of ranks of a group with the same heads, one stores them.
        self.keeps_kv = bool(session.spec.output.kv) and (part is None or part.stores)
        self._heads = None if part is None or part.held.is_all else part.held

    def report_prefill(self, name: str, prefill: Prefill, work: int, document: str) -> None:
        """Report a prefilled prompt, and add its work to the shared counter."""
        if not self._tells:
            return
        self._counters.add(Slot.PREFILLED, work)
        tokens, known = prefill.partition.tokens, prefill.known_tokens
        self._progress.prefilled(name, tokens - known, prefill.seconds, known, document)

    def report_decoding(self, answers: int, tokens: int, token_s: float, stopping: str) -> None:
        """Report answers in progress; arguments as for `Progress.decoding`."""
        if self._tells:
            self._progress.decoding(answers, tokens, token_s, stopping)

    def write_answer(self, record: Record, work: int, prefill: Prefill, prompt: PromptText) -> None:
        """Store an answer, with keys and values if the job stores them, and report it."""
        layers: Layers = []
        tokens = None
        if self.keeps_kv and isinstance(prefill.cache, SequenceKV) and prefill.cache.longest is not None:
            layers, tokens = _stored_shard(prefill.cache, record, prompt, self._heads)
        elif self.keeps_kv:
            layers, tokens = _stored_cache(prefill, record, prompt, self._heads)
        if self._tells:
            self._writer.write(record, layers, tokens)
            self._report(record, work)
        elif tokens is not None:  # the group's first rank stores the answer
            self._writer.write(record, layers, tokens, has_record=False)

    def write_shard(self, record: Record, sequence: SequenceKV, prompt: PromptText) -> None:
        """Store this rank's shard of a prompt in the background; another rank stores the answer."""
        if self.keeps_kv:
            self._writer.write(record, *_stored_shard(sequence, record, prompt, self._heads), has_record=False)

    def writing_slice(
        self, record: Record, bounds: tuple[int, int], prompt: PromptText
    ) -> AbstractContextManager[ResultWriter]:
        """Store this rank's keys and values layer by layer during prefill."""
        (start, stop), text = bounds, prompt.text
        text = min(text[0], stop), min(text[1], stop)
        tokens = CachedTokens(prompt.ids[:stop], text, start, heads=self._heads)
        return self._writer.writing_piece(record, tokens)

    def write_record(self, record: Record, work: int) -> None:
        """Store a record without keys and values, and report it."""
        if not self._tells:
            return
        self._writer.write(record)
        self._report(record, work)

    def _report(self, record: Record, work: int) -> None:
        done = self._counters.add(Slot.DONE) + 1
        worked = self._counters.add(Slot.WORK, work) + work
        self._progress.document(record, done, worked, self._counters.read()[Slot.PREFILLED])


def _stored_cache(
    prefill: Prefill, record: Record, prompt: PromptText, held: KVHeads | None
) -> tuple[Layers, CachedTokens | None]:
    """Return the keys and values of a cache, and their tokens, or those that compression kept."""
    cache, numbers = prefill.cache, range(len(prefill.cache.layers))
    first = prefill.stored_tokens
    layers = [layer_kv(cache, layer, first) for layer in numbers]
    ids = (*prompt.ids, *record.token_ids)  # the answer's last token has no keys and values
    if prefill.retained is not None:
        kept = {
            layer_idx: tuple(own.numpy().astype(np.int32) for own in cache.kept_positions(layer_idx))
            for layer_idx in sorted(cache.ragged)
        }
        return layers, CachedTokens(ids[: cache.length], prompt.text, 0, prefill.retained.method, kept, heads=held)
    ids = ids[: cache.get_seq_length() if prefill.is_plain else cache.length]
    if all(layer is None or first + len(layer[0]) == len(ids) for layer in layers):
        return layers, CachedTokens(ids, prompt.text, first, heads=held)
    # A layer with a window has only the last tokens. Some heads of them could not be merged into a whole cache.
    return [] if held is not None else layers, None


def _stored_shard(
    sequence: SequenceKV, record: Record, prompt: PromptText, held: KVHeads | None
) -> tuple[Layers, CachedTokens]:
    """Return the keys and values of a rank's shard, and their tokens."""
    stop = sequence.length if sequence.is_last else sequence.stop
    text = min(prompt.text[0], stop), min(prompt.text[1], stop)
    ids = (*prompt.ids, *record.token_ids)[:stop]
    layers: Layers = [layer_kv(sequence, layer) for layer in range(len(sequence.layers))]
    return layers, CachedTokens(ids, text, sequence.start, heads=held)
