"""Several answers from one prefill, one after the other, each from the cache as the prompt left it.

An answer's keys and values are dropped when the next one begins, so that more samples need no more memory; other
documents fill the row meanwhile. Every sample has its own seed, derived from its index; the first sample has the seed
of a prompt that is answered once.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import replace

from kvr_mpi.decode.sampling import Answer, DecodeSequence
from kvr_mpi.prefill.one_prompt import Prefill

Begin = Callable[[int], DecodeSequence]


class Samples:
    """The answers to a prompt that is sampled several times.

    Parameters
    ----------
    prefill : Prefill
        Of the decode rank, before anything is decoded.
    begin : callable
        Begins an answer with a seed.
    seed : int
        Seed of the first answer.
    count : int
        Number of answers.

    Attributes
    ----------
    tokens : int
        Of the prompt; 0 for a plain cache.
    """

    def __init__(self, prefill: Prefill, begin: Begin, seed: int, count: int) -> None:
        self._prefill, self._begin, self._seed, self._count = prefill, begin, seed, count
        self._done: list[Answer] = []
        self._plain = copy.deepcopy(prefill.cache) if prefill.is_plain else None
        self.tokens = 0 if prefill.is_plain else prefill.partition.tokens

    def follow(self, finished: DecodeSequence) -> DecodeSequence | None:
        """Store a finished answer; start the next one if more are wanted.

        A plain cache is restored to its state after the prompt; the caller has to truncate any other cache to `tokens`,
        on all ranks that hold a part of it.
        """
        self._done.append(finished.answer())
        if len(self._done) == self._count:
            return None
        if self._plain is not None:
            self._prefill.cache = copy.deepcopy(self._plain)
        return self._begin(sample_seed(self._seed, len(self._done)))

    def answer(self) -> Answer:
        """Return the first answer, with all of them as its samples."""
        return replace(self._done[0], samples=tuple(self._done), seconds=sum(one.seconds for one in self._done))


def sample_seed(seed: int, place: int) -> int:
    """Return the seed of a sample after the first, which has the prompt's."""
    return int.from_bytes(hashlib.sha256(f"{seed} sample {place}".encode()).digest()[:7], "big")
