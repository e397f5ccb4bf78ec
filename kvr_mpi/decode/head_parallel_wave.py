"""A wave's documents, collected on the rank that has prefilled each, and decoded by all ranks together.

Stands between the prefills of a wave and `HeadParallelBatch`, and is used as a `DecodeBatch` is. But that a rank takes
in its documents alone: `begin`, which shares them out, and `step` are called by all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from kvr_mpi.decode.batch import Finished
from kvr_mpi.decode.head_parallel import HeadParallelBatch, Prefilled
from kvr_mpi.documents.document import AS_THE_JOB, OwnGeneration
from kvr_mpi.prefill.one_prompt import Prefill

K = TypeVar("K")
MORE_THAN_AN_ANSWER = (
    "ranks that share heads support only one answer per prompt, without log-probabilities, scores or a schema: use "
    "decode.mode = 'data-parallel'"
)


class HeadParallelWave(Generic[K]):
    """Documents of a wave; `batch` decodes those of all ranks."""

    def __init__(self, batch: HeadParallelBatch[K]) -> None:
        self._batch = batch
        self._waiting: list[Prefilled[K]] = []
        self._refused: list[Finished[K]] = []

    @property
    def running(self) -> int:
        """Documents of all ranks that are shared out, and those of this rank that wait for it."""
        return self._batch.running + len(self._waiting)

    @property
    def keys(self) -> list[K]:
        """Keys of this rank's documents that have not been handed out."""
        return [document.key for document in self._waiting] + self._batch.keys

    def add(
        self, key: K, prefill: Prefill, prompt_ids: Sequence[int], seed: int, own: OwnGeneration = AS_THE_JOB
    ) -> None:
        """Take in a document after its prefill; parameters are those of `DecodeBatch.add`."""
        if (own.n or 1) > 1 or own.score or own.json_schema or own.top_logprobs not in (None, -1):
            prefill.cache = None
            self._refused.append(Finished(key, prefill, None, MORE_THAN_AN_ANSWER))
            return
        self._waiting.append(Prefilled(key, prefill, prompt_ids, seed, own))

    def begin(self) -> list[Finished[K]]:
        """Share out what waits, unless documents are under way; returns those of this rank that end at once."""
        refused, self._refused = self._refused, []
        if self._batch.running:
            return refused
        waiting, self._waiting = self._waiting, []
        return refused + self._batch.add(waiting)

    def step(self) -> list[Finished[K]]:
        """Write one token of every document that is shared out; returns those of this rank that are answered."""
        return self._batch.step()
