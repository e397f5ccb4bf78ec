"""Timelines of prompts from a run's traces: when each rank computed, waited and sent."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from kvr_mpi.events import Span, TracedPrompt
from kvr_mpi.store.traces import RankTrace, TraceHeader
from kvr_mpi.topology import place_in_group

SpanKey = tuple[int, int, int, str, int, str, int]


@dataclass(slots=True)
class Lane:
    """A prompt on one rank of the job; times are on rank 0's clock."""

    header: TraceHeader
    prompt: TracedPrompt
    prefill: Span
    spans: list[Span]

    @property
    def rank(self) -> int:
        return self.header.rank

    @property
    def group(self) -> int:
        """Index of the tensor-parallel group in the job."""
        return place_in_group(self.rank, self.header.tensor_parallel)[0]

    @property
    def waited_s(self) -> float:
        """Time waiting for keys and values or for the link."""
        return sum(span.ended_s - span.began_s for span in self.spans if span.kind in ("wait", "send wait"))


@dataclass(frozen=True)
class Timeline:
    """A prompt on its chain.

    lanes : one per rank, in the order of the slices; the ranks of a tensor-parallel group have the same slice.
    """

    lanes: list[Lane]

    @property
    def prompt(self) -> TracedPrompt:
        """The prompt as recorded by its first lane."""
        return self.lanes[0].prompt

    @cached_property
    def began_s(self) -> float:
        """When the first rank started."""
        return min(lane.prefill.began_s for lane in self.lanes)

    @cached_property
    def seconds(self) -> float:
        """Time from the start of the first rank to the first token."""
        decoding = self.prompt.first_rank + self.prompt.decode_rank
        return max(lane.prefill.ended_s for lane in self.lanes if lane.group == decoding) - self.began_s

    @property
    def wait_share(self) -> float:
        """Fraction of the ranks' time spent waiting."""
        total = sum(lane.prefill.ended_s - lane.prefill.began_s for lane in self.lanes)
        return sum(lane.waited_s for lane in self.lanes) / total if total else 0.0


@dataclass(slots=True)
class TracedRun:
    """All traces of a run, by job and rank; empty if there are none.

    timelines : of prompts that all ranks of their chain have recorded.
    incomplete : number of the other prompts: a trace was full, or the job was killed.
    backwards : number of transfers that seem to arrive before they were sent, according to the aligned clocks.
    """

    traces: list[RankTrace] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    incomplete: int = 0
    backwards: int = 0

    @property
    def names(self) -> dict[int, str]:
        """Names of the ranks; in tensor-parallel groups with their index there."""
        return {trace.header.rank: trace.header.name for trace in self.traces}


def read_timelines(traces: Iterable[RankTrace]) -> TracedRun:
    """Combine the ranks' traces of each prompt."""
    run = TracedRun(list(traces))
    error_s = max((trace.clock_error_s for trace in run.traces), default=0.0)
    lanes: dict[SpanKey, dict[int, Lane]] = defaultdict(dict)
    for trace in run.traces:
        header = trace.header
        of_prompt: dict[int, list[Span]] = defaultdict(list)
        for span in trace.spans:
            of_prompt[span.prompt].append(span)
        seen: Counter[tuple[str, int, str]] = Counter()
        for number, prompt in sorted(trace.prompts.items()):
            name = prompt.document, prompt.part, prompt.what
            seen[name] += 1  # a split text has a last prompt with the answers of its parts
            prefill = next((span for span in of_prompt[number] if span.kind == "prefill"), None)
            if prefill is not None and prompt.what != "packed":
                key = header.session, prompt.first_rank, prompt.ranks, *name, seen[name]
                lanes[key][header.rank] = Lane(header, prompt, prefill, of_prompt[number])
    for found in lanes.values():
        one = next(iter(found.values()))
        first, size = one.prompt.first_rank, one.header.tensor_parallel
        count = one.prompt.ranks * size
        if count > 1 and (len(found) != count or sorted(found) != list(range(first * size, first * size + count))):
            run.incomplete += 1
            continue
        timeline = Timeline(sorted(found.values(), key=lambda lane: (lane.prompt.start, lane.rank)))
        run.timelines.append(timeline)
        run.backwards += _backwards(timeline, 0.0 if math.isinf(error_s) else error_s)
    return run


def _backwards(timeline: Timeline, error_s: float) -> int:
    """Count transfers that seem to arrive before they were sent."""
    begun: dict[tuple[int, int, int], float] = {}
    for lane in timeline.lanes:
        for span in lane.spans:
            if span.kind in ("send", "forward") and span.layer >= 0:
                key = span.layer, lane.rank, span.peer
                begun[key] = min(begun.get(key, math.inf), span.began_s)
    ended: dict[tuple[int, int, int], float] = {}
    for lane in timeline.lanes:
        for span in lane.spans:
            if span.kind == "receive" and span.layer >= 0:
                key = span.layer, span.peer, lane.rank
                ended[key] = max(ended.get(key, -math.inf), span.ended_s)
    # Times in traces are rounded to microseconds.
    return sum(ended[key] + error_s + 1e-5 < began for key, began in begun.items() if key in ended)
