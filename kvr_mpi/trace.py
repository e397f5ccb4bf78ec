"""Records a rank's activities as spans of time.

Recording a span only reads the clock and appends to a list; a thread of ``store.traces`` writes the spans.
"""

from __future__ import annotations

import time
from typing import Literal, NamedTuple

SpanKind = Literal["layer", "prefill", "wait", "send wait", "send", "receive", "forward", "decode", "write"]


class Span(NamedTuple):
    """A span of a rank's time.

    kind : ``layer``: from a layer's keys and values until those of the next layer are computed, waits included;
        ``wait``: for other ranks' keys and values; ``send wait``: for the link to send this rank's; ``send``,
        ``receive``, ``forward``: transfers, from their start or posting until their completion was seen;
        ``prefill``, ``decode``, ``write``: a prompt on this rank, the answers of a wave, writing a document.
    began_s, ended_s : ``time.perf_counter``.
    prompt : number of the prompt on this rank; -1: none.
    layer : index of the layer; -1: none.
    peer : rank of the chain at the other end; -1: none.
    amount : bytes transferred, or answers decoded.
    """

    kind: SpanKind
    began_s: float
    ended_s: float
    prompt: int = -1
    layer: int = -1
    peer: int = -1
    amount: int = 0


class Recorder:
    """Collects one rank's spans; thread-safe.

    is_on : whether spans are recorded.
    prompt : number of the rank's current prompt.
    """

    def __init__(self, *, is_on: bool = False) -> None:
        self.is_on, self.prompt = is_on, -1
        self._spans: list[Span] = []

    def note(self, kind: SpanKind, began_s: float, amount: int = 0) -> None:
        """Record a span that ends now and belongs to no single prompt."""
        self.add(Span(kind, began_s, time.perf_counter(), amount=amount))

    def add(self, span: Span) -> None:
        if self.is_on:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """Return the spans recorded since the last call."""
        spans, count = self._spans, len(self._spans)
        taken = spans[:count]  # other threads may append meanwhile, after these
        del spans[:count]
        return taken
