"""The report: one self-contained HTML page with charts, and answers to browse and search.

A content security policy in the page forbids network access, and all scripts and styles except the page's own.
Documents and answers are untrusted text: in drawings they are escaped. In the table they are packed (JSON, gzip,
base64), and the page's script inserts them as text, so they are never parsed as markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from kvr_mpi.duration import duration_text
from kvr_mpi.errors import counted
from kvr_mpi.report.charts import (
    Chart,
    draw_first_token,
    draw_memory,
    draw_progress,
    draw_timelines,
    draw_waits,
)
from kvr_mpi.report.style import bytes_text, palette, plain_number
from kvr_mpi.report.svg import escaped
from kvr_mpi.report.timeline import TracedRun, read_timelines
from kvr_mpi.store.folder import has_results
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.summary import Summary, shorten
from kvr_mpi.store.traces import read_traces

# Maximum size of a page; answers are truncated to fit.
PAGE_BYTES = 5_000_000
# Lengths to which answers may be truncated; the first that fits is used.
ANSWER_CHARS = (20_000, 8_000, 4_000, 2_000, 1_000, 600, 400, 250, 120, 60, 0)
REASONS = 12
# How answers ended (`Record.ended_early`).
ENDED_EARLY = {"": "", "reasoning": "empty: reasoning", "length": "cut off", "repetition": "stopped: repetition"}
PROMPT_CHARS = 600


@dataclass(frozen=True, slots=True)
class RunFacts:
    """General facts about the run.

    left : documents neither done nor failed; None: not known.
    cost : description in one line; empty: not known.
    answering_s : time in which documents were answered; 0: not known.
    question : what was asked about each document; empty: each answer has its own, or nothing was asked.
    skipped : for each trace that could not be read, the reason.
    """

    name: str
    model: str
    software: str
    left: int | None = None
    cost: str = ""
    answering_s: float = 0.0
    question: str = ""
    skipped: tuple[str, ...] = ()


def page_of(path: Path) -> tuple[bytes, list[str]]:
    """Make the report of a run's folder or a result file; also return why traces are left out, which the page shows.

    Raises `DataError` if there is nothing to read, or results are damaged.
    """
    folder = path if path.is_dir() else path.parent
    skipped: list[str] = []
    traces = list(read_traces(folder, skipped.append)) if path.is_dir() else []
    records: list[Record] = []
    model, software, cost, answering_s, left = "no results stored yet", f"{len(traces)} traces", "", 0.0, None
    question = ""
    if has_results(path) or not traces:  # a job that was killed early may have only traces
        results = open_results(path, verify=False, partial=True)
        records, about, versions = list(results), results.header.model, results.software
        answering_s, left = results.cost.answering_s, results.left
        question = _question_of(results.header.identity)
        if results.costs:
            told = results.cost.describe(results.summary().done)
            cost = "; ".join(filter(None, (told, results.cost.describe_outcome())))
        model = f"{about['name']} ({about['architecture']}, {about['dtype']})"
        software = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("kvr_mpi", "torch"))
    name = path.resolve().name if path.is_dir() else path.name
    facts = RunFacts(name, model, software, left, cost, answering_s, question, tuple(skipped))
    return make_page(facts, records, read_timelines(traces)), skipped


def make_page(facts: RunFacts, records: Sequence[Record], run: TracedRun) -> bytes:
    """Make the report from the records of all documents."""
    timelines, summary = draw_timelines(run), _summary(records)
    charts: list[tuple[str, str, Chart | str]] = [
        *(
            ("timeline", "Timeline of a prompt", one)
            for one in ([timelines] if isinstance(timelines, str) else timelines)
        ),
        ("waits", "Waits by rank and layer", draw_waits(run)),
        ("ttft", "Time to the first token", draw_first_token(records)),
        ("documents", "Documents completed over time", draw_progress(records, facts.answering_s)),
        ("memory", "Memory of the ranks", draw_memory(run)),
    ]
    drawn = [_section(name, chart) for name, _, chart in charts if isinstance(chart, Chart)]
    missing: dict[str, list[str]] = {}  # by the reason why it is not drawn
    for _, what, why in charts:
        if isinstance(why, str):
            missing.setdefault(why, []).append(what)
    warnings = [*(f"The trace of a rank is omitted: {why}" for why in facts.skipped), *_warnings(run)]
    head = [
        f"<h1>{escaped(facts.name)}</h1>",
        f'<p class="about">{escaped(facts.model)} · {escaped(facts.software)} · '
        f"page written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p>",
        f'<p class="about">Cost: {escaped(facts.cost)}</p>' * bool(facts.cost),
        f'<p class="about">Prompt: <q>{escaped(facts.question)}</q></p>' * bool(facts.question),
        _tiles(facts, summary, records),
        f'<section class="warn">{"".join(f"<p>{escaped(line)}</p>" for line in warnings)}</section>' * bool(warnings),
        _failures(summary),
    ]
    if missing:
        told = [f"{', '.join(what)}: {why}." for why, what in missing.items()]
        lines = [f'<p class="missing">{escaped(line)}</p>' for line in told]
        drawn.append(f"<section><h2>Not available for this run</h2>{''.join(lines)}</section>")
    script, style = _read("page.js"), palette() + _read("page.css")
    above, below = "".join(head), "".join(drawn)
    room = PAGE_BYTES - len((above + below).encode()) - len(script) - len(style) - 8_000
    packed, note = pack_answers(records, room)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    parts = {"title": escaped(facts.name), "note": escaped(note), "above": above, "below": below, "data": packed}
    return Template(_read("page.html")).substitute(parts, policy=policy, style=style, script=script).encode()


def pack_answers(records: Sequence[Record], room_bytes: int) -> tuple[str, str]:
    """Compress the documents' table into at most `room_bytes` of base64; also describe what was truncated.

    If not all documents fit even without answers, only the first ones are included.
    """
    shown = records
    while True:
        for chars in ANSWER_CHARS:
            packed = _pack(shown, chars)
            if len(packed) <= room_bytes or not shown:
                return packed, _describe_cut(records, shown, chars)
        shown = shown[: len(shown) // 2]


def _question_of(identity: Mapping[str, Any]) -> str:
    """Return the prompt for each document, if there is only one."""
    prompt = identity.get("prompt")
    template = prompt.get("template") if isinstance(prompt, Mapping) and "questions" not in identity else None
    return _cut(" ".join(template.split()), PROMPT_CHARS) if isinstance(template, str) else ""


def _pack(records: Sequence[Record], chars: int) -> str:
    columns: dict[str, list[Any]] = {
        "id": [one.id for one in records],
        "failed": [int(one.status == "error") for one in records],
        "tokens": [one.prompt_tokens for one in records],
        "seen": [round(one.coverage, 3) for one in records],
        # -1: a document in parts has no time to the first token, only a sum of prefills.
        "ttft": [-1 if one.parts > 1 or one.ttft_s != one.ttft_s else round(one.ttft_s, 2) for one in records],
        "unsupported": [-1 if (found := one.unsupported_count) is None else found for one in records],
        "marks": [[(flag["start"], flag["stop"]) for flag in one.flags if flag["stop"] < chars] for one in records],
        "question": [one.question[:chars] for one in records],
        "ended": [ENDED_EARLY[one.ended_early] for one in records],
        "answer": [_cut(one.error if one.status == "error" else one.shown, chars) for one in records],
    }
    data = json.dumps(columns, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: max(0, chars - 1)] + "…"


def _describe_cut(records: Sequence[Record], shown: Sequence[Record], chars: int) -> str:
    parts = []
    if len(shown) < len(records):
        parts.append(f"only the first {len(shown):,} of {len(records):,} documents are shown")
    if any(len(one.shown) > chars for one in shown):
        parts.append(f"answers are truncated to {chars:,} characters")
    if not parts:
        return "Click a row to read the whole answer."
    return f"To keep this file below {PAGE_BYTES / 1e6:.0f} MB {' and '.join(parts)}; kvr inspect shows everything."


def _section(name: str, chart: Chart) -> str:
    legend = "".join(
        f'<li><svg viewBox="0 0 12 12" aria-hidden="true"><rect class="f-{fill}" width="12" height="12" rx="2"/></svg>'
        f"{escaped(text)}</li>"
        for fill, text in chart.legend
    )
    legend = f'<ul class="legend">{legend}</ul>' if legend else ""
    note = f'<p class="note">{escaped(chart.note)}</p>'
    return f'<section id="{name}"><h2>{escaped(chart.title)}</h2>{legend}{chart.drawing}{note}</section>'


def _summary(records: Sequence[Record]) -> Summary:
    return Summary.of(len(records), ((one.id, shorten(one.error)) for one in records if one.status == "error"))


def _tiles(facts: RunFacts, summary: Summary, records: Sequence[Record]) -> str:
    done = [one for one in records if one.status == "done"]
    tiles = [(f"{summary.done:,}", "documents done"), (f"{summary.failed:,}", "failed")]
    if facts.left:
        tiles.append((f"{facts.left:,}", "remaining"))
    ends = Counter(one.ended_early for one in done)
    tiles += [(f"{ends[reason]:,}", f"answers {what}") for reason, what in ENDED_EARLY.items() if what and ends[reason]]
    if done:
        tiles.append((_count(sum(one.prompt_tokens for one in done)), "prompt tokens"))
        tiles.append((_count(new := sum(one.new_tokens for one in done)), "new tokens"))
        if (steps := sum(one.decode_steps for one in done)) and new > steps + len(done):  # each has a first token
            tiles.append((f"{new / (steps + len(done)):.2f}", "tokens per decode step"))
        if ranks := sorted({one.ranks for one in done if one.ranks}):
            few = " and ".join(map(str, ranks)) if len(ranks) < 3 else f"{ranks[0]} to {ranks[-1]}"
            tiles.append((few, "ranks per prompt"))
        if whole := [one.ttft_s for one in done if one.parts == 1]:
            tiles.append((duration_text(max(whole)), "slowest first token"))
    kept = [one for one in done if one.retained_bytes]
    if kept:
        tiles.append((bytes_text(max(one.retained_bytes for one in kept)), "largest compressed cache"))
    return (
        '<div class="tiles">'
        + "".join(f"<div class=tile><b>{a}</b><span>{b}</span></div>" for a, b in tiles)
        + "</div>"
    )


def _count(count: int) -> str:
    return f"{count / 1e6:,.1f} million" if count >= 10_000_000 else f"{count:,}"


def _failures(summary: Summary) -> str:
    if not (reasons := summary.reasons):
        return ""
    rows = "".join(
        f'<tr><td class="n wnum">{count:,}</td><td>{escaped(reason)}</td></tr>'
        for reason, count in list(reasons.items())[:REASONS]
    )
    more = f'<p class="note">and {len(reasons) - REASONS} other reasons</p>' if len(reasons) > REASONS else ""
    most = next(iter(reasons.values()))
    title = f"{counted(summary.failed, 'document')} failed" + f", {most:,} of them for the same reason" * (most > 1)
    return (
        f'<section id="failures"><h2>{title}</h2><table><thead><tr><th class="n wnum">count</th><th>reason</th></tr>'
        "</thead>"
        f"<tbody>{rows}</tbody></table>{more}</section>"
    )


def _warnings(run: TracedRun) -> list[str]:
    """Describe problems of the traces."""
    lines = []
    if run.backwards:
        lines.append(
            f"{run.backwards} transfers arrived before they were sent: the clocks of the ranks were not aligned well "
            f"enough, so the timelines are not reliable."
        )
    if full := sum(trace.is_full for trace in run.traces):
        lines.append(f"The trace of {counted(full, 'rank')} is full and ends early.")
    if damaged := sum(trace.damaged for trace in run.traces):
        lines.append(f"{plain_number(damaged)} damaged lines of the trace are omitted.")
    if run.incomplete:
        lines.append(f"{counted(run.incomplete, 'prompt')} with incomplete traces omitted.")
    on_gpus = [trace for trace in run.traces if trace.header.device == "cuda"]
    if on_gpus and not any(span.kind == "layer" for trace in on_gpus for span in trace.spans):
        lines.append("This trace has no layers: they were not recorded on GPUs when it was written.")
    return lines


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (files("kvr_mpi.report") / "data" / name).read_text(encoding="utf-8")
