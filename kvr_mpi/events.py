"""The stream of a rank's events: what it did, when, and for which document.

Everything that a rank reports comes from here: the totals of the summary and of the cost, the activity that ``kvr
status`` shows, and, if spans are kept, the trace from which ``kvr report`` draws timelines. Recording only reads the
clock and appends to a list; threads of ``store`` write the files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from kvr_mpi.plain import Count

SpanKind = Literal["layer", "prefill", "wait", "send wait", "send", "receive", "forward", "decode", "write", "wave"]
STARTING = "starting"


class Span(NamedTuple):
    """A span of a rank's time.

    kind : ``layer``: from a layer's keys and values until those of the next layer are computed, waits included;
        ``wait``: for other ranks' keys and values; ``send wait``: for the link to send this rank's; ``send``,
        ``receive``, ``forward``: transfers, from their start or posting until their completion was seen;
        ``prefill``, ``decode``, ``write``: a prompt on this rank, the answers of a wave, writing a document; ``wave``:
        the prefills of a wave.
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


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A prompt as seen by one rank.

    what : ``prompt``; ``shared``: the common prefix of several prompts; ``packed``: short prompts in one row.
    tokens : of the prompt, or of all prompts in the row.
    start, stop : this rank's slice.
    first_rank, ranks : first rank of the chain in the job, and its number of ranks; groups with tensor parallelism.
    decode_rank : rank of the chain that decodes.
    """

    document: str
    part: Count
    what: str
    tokens: Count
    start: Count
    stop: Count
    first_rank: Count
    ranks: Count
    decode_rank: Count


@dataclass(slots=True)
class Totals:
    """Sums over a job, of one rank or of all."""

    wave_s: float = 0.0  # in prefill phases
    busy_s: float = 0.0  # computing, during prefill phases
    decode_s: float = 0.0
    rank_s: float = 0.0  # rank-seconds of all ranks for this rank's answers (`Record.rank_s`)
    prefilled: int = 0  # prompts whose answers were begun here
    prompt_tokens: int = 0  # computed tokens of prompts that were decoded here
    new_tokens: int = 0
    steps: int = 0  # of the answers that were decoded here
    step_tokens: int = 0  # that these have generated
    answers: int = 0  # answered documents
    texts: list[int] = field(default_factory=list)  # tokens in the text of each answered document
    prompts: int = 0  # answered prompts: several for a document in parts
    partly_seen: int = 0  # answers whose coverage is below 1
    unanswered: int = 0  # answers without text, since max_new_tokens ended the model's reasoning
    cut_off: int = 0  # answers that ended at max_new_tokens
    repeated: int = 0  # answers that were ended since they repeated themselves

    @classmethod
    def sum(cls, each: Iterable[Totals]) -> Totals:
        """Sum up the totals of several ranks."""
        total = cls()
        for one in each:
            for name in (known.name for known in fields(cls)):
                setattr(total, name, getattr(total, name) + getattr(one, name))
        return total


class Events:
    """One rank's stream; spans may be added from several threads.

    keeps_spans : whether spans and prompts are kept for `take`.
    totals : sums over all events so far; times of prompts, waves and answers are added with their spans.
    doing, what, since_s : the current activity, its subject, and the Unix time at which it began.
    prompt : number of the current prompt on this rank.
    """

    def __init__(self, *, keeps_spans: bool = False) -> None:
        self.keeps_spans, self.totals, self.prompt = keeps_spans, Totals(), -1
        self.doing, self.what, self.since_s = STARTING, "", time.time()
        self._kept: list[Span | TracedPrompt] = []

    def begin(self, doing: str, what: str = "") -> None:
        """Begin an activity."""
        if (self.doing, self.what) != (doing, what):
            self.doing, self.what, self.since_s = doing, what, time.time()

    def begin_prompt(self, prompt: TracedPrompt) -> None:
        """Begin a prompt, if spans are kept; later spans have its number."""
        if self.keeps_spans:
            self.prompt += 1
            self._kept.append(prompt)

    def add(self, span: Span) -> None:
        kind, totals = span.kind, self.totals
        if kind == "prefill":
            totals.busy_s += span.ended_s - span.began_s
        elif kind in ("wait", "send wait"):
            totals.busy_s -= span.ended_s - span.began_s
        elif kind == "wave":
            totals.wave_s += span.ended_s - span.began_s
        elif kind == "decode":
            totals.decode_s += span.ended_s - span.began_s
        if self.keeps_spans:
            self._kept.append(span)

    def end(self, kind: SpanKind, began_s: float, amount: int = 0) -> None:
        """Add a span that ends now and belongs to no single prompt."""
        self.add(Span(kind, began_s, time.perf_counter(), amount=amount))

    def take(self) -> list[Span | TracedPrompt]:
        """Return what was kept since the last call; the prompts in the order of their numbers."""
        kept, count = self._kept, len(self._kept)
        taken = kept[:count]  # other threads may append meanwhile, after these
        del kept[:count]
        return taken
