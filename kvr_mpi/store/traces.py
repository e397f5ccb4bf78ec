"""The traces of a run: what every rank did and when, one file per rank and job in the run's folder ``trace``.

    SESSION-RANK.json      trace events in the JSON array format of Chrome and Perfetto, one a line. The array is never
                           closed, as the format allows: the trace of a killed job only lacks its last seconds

Times are microseconds of Unix time, on rank 0's clock as estimated when the job began. A process is a rank of a job, a
thread a kind of work. Viewers ignore these metadata events:

    kvr_trace              the version of the format, and a `TraceHeader`; the first event
    prompt                 a `TracedPrompt`, and its number on the rank
    clock                  seconds by which the rank's clock is ahead of rank 0's, and the error of that estimate
    full, ended            the trace ends here: it has reached its maximum size; the rank has finished its work

A job that resumes a run adds its own files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from kvr_mpi.disk import create_rank_file, rank_file, rank_files, read_regular, write_all
from kvr_mpi.errors import DataError, OutputError
from kvr_mpi.events import Events, Span, SpanKind, TracedPrompt
from kvr_mpi.logs import RankLogger
from kvr_mpi.plain import Count, read_plain
from kvr_mpi.topology import in_lane_of, rank_name

TRACES = "trace"
HEADER, VERSION = "kvr_trace", 3
FLUSH_S = 2.0  # interval between writes
# Maximum size of a run's traces, over all ranks and resumed jobs, and thus of a file.
TRACE_BYTES = FILE_BYTES = 256 << 20
# Timeline row of each kind of span; kinds whose spans may overlap get up to LANES rows.
ROWS: dict[SpanKind, int] = {
    "prefill": 1,
    "layer": 1,
    "wait": 1,
    "send wait": 1,
    "decode": 1,
    "write": 2,
    "send": 10,
    "forward": 30,
    "receive": 50,
}
ROW_NAMES = {1: "compute", 2: "write", 10: "send", 30: "forward", 50: "receive"}
LANES = 20
# Number of latest prompts for which spans may still be recorded.
RECENT_PROMPTS = 4096
OPENING = b"[\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The rank that a trace belongs to.

    tensor_parallel : of the job.
    """

    rank: Count
    size: Count
    session: Count
    host: str
    device: str
    tensor_parallel: Annotated[int, Field(ge=1)] = 1

    @property
    def name(self) -> str:
        """Name of the rank."""
        return rank_name(self.rank, self.tensor_parallel)


@dataclass(slots=True)
class RankTrace:
    """One rank's trace of one job; times are in seconds of rank 0's clock, Unix time.

    clock_error_s : error of the times relative to other ranks; inf: the clocks were not compared.
    """

    header: TraceHeader
    prompts: dict[int, TracedPrompt] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    clock_error_s: float = math.inf
    is_full: bool = False
    has_ended: bool = False
    damaged: int = 0  # lines that cannot be read


class TraceWriter:
    """Writes the spans that a rank's events keep, from a thread until it is closed.

    A write error is logged once, and the job continues without a trace. `offset_s` is Unix time on rank 0's clock minus
    ``time.perf_counter``, `limit_bytes` the maximum size of the file.
    """

    def __init__(
        self,
        folder: Path,
        header: TraceHeader,
        events: Events,
        *,
        offset_s: float,
        limit_bytes: int,
        logger: RankLogger,
    ) -> None:
        self._header, self._stream, self._offset_s, self._logger = header, events, offset_s, logger
        self._limit = self._left = limit_bytes
        self._process = header.session * 1_000_000 + header.rank
        self._prompts: dict[int, TracedPrompt] = {}
        self._number = events.prompt  # of the last prompt that was written
        self._row_ends: dict[int, float] = {}
        self.path = rank_file(folder / TRACES, header.session, header.rank)
        try:
            self._handle = create_rank_file(self.path.parent, header.session, header.rank)
        except OSError as error:
            raise OutputError(f"{self.path.parent}, for output.trace: {error.strerror or error}; remove it") from error
        self._events: list[dict[str, Any]] = []
        self._add(HEADER, {"version": VERSION, **asdict(header)})
        job = f", job {header.session}" if header.session > 1 else ""
        self._add("process_name", {"name": f"{header.name} ({header.host}, {header.device}){job}"})
        self._add("process_sort_index", {"sort_index": self._process})
        self._write(OPENING)
        self._flush()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="trace")
        self._thread.start()

    def add_clock(self, ahead_s: float, error_s: float) -> None:
        """Record the drift of the rank's clock against rank 0's, beyond `offset_s`."""
        self._add("clock", {"ahead_s": ahead_s, "error_s": error_s})

    def close(self) -> None:
        """Write the remaining spans."""
        self._closed.set()
        self._thread.join()
        self._flush()
        self._add("ended", {})
        self._flush()
        os.close(self._handle)

    def _add(self, name: str, values: dict[str, Any], thread: int = 0) -> None:
        self._events.append(self._event("M", name, time.perf_counter(), thread) | {"args": values})

    def _event(self, phase: str, name: str, at_s: float, thread: int = 0) -> dict[str, Any]:
        at_us = round(1e6 * (at_s + self._offset_s))
        return {"ph": phase, "name": name, "pid": self._process, "tid": thread, "ts": at_us}

    def _run(self) -> None:
        while not self._closed.wait(FLUSH_S):
            self._flush()

    def _flush(self) -> None:
        spans = list[Span]()
        for one in self._stream.take():
            if isinstance(one, TracedPrompt):
                self._number += 1
                self._prompts[self._number] = one
                self._prompts.pop(self._number - RECENT_PROMPTS, None)
                self._add("prompt", {"number": self._number, **asdict(one)})
            elif one.kind in ROWS:
                spans.append(one)
        drawn = [self._as_line(span) for span in sorted(spans, key=lambda span: (span.began_s, -span.ended_s))]
        count = len(self._events)
        lines = [f"{_encode(event)},\n" for event in self._events[:count]]
        del self._events[:count]
        if self._left <= 0:
            return
        if self._stream.keeps_spans:
            memory = self._event("C", "memory", time.perf_counter())
            lines.append(f"{_encode(memory | {'args': {'resident bytes': _resident_bytes()}})},\n")
        lines += drawn
        fitting = bisect_right(list(itertools.accumulate(map(len, lines))), self._left)
        is_full = fitting < len(lines)
        if is_full:
            full = self._event("M", "full", time.perf_counter()) | {"args": {"bytes": self._limit}}
            lines[fitting:] = [f"{_encode(full)},\n"]
        if self._write("".join(lines).encode()) and is_full:
            self._end(f"the trace has reached its limit of {self._limit / 2**20:.1f} MiB, and ends here")

    def _write(self, data: bytes) -> bool:
        self._left -= len(data)
        try:
            write_all(self._handle, data)
        except OSError as error:
            self._end(f"the trace can no longer be written: {error.strerror or error}")
            return False
        return True

    def _end(self, why: str) -> None:
        self._stream.keeps_spans, self._left = False, 0
        self._logger.info(f"{self.path}: {why}")

    def _as_line(self, span: Span) -> str:
        """Convert a span to an event; peers are ranks of the job."""
        prompt, name, args = self._prompts.get(span.prompt), str(span.kind), dict[str, Any]()
        if span.kind == "layer":
            name = f"layer {span.layer}"
        elif span.kind == "prefill" and prompt is not None:
            name = f"prefill {prompt.document}"
            args = {"tokens": prompt.tokens, "slice": [prompt.start, prompt.stop]}
        peer = -1
        if span.peer >= 0:
            first = 0 if prompt is None else prompt.first_rank
            peer = in_lane_of(self._header.rank, first + span.peer, self._header.tensor_parallel)
        numbers = {"prompt": span.prompt, "layer": span.layer, "peer": peer}
        args |= {key: number for key, number in numbers.items() if number >= 0}
        if span.amount:
            args["answers" if span.kind == "decode" else "bytes"] = span.amount
        event = self._event("X", name, span.began_s, self._row_of(span))
        took_us = round(1e6 * (span.ended_s - span.began_s))
        return f"{_encode(event | {'cat': span.kind, 'dur': took_us, 'args': args})},\n"

    def _row_of(self, span: Span) -> int:
        """Find a row of the timeline without overlap; new rows are named."""
        row = ROWS[span.kind]
        if row >= LANES // 2:
            lanes = range(row, row + LANES - 1)
            row = next((one for one in lanes if self._row_ends.get(one, -math.inf) <= span.began_s), row)
        if row not in self._row_ends:
            self._add("thread_name", {"name": ROW_NAMES[ROWS[span.kind]]}, row)
        self._row_ends[row] = max(span.ended_s, self._row_ends.get(row, span.ended_s))
        return row


def _resident_bytes() -> int:
    """Resident memory of this process; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def trace_files(folder: Path) -> list[Path]:
    """List the traces of a run, by job and rank."""
    return [path for _, path in rank_files(folder / TRACES)]


def read_traces(folder: Path, skipped: Callable[[str], None] | None = None) -> Iterator[RankTrace]:
    """Read every rank's trace of every job of a run; damaged lines are counted.

    A file that cannot be read, is not a trace of a run, or has another version raises `DataError`, or calls `skipped`
    with the reason.
    """
    for path in trace_files(folder):
        try:
            trace = _read_trace(path)
        except DataError as error:
            if skipped is None:
                raise
            skipped(str(error))
            continue
        if trace is not None:
            yield trace


def _read_trace(path: Path) -> RankTrace | None:
    """Read a trace; None if the job was killed before its first line."""
    try:
        lines = read_regular(path, FILE_BYTES).splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if lines and not lines[-1].endswith(b"\n"):  # the job was killed while writing it
        del lines[-1]
    if not lines or lines == [OPENING]:
        return None
    trace = RankTrace(_read_header(path, *lines[:2]))
    clocks: list[tuple[float, float, float]] = []
    for line in lines[2:]:
        try:
            _add_event(trace, clocks, json.loads(line.removesuffix(b",\n")))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
            trace.damaged += 1
    return _aligned(trace, sorted(clocks))


def _read_header(path: Path, opening: bytes, line: bytes = b"") -> TraceHeader:
    try:
        event = json.loads(line.removesuffix(b",\n"))
        values = event["args"]
        found = values.pop("version")
        if opening != OPENING or event["name"] != HEADER:
            raise ValueError(opening)
        if found != VERSION:
            raise DataError(f"{path} is a trace of version {found}; this kvr-mpi reads version {VERSION} only")
        return read_plain(TraceHeader, values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a trace of a kvr-mpi run, or is damaged: it begins with {(opening + line)[:60]!r}"
        ) from error


def _add_event(trace: RankTrace, clocks: list[tuple[float, float, float]], event: dict[str, Any]) -> None:
    """Add an event if its values have the expected types."""
    at_s, name, values = _number(event["ts"], int, float) / 1e6, event["name"], event["args"]
    if event["ph"] == "X":
        kind, took_s = event["cat"], _number(event["dur"], int, float) / 1e6
        if kind not in ROWS or took_s < 0:
            raise ValueError(kind)
        whole = {key: _number(values[key], int) for key in ("prompt", "layer", "peer") if key in values}
        amount = _number(values.get("bytes", values.get("answers", 0)), int)
        trace.spans.append(Span(kind, at_s, at_s + took_s, **whole, amount=amount))
    elif event["ph"] == "C":
        trace.memory.append((at_s, _number(values["resident bytes"], int)))
    elif name == "prompt":
        trace.prompts[_number(values["number"], int)] = read_plain(TracedPrompt, values)
    elif name == "clock":
        clocks.append((at_s, _number(values["ahead_s"], int, float), _number(values["error_s"], int, float)))
    else:
        trace.is_full |= name == "full"
        trace.has_ended |= name == "ended"


def _number(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds or not abs(value) <= 1 << 53:
        raise TypeError(value)
    return value


def _aligned(trace: RankTrace, clocks: list[tuple[float, float, float]]) -> RankTrace:
    """Correct the drift of the rank's clock by linear interpolation."""
    if not clocks:
        return trace
    ats, aheads, errors = zip(*clocks, strict=True)

    def on_rank_0(at: list[float]) -> list[float]:
        found: list[float] = (np.asarray(at) - np.interp(at, ats, aheads)).tolist()
        return found

    began, ended = (on_rank_0([getattr(span, name) for span in trace.spans]) for name in ("began_s", "ended_s"))
    times = zip(trace.spans, began, ended, strict=True)
    trace.spans = [span._replace(began_s=first, ended_s=last) for span, first, last in times]
    sizes = [size for _, size in trace.memory]
    trace.memory = list(zip(on_rank_0([at for at, _ in trace.memory]), sizes, strict=True))
    trace.clock_error_s = max(errors)
    return trace
