"""A run's traces: what every rank did when, a file a rank and job, in the run's folder ``trace``.

    SESSION-RANK.jsonl     a JSON value a line: first an object, the header; then
        [kind, began, took, prompt, layer, peer, amount]   a `Span`, in microseconds since the header's origin
        {"prompt": number, ...}                            what the rank calls by this number from now on
        {"clock": [at, ahead_s, error_s]}                  the rank's clock against rank 0's (``transport.clocks``)
        {"memory": [at, bytes]}                            what the rank's process takes
        {"full": bytes}                                    no more is written: the trace has its size
        {"ended": at}                                      the rank came to the end of its work

Written while the job runs, whole lines at a time: of a job that was killed all is there but the last seconds. A job
that goes on with a run adds files of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from kvr_mpi.disk import create, read_regular
from kvr_mpi.errors import DataError
from kvr_mpi.store.ledger import write_all
from kvr_mpi.topology import in_lane_of, rank_name
from kvr_mpi.trace import Kind, Recorder, Span

TRACES = "trace"
# What a job tells of itself beside its results: all traces as one, and where it is.
TRACE_FILE = "trace.json"
PROGRESS_FILE, PROMETHEUS_FILE, METRICS_FILE = "progress.json", "metrics.prom", "metrics.json"
FORMAT = "kvr-trace", 1
FILE_NAME = re.compile(r"(\d{4,})-(\d{4,})\.jsonl")
# How often what was recorded is written.
FLUSH_S = 2.0
# More than any trace: its size is at most `report.trace_mib`.
FILE_BYTES = 1 << 32
KINDS = get_args(Kind)


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace says of its rank.

    origin_s : Unix time of the origin, by the rank's own clock.
    token_s, pair_s : what slices were cut by (``costs.solve.Rates``); 0: by something else.
    ranks_per_stage : of the job.
    """

    rank: int
    size: int
    session: int
    host: str
    device: str
    layers: int
    origin_s: float
    token_s: float = 0.0
    pair_s: float = 0.0
    ranks_per_stage: int = 1

    @property
    def name(self) -> str:
        """Of the rank."""
        return rank_name(self.rank, self.ranks_per_stage)

    def peer_of(self, prompt: TracedPrompt, peer: int) -> int:
        """Say which rank of the job a span of a prompt names: of another stage the one with the same heads."""
        return in_lane_of(self.rank, prompt.first_rank + peer, self.ranks_per_stage)


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A prompt as one rank knows it.

    what : ``prompt``; ``shared``: what several prompts begin with; ``packed``: short prompts in one row.
    tokens : of the prompt, or of all in the row.
    start, stop : this rank's slice; the same: it has none, or several stretches.
    first_rank, ranks : the chain's ranks among those of the job; where a stage is several, its stages.
    decode_rank : of the chain, as well.
    predicted_s : what this rank was to compute it in, by its rates; 0: not known.
    """

    document: str
    part: int
    what: str
    tokens: int
    strategy: str
    start: int
    stop: int
    first_rank: int
    ranks: int
    decode_rank: int
    predicted_s: float = 0.0


@dataclass(slots=True)
class RankTrace:
    """One rank's trace of one job; times are in seconds of rank 0's clock, Unix time.

    clock_error_s : they are right to so many seconds against other ranks'; inf: the clocks were not compared.
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
    """Writes what a rank's recorder has, from a thread; close it when the work is done.

    What cannot be written is said once, and the job goes on without a trace.

    Parameters
    ----------
    folder : Path
        Of the run.
    origin : float
        ``time.perf_counter`` at the header's origin.
    limit_bytes : int
        Most of the file.
    say : callable
        For a line of text.
    """

    def __init__(
        self,
        folder: Path,
        header: TraceHeader,
        recorder: Recorder,
        *,
        origin: float,
        limit_bytes: int,
        say: Callable[[str], None],
    ) -> None:
        self._recorder, self._origin, self._left, self._say = recorder, origin, limit_bytes, say
        self._limit = limit_bytes
        (folder / TRACES).mkdir(exist_ok=True)
        self.path = folder / TRACES / f"{header.session:04d}-{header.rank:04d}.jsonl"
        self._handle = create(self.path)
        self._lines: list[dict[str, Any]] = [dict([FORMAT]) | asdict(header)]
        self._closed = threading.Event()
        self._flush()
        self._thread = threading.Thread(target=self._run, daemon=True, name="trace")
        self._thread.start()

    def line(self, value: dict[str, Any]) -> None:
        """Add a line that is no span."""
        self._lines.append(value)

    def now_us(self) -> int:
        """Microseconds since the origin."""
        return round(1e6 * (time.perf_counter() - self._origin))

    def close(self) -> None:
        """Write what is left."""
        self._closed.set()
        self._thread.join()
        self._flush()
        self.line({"ended": self.now_us()})
        self._flush()
        os.close(self._handle)

    def _run(self) -> None:
        while not self._closed.wait(FLUSH_S):
            self._flush()

    def _flush(self) -> None:
        spans, count = self._recorder.take(), len(self._lines)
        lines = [json.dumps(line, separators=(",", ":")) for line in self._lines[:count]]
        del self._lines[:count]
        if self._left <= 0:
            return
        lines += [self._as_text(span) for span in spans]
        if self._recorder.is_on:
            lines.append(f'{{"memory":[{self.now_us()},{_resident_bytes()}]}}')
        fitting = _fitting(lines, self._left)
        is_full = fitting < len(lines)
        if is_full:
            lines[fitting:] = [json.dumps({"full": self._limit})]
        data = "".join(f"{line}\n" for line in lines).encode()
        self._left -= len(data)
        try:
            write_all(self._handle, data)
        except OSError as error:
            self._end(f"the trace can no longer be written: {error.strerror or error}")
            return
        if is_full:
            self._end(
                f"the trace has reached its limit of {self._limit / 2**20:.1f} MiB, and ends here (report.trace_mib)"
            )

    def _end(self, why: str) -> None:
        self._recorder.is_on, self._left = False, 0
        self._say(f"{self.path}: {why}")

    def _as_text(self, span: Span) -> str:
        began = round(1e6 * (span.began_s - self._origin))
        took = round(1e6 * (span.ended_s - span.began_s))
        return f'["{span.kind}",{began},{took},{span.prompt},{span.layer},{span.peer},{span.amount}]'


def _fitting(lines: list[str], size_bytes: int) -> int:
    """How many of the lines go into so many bytes."""
    for number, line in enumerate(lines):
        size_bytes -= len(line) + 1
        if size_bytes < 0:
            return number
    return len(lines)


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def trace_files(folder: Path) -> list[Path]:
    """List the traces of a run, by job and rank."""
    traces = folder / TRACES
    if traces.is_symlink() or not traces.is_dir():
        return []
    found = [(match, traces / match[0]) for match in map(FILE_NAME.fullmatch, os.listdir(traces)) if match]
    return [path for _, path in sorted(((int(match[1]), int(match[2])), path) for match, path in found)]


def remove_traces(folder: Path) -> None:
    """Delete a run's traces and what its job told of itself, and nothing else."""
    for name in (TRACE_FILE, PROGRESS_FILE, PROMETHEUS_FILE, METRICS_FILE):
        (folder / name).unlink(missing_ok=True)
    files = trace_files(folder)
    for path in files:
        path.unlink(missing_ok=True)
    if files:
        with contextlib.suppress(OSError):  # something else is in it
            (folder / TRACES).rmdir()


def read_traces(folder: Path, skipped: Callable[[str], None] | None = None) -> Iterator[RankTrace]:
    """Read every rank's trace of every job of a run; lines that are damaged are counted.

    Parameters
    ----------
    skipped : callable, optional
        Told why a file is left out; without it the first such file raises.

    Raises
    ------
    DataError
        If a file cannot be read, is none of ours, or is of a newer version.
    """
    for path in trace_files(folder):
        try:
            trace = _read_trace(path, _read_lines(path))
        except DataError as error:
            if skipped is None:
                raise
            skipped(str(error))
            continue
        if trace is not None:
            yield trace


def _read_lines(path: Path) -> list[bytes]:
    try:
        return read_regular(path, FILE_BYTES).splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_trace(path: Path, lines: list[bytes]) -> RankTrace | None:
    """Read a trace; None if the job was killed before it had begun."""
    if not lines or not lines[0].endswith(b"\n"):
        return None
    trace = RankTrace(_read_header(path, lines[0]))
    clocks: list[tuple[float, float, float]] = []
    for line in lines[1:]:
        if not line.endswith(b"\n"):  # the job was killed in the middle of it
            break
        try:
            _add_line(trace, clocks, json.loads(line))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
            trace.damaged += 1
    return _aligned(trace, sorted(clocks))


def _read_header(path: Path, line: bytes) -> TraceHeader:
    name, version = FORMAT
    try:
        values = json.loads(line)
        found = values.pop(name)
        if isinstance(found, int) and found > version:
            raise DataError(f"{path} is a trace of version {found}; this kvr-mpi reads up to {version}: upgrade it")
        header = TraceHeader(**values)
        for each in (header.rank, header.size, header.session, header.layers, header.ranks_per_stage):
            _whole(each)
        for value in (header.origin_s, header.token_s, header.pair_s):
            _finite(value)
        if header.ranks_per_stage < 1:
            raise ValueError(header.ranks_per_stage)
        if found != version or not (isinstance(header.host, str) and isinstance(header.device, str)):
            raise ValueError(found)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a trace of a kvr-mpi run, or is damaged: its first line is {line[:60]!r}"
        ) from error
    return header


def _add_line(trace: RankTrace, clocks: list[tuple[float, float, float]], value: Any) -> None:
    """Take in a line, if its values are of the types they are to have; times are since the origin."""
    if isinstance(value, list):
        kind, began, took, *others = value
        prompt, layer, peer, amount = map(_whole, others)
        if kind not in KINDS or _finite(took) < 0:
            raise ValueError(kind)
        began_s = _finite(began) / 1e6
        trace.spans.append(Span(kind, began_s, began_s + took / 1e6, prompt, layer, peer, amount))
    elif "prompt" in value:
        number = _whole(value.pop("prompt"))
        told = TracedPrompt(**value)
        for text in (told.document, told.what, told.strategy):
            text.encode()
        for each in (told.part, told.tokens, told.start, told.stop, told.first_rank, told.ranks, told.decode_rank):
            _whole(each)
        _finite(told.predicted_s)
        trace.prompts[number] = told
    elif "clock" in value:
        at, ahead_s, error_s = map(_finite, value["clock"])
        clocks.append((at / 1e6, ahead_s, error_s))
    elif "memory" in value:
        at, size = value["memory"]
        trace.memory.append((_finite(at) / 1e6, _whole(size)))
    else:
        trace.is_full |= "full" in value
        trace.has_ended |= "ended" in value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > 1 << 53:
        raise TypeError(value)
    return value


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e15:
        raise TypeError(value)
    return float(value)


def _aligned(trace: RankTrace, clocks: list[tuple[float, float, float]]) -> RankTrace:
    """Turn times since the rank's origin into those of rank 0's clock: straight lines between the comparisons."""
    ats = [at for at, _, _ in clocks]

    def on_rank_0(at: float) -> float:
        ahead = 0.0
        if clocks:
            after = min(bisect_left(ats, at), len(clocks) - 1)
            (t0, a0, _), (t1, a1, _) = clocks[max(0, after - 1)], clocks[after]
            share = min(1.0, max(0.0, (at - t0) / (t1 - t0))) if t1 > t0 else 0.0
            ahead = a0 + share * (a1 - a0)
        return trace.header.origin_s + at - ahead

    trace.spans = [
        span._replace(began_s=on_rank_0(span.began_s), ended_s=on_rank_0(span.ended_s)) for span in trace.spans
    ]
    trace.memory = [(on_rank_0(at), size) for at, size in trace.memory]
    trace.clock_error_s = max((error for _, _, error in clocks), default=math.inf)
    return trace
