"""Decisions of a chain's leader: which prompt is next, which rank decodes it, and when a wave ends.

A wave's prompts are prefilled one after the other, each with another rank last (the *decode rank*, which keeps its
cache and decodes it), until the ranks' memory is full or nothing is left; then every rank decodes what it holds.

Pure: it knows no MPI and no clock, so that its promises can be tested alone. Memory is never exceeded, every prompt
runs once, and all ranks hold as many prompts, give or take one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from kvr_mpi.topology import Rotation

# A wave's prefill ends after this time even if there is memory left, so that answers come to be written.
MAX_WAVE_S = 300.0


class Request(Protocol):
    """A prompt to run."""

    @property
    def document_id(self) -> str:
        """The document; prompts of one document are refused together."""


class Planned(Protocol):
    """A prompt and its plan."""

    @property
    def decode_rank(self) -> int:
        """The rank that decodes it."""

    @property
    def kept_bytes(self) -> Sequence[int]:
        """Additional bytes that each rank keeps until it is answered."""


R = TypeVar("R", bound=Request)
R_contra = TypeVar("R_contra", bound=Request, contravariant=True)
P = TypeVar("P", bound=Planned)


class Capacity(Protocol[R_contra, P]):
    """Plans prompts, and knows the memory of a chain."""

    def plan(self, prompt: R_contra, decode_rank: int) -> P:
        """Plan a prompt with the last slice on this rank of the chain."""

    def pinned_rank(self, prompt: R_contra) -> int | None:
        """Return the rank that must decode a prompt; None if any rank will do."""

    def why_too_large(self, plan: P) -> str | None:
        """Explain why a prompt does not fit on an empty chain; None if it does."""

    def fits_beside(self, plan: P, held_bytes: Sequence[int]) -> bool:
        """Whether a prompt fits into the memory that the ranks have left."""


@dataclass(frozen=True, slots=True)
class Held:
    """Memory and answers of a rank, including those planned."""

    sequences: int = 0
    bytes: int = 0


class Next(Enum):
    """The next action, unless it is a prompt."""

    DOCUMENT = "another document is wanted"
    DECODE = "nothing more is prefilled before the ranks have decoded"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The document of the next prompt cannot run on this chain."""

    reason: str


class WaveScheduler(Generic[R, P]):
    """The waiting prompts of a chain, and the memory in use on its ranks; only on the leader.

    Parameters
    ----------
    size : int
        Ranks of the chain.
    capacity : Capacity
    max_sequences : int
        Most that one rank decodes together.
    decodes : bool
        Whether there is anything to decode; otherwise prompts leave as soon as they are prefilled.
    is_spread : bool
        Whether every rank holds a share of every prompt, instead of one rank all of it.
    """

    def __init__(
        self,
        size: int,
        capacity: Capacity[R, P],
        *,
        max_sequences: int,
        decodes: bool = True,
        is_spread: bool = False,
    ) -> None:
        self._capacity, self._max_sequences, self._decodes = capacity, max_sequences, decodes
        self._is_shared = is_spread
        self._waiting: deque[R] = deque()
        self._held = [Held()] * size
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

    def add(self, requests: Iterable[R]) -> None:
        """Append the prompts of a document."""
        self._waiting.extend(requests)
        self._checked = None

    def decide(self, *, wave_s: float, has_documents: bool) -> P | Refusal | Next:
        """Decide on the next action; carry it out with `add`, `drop_document` or `start_next`.

        Parameters
        ----------
        wave_s : float
            How long the wave's prefill has gone on.
        has_documents : bool
            Whether there may be documents that have not been taken.
        """
        holds_any = any(held.sequences for held in self._held)
        if holds_any and wave_s > MAX_WAVE_S:
            return Next.DECODE
        if not self._waiting:
            return Next.DOCUMENT if has_documents else Next.DECODE
        request = self._waiting[0]
        if reason := self._why_too_large(request):
            return Refusal(reason)
        pinned = self._capacity.pinned_rank(request)
        rank = self._next_decode_rank() if pinned is None else pinned
        plan = self._capacity.plan(request, rank)
        fits = self._held[rank].sequences < self._max_sequences and self._capacity.fits_beside(
            plan, [held.bytes for held in self._held]
        )
        return plan if fits or not holds_any else Next.DECODE

    def start_next(self, plan: P) -> None:
        """Remove the next prompt from the queue, and account for its memory."""
        self._waiting.popleft()
        self._begun += 1
        if self._decodes:
            kept = plan.kept_bytes
            for rank in range(len(self._held)) if self._is_shared else [plan.decode_rank]:
                held = self._held[rank]
                self._held[rank] = Held(held.sequences + 1, held.bytes + kept[rank])

    @property
    def next_request(self) -> R:
        """The prompt that the decision is about."""
        return self._waiting[0]

    def drop_document(self, document_id: str) -> None:
        """Remove the waiting prompts of a document."""
        self._waiting = deque(request for request in self._waiting if request.document_id != document_id)

    def _why_too_large(self, request: R) -> str | None:
        """Explain why one of a document's prompts does not fit on an empty chain.

        This is checked before the first one starts.
        """
        if self._checked == request.document_id:
            return None
        last = len(self._held) - 1
        for each in (other for other in self._waiting if other.document_id == request.document_id):
            if reason := self._capacity.why_too_large(self._capacity.plan(each, last)):
                return reason
        self._checked = request.document_id
        return None

    def _next_decode_rank(self) -> int:
        """Choose the rank that decodes the next prompt, in turn while all hold equally much."""
        size = len(self._held)
        turn = Rotation(size, self._begun % size)
        return min(
            range(size), key=lambda rank: (self._held[rank].sequences, self._held[rank].bytes, turn.place_of(rank))
        )
