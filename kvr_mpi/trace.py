"""Recording of what a rank does, as spans of time.

Costs a clock and an append for each; whatever is written of it is written elsewhere (``store.traces``), by a thread.
"""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

Kind = Literal["layer", "prefill", "wait", "send wait", "send", "receive", "forward", "decode", "write"]


class Span(NamedTuple):
    """A span of a rank's time.

    kind : ``layer``: what follows the making of a layer's keys and values, up to the next layer's, waits included;
        ``wait``: for other ranks' keys and values; ``send wait``: for the link to take this rank's; ``send``,
        ``receive``, ``forward``: transfers, from when they were begun or posted to when they were seen to be over;
        ``prefill``, ``decode``, ``write``: a prompt on this rank, a wave's answers, a document's way to the disk.
    began_s, ended_s : ``time.perf_counter``.
    prompt : number of the prompt on this rank; -1: none.
    layer : -1: none.
    peer : rank of the chain at the other end; -1: none.
    amount : bytes that travelled, or answers that were decoded.
    """

    kind: Kind
    began_s: float
    ended_s: float
    prompt: int = -1
    layer: int = -1
    peer: int = -1
    amount: int = 0


class Recorder:
    """Collects one rank's spans; thread-safe.

    is_on : otherwise nothing is kept.
    prompt : number of the prompt that the rank is at.
    """

    def __init__(self, *, is_on: bool = False) -> None:
        self.is_on, self.prompt = is_on, -1
        self._spans: list[Span] = []

    def note(
        self, kind: Kind, began_s: float, *, prompt: int | None = None, layer: int = -1, peer: int = -1, amount: int = 0
    ) -> None:
        """Record a span that ends now, by default of the prompt that the rank is at."""
        if self.is_on:
            at = self.prompt if prompt is None else prompt
            self._spans.append(Span(kind, began_s, time.perf_counter(), at, layer, peer, amount))

    def add(self, span: Span) -> None:
        """Record a span."""
        if self.is_on:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """Return the spans recorded since the last call."""
        spans, count = self._spans, len(self._spans)
        taken = spans[:count]  # what another thread appends meanwhile comes after it
        del spans[:count]
        return taken
