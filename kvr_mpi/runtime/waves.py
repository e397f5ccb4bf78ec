"""Decisions of a chain's leader: which prompt is next, which rank decodes it, and when a wave ends.

A wave's prompts are prefilled one after the other, each with another rank last (the *decode rank*, which keeps the
cache and decodes), until the ranks' memory is full or no prompt is left. Then every rank decodes its prompts.

This module uses neither MPI nor a clock, so its guarantees can be tested alone: memory is never exceeded, every prompt
runs once, and the ranks' numbers of prompts differ by at most one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvr_mpi.topology import Rotation

if TYPE_CHECKING:
    from kvr_mpi.requests.prompt import Prompt
    from kvr_mpi.runtime.chain_runner import ChainRunner
    from kvr_mpi.runtime.plan import Plan

# A wave's prefill ends after this time even if memory is left, so that answers are stored regularly.
MAX_WAVE_S = 300.0


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

    Parameters
    ----------
    runner : ChainRunner
        Plans prompts, and predicts their memory.
    max_sequences : int
        Most sequences that one rank decodes together.
    """

    def __init__(self, runner: ChainRunner, max_sequences: int) -> None:
        self._runner, self._max_sequences = runner, max_sequences
        self._waiting: deque[Prompt] = deque()
        self._held = [Held()] * runner.chain.size
        self._begun = 0
        self._checked: str | None = None  # the document whose prompts are known to fit

    @property
    def has_waiting(self) -> bool:
        """Whether prompts are waiting for prefill."""
        return bool(self._waiting)

    @property
    def held(self) -> Sequence[Held]:
        """Memory and answers of each rank."""
        return self._held

    def begin_wave(self, held: Iterable[Held]) -> None:
        """Begin a wave, given the memory in use on each rank."""
        self._held = list(held)

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Append the prompts of a document."""
        self._waiting.extend(prompts)
        self._checked = None

    def decide(self, *, wave_s: float, has_documents: bool) -> Plan | Next:
        """Decide on the next action; carry it out with `add`, `drop_document` or `start_next`.

        Parameters
        ----------
        wave_s : float
            Seconds since the wave's prefill began.
        has_documents : bool
            Whether the queue may have more documents.

        Raises
        ------
        DocumentError
            If any prompt of the next document cannot run on this chain.
        """
        holds_any = any(held.sequences for held in self._held)
        if holds_any and wave_s > MAX_WAVE_S:
            return Next.DECODE
        if not self._waiting:
            return Next.DOCUMENT if has_documents else Next.DECODE
        prompt = self._waiting[0]
        self._check_document(prompt.document_id)
        pinned = self._runner.pinned_rank(prompt)
        rank = self._next_decode_rank() if pinned is None else pinned
        plan = self._runner.plan(prompt, rank)
        fits = self._held[rank].sequences < self._max_sequences and self._runner.fits_beside(
            plan, [held.bytes for held in self._held]
        )
        return plan if fits or not holds_any else Next.DECODE

    def start_next(self, plan: Plan) -> None:
        """Remove the next prompt from the queue, and account for its memory."""
        self._waiting.popleft()
        self._begun += 1
        if self._runner.new_tokens:  # otherwise prefill ends the prompt
            kept = plan.kept_bytes
            for rank in range(len(self._held)) if self._runner.is_spread else [plan.decode_rank]:
                held = self._held[rank]
                self._held[rank] = Held(held.sequences + 1, held.bytes + kept[rank])

    @property
    def next_prompt(self) -> Prompt:
        """The first waiting prompt, to which the decision applies."""
        return self._waiting[0]

    def drop_document(self, document_id: str) -> None:
        """Remove the waiting prompts of a document."""
        self._waiting = deque(prompt for prompt in self._waiting if prompt.document_id != document_id)

    def _check_document(self, document_id: str) -> None:
        """Refuse a document, before its first prompt starts, if one of its prompts does not fit on an empty chain."""
        if self._checked == document_id:
            return
        for prompt in self._waiting:
            if prompt.document_id == document_id:
                self._runner.check_fits(self._runner.plan(prompt, len(self._held) - 1))
        self._checked = document_id

    def _next_decode_rank(self) -> int:
        """Choose the rank with the fewest sequences and bytes to decode the next prompt; ranks take turns on ties."""
        size = len(self._held)
        turn = Rotation(size, self._begun % size)
        return min(
            range(size), key=lambda rank: (self._held[rank].sequences, self._held[rank].bytes, turn.place_of(rank))
        )
