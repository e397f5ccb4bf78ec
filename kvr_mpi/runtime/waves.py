"""Decisions of a chain's leader: which prompt is next, which rank decodes it, and when a wave ends.

A wave's prompts are prefilled one after the other, each with another rank last (the *decode rank*, which keeps the
cache and decodes), until the ranks' memory is full or no prompt is left. Then every rank decodes its prompts.

This module uses neither MPI nor a clock, so its guarantees can be tested alone: memory is never exceeded, every prompt
runs once, and the ranks' numbers of prompts differ by at most one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvr_mpi.topology import Rotation

if TYPE_CHECKING:
    from kvr_mpi.runtime.plan import Plan
    from kvr_mpi.runtime.planner import Planner
    from kvr_mpi.runtime.prompt import Prompt

MAX_WAVE_S = 300.0  # a wave's prefill ends after this time even if memory is left, so that answers are stored regularly


@dataclass(frozen=True, slots=True)
class Held:
    """Memory and answers of a rank, including those planned."""

    sequences: int = 0
    bytes: int = 0


class Next(Enum):
    """The next action, unless it is a prompt."""

    DOCUMENT = "another document is wanted"
    DECODE = "nothing more is prefilled before the ranks have decoded"


class WaveScheduler:
    """The waiting prompts of a chain, and the memory in use on its ranks; only on the leader.

    max_sequences : maximum number of sequences that one rank decodes together.
    held : memory and answers of each rank.
    """

    def __init__(self, planner: Planner, max_sequences: int) -> None:
        self._planner, self._max_sequences = planner, max_sequences
        self._waiting: deque[Prompt] = deque()
        self.held = [Held()] * planner.size
        self._begun, self._largest = 0, 0  # prompts, and bytes of the largest in this wave

    @property
    def has_waiting(self) -> bool:
        """Whether prompts are waiting for prefill."""
        return bool(self._waiting)

    def begin_wave(self, held: Iterable[Held]) -> None:
        """Begin a wave, given the memory in use on each rank."""
        self.held, self._largest = list(held), 0

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Append the prompts of a document."""
        self._waiting.extend(prompts)

    def decide(self, *, wave_s: float, has_documents: bool) -> Plan | Next:
        """Decide on the next action: a prompt, which has then left the queue, or the prefix that it shares with others.

        The memory of a plan that is returned is accounted for.

        Raises `DocumentError` if `next_prompt` cannot run on this chain.

        wave_s : seconds since the wave's prefill began.
        has_documents : whether the queue may have more documents.
        """
        holds_any = any(held.sequences for held in self.held)
        if holds_any and wave_s > MAX_WAVE_S:
            return Next.DECODE
        if not self._waiting:
            return Next.DOCUMENT if has_documents else Next.DECODE
        plan = self._planner.plan(self._waiting[0], self._next_decode_rank())
        fits = self.held[plan.decode_rank].sequences < self._max_sequences and self._planner.fits_beside(
            plan, [held.bytes for held in self.held]
        )
        largest = max([self._largest, *plan.kept.values()])
        together = [held.bytes + plan.kept.get(rank, 0) for rank, held in enumerate(self.held)]
        if holds_any and not (fits and self._planner.fits_shared(together, largest)):
            return Next.DECODE
        self._largest = largest
        is_answered = not plan.prompt.is_prefix
        if is_answered:
            self._waiting.popleft()
            self._begun += 1
        for rank, size in plan.kept.items():
            held = self.held[rank]
            self.held[rank] = Held(held.sequences + is_answered, held.bytes + size)
        return plan

    @property
    def next_prompt(self) -> Prompt:
        """The first waiting prompt, to which the decision applies."""
        return self._waiting[0]

    def drop_document(self, document_id: str) -> None:
        """Remove the waiting prompts of a document."""
        self._waiting = deque(prompt for prompt in self._waiting if prompt.document_id != document_id)

    def _next_decode_rank(self) -> int:
        """Choose the rank with the fewest sequences and bytes to decode the next prompt; ranks take turns on ties."""
        size = len(self.held)
        turn = Rotation(size, self._begun % size)
        return min(
            range(size), key=lambda rank: (self.held[rank].sequences, self.held[rank].bytes, turn.place_of(rank))
        )
