"""A run's trace as one JSON file that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open.

Chrome's trace-event format: a process a rank, a thread a kind of work, times in microseconds on rank 0's clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvr_mpi.disk import replacing
from kvr_mpi.errors import DataError
from kvr_mpi.store.traces import TRACE_FILE, RankTrace, read_traces
from kvr_mpi.trace import Kind, Span

# On which row of its rank a span is drawn; what may overlap with others of its row gets rows of its own.
ROWS: dict[Kind, int] = {
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


def write_perfetto(folder: Path, path: Path, skipped: Callable[[str], None] | None = None) -> tuple[int, int]:
    """Write what all ranks of all jobs of a run have recorded; the file is there as a whole or not at all.

    Parameters
    ----------
    skipped : callable, optional
        Told why a rank's file is left out; without it the first such file raises.

    Returns
    -------
    (int, int)
        Spans, and ranks.

    Raises
    ------
    DataError
        If there is no trace, or one that cannot be read.
    OSError
        If the file cannot be written.
    """
    spans = 0
    ranks: set[int] = set()
    traces = iter(read_traces(folder, skipped))
    first = next(traces, None)
    if first is None:
        raise DataError(f"{folder}: no trace found; expected the output folder of a run with report.trace = true")
    began_s = first.header.origin_s
    with replacing(path) as stream:
        stream.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        is_first = True
        for trace in _chained(first, traces):
            spans += len(trace.spans)
            ranks.add(trace.header.rank)
            for event in _events(trace, began_s):
                stream.write((b"" if is_first else b",\n") + json.dumps(event, separators=(",", ":")).encode())
                is_first = False
        stream.write(b"\n]}\n")
    return spans, len(ranks)


def describe_trace(folder: Path) -> str:
    """Write a run's trace, and say so in a line; what goes wrong is said there, too: the results are worth more."""
    skipped: list[str] = []
    try:
        spans, ranks = write_perfetto(folder, folder / TRACE_FILE, skipped.append)
    except (DataError, OSError) as error:
        return f"warning: the ranks' traces were not merged: {'; '.join([*skipped, str(error)])}"
    without = f"; left out: {'; '.join(skipped)}" if skipped else ""
    return (
        f"trace: {spans} spans of {ranks} rank(s) in {folder / TRACE_FILE}; open it at ui.perfetto.dev, or see "
        f"`kvr report {folder}`{without}"
    )


def _chained(first: RankTrace, others: Iterable[RankTrace]) -> Iterator[RankTrace]:
    yield first
    yield from others


def _events(trace: RankTrace, began_s: float) -> Iterator[dict[str, Any]]:
    header, named = trace.header, set()
    process = header.session * 1_000_000 + header.rank
    about = f"{header.name} ({header.host}, {header.device})"
    if header.session > 1:
        about += f", job {header.session}"
    yield _name("process_name", process, 0, about)
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    ends: dict[int, float] = {}  # of each row's last span
    for span in sorted(trace.spans, key=lambda span: (span.began_s, -span.ended_s)):
        row = ROWS[span.kind]
        if row >= LANES // 2:
            row = next((lane for lane in range(row, row + LANES - 1) if ends.get(lane, 0.0) <= span.began_s), row)
            ends[row] = span.ended_s
        if row not in named:
            named.add(row)
            yield _name("thread_name", process, row, ROW_NAMES[ROWS[span.kind]])
        yield {
            "ph": "X",
            "name": _title(span, trace),
            "cat": span.kind,
            "pid": process,
            "tid": row,
            "ts": round(1e6 * (span.began_s - began_s), 1),
            "dur": round(1e6 * (span.ended_s - span.began_s), 1),
            "args": _arguments(span, trace),
        }
    for at_s, size in trace.memory:
        event = {"ph": "C", "name": "memory (MiB)", "pid": process, "tid": 0, "ts": round(1e6 * (at_s - began_s), 1)}
        yield {**event, "args": {"resident": round(size / 2**20, 1)}}


def _title(span: Span, trace: RankTrace) -> str:
    prompt = trace.prompts.get(span.prompt)
    match span.kind:
        case "layer":
            return f"layer {span.layer}"
        case "prefill":
            return f"prefill {prompt.document}" if prompt is not None else "prefill"
        case "decode":
            return f"decode {span.amount} answer(s)"
    return span.kind


def _arguments(span: Span, trace: RankTrace) -> dict[str, Any]:
    prompt, found = trace.prompts.get(span.prompt), {}
    if prompt is not None:
        found = {"document": prompt.document, "prompt_tokens": prompt.tokens}
        if span.kind == "prefill":
            found |= {"slice": [prompt.start, prompt.stop], "strategy": prompt.strategy, "what": prompt.what}
            found |= {"predicted_s": prompt.predicted_s} if prompt.predicted_s else {}
    if span.layer >= 0:
        found["layer"] = span.layer
    if span.peer >= 0:
        found["peer"] = span.peer if prompt is None else trace.header.peer_of(prompt, span.peer)
    if span.kind in ("send", "forward", "receive"):
        found["bytes"] = span.amount
    return found


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
