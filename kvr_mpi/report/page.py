"""The report: one self-contained HTML page with charts, and answers to browse and search.

A content security policy in the page forbids network access, and all scripts and styles except the page's own.
Documents and answers are untrusted text: in drawings they are escaped. In the table they are packed (JSON, gzip,
base64), and the page's script inserts them as text, so they are never parsed as markup.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvr_mpi.duration import duration_text
from kvr_mpi.errors import DataError, counted
from kvr_mpi.report.charts import (
    Chart,
    draw_first_token,
    draw_forecast,
    draw_memory,
    draw_progress,
    draw_slices,
    draw_speedup,
    draw_timelines,
    draw_waits,
)
from kvr_mpi.report.style import COLOURS, bytes_text, plain_number, ramp
from kvr_mpi.report.svg import escaped
from kvr_mpi.report.timeline import TracedRun, read_timelines
from kvr_mpi.store.folder import has_results
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.status import read_status
from kvr_mpi.store.summary import count_reasons, shorten
from kvr_mpi.store.traces import read_traces

# Maximum size of a page; answers are truncated to fit.
PAGE_BYTES = 5_000_000
# Lengths to which answers may be truncated; the first that fits is used.
ANSWER_CHARS = (20_000, 8_000, 4_000, 2_000, 1_000, 600, 400, 250, 120, 60, 0)
REASONS = 12
SHADES = 8


@dataclass(frozen=True, slots=True)
class RunFacts:
    """General facts about the run.

    left : documents neither done nor failed; None: not known.
    cost : description in one line; empty: not known.
    answering_s : time in which documents were answered; 0: not known.
    skipped : for each trace that could not be read, the reason.
    """

    name: str
    model: str
    software: str
    left: int | None = None
    cost: str = ""
    answering_s: float = 0.0
    skipped: tuple[str, ...] = ()


def page_of(path: Path) -> tuple[bytes, list[str]]:
    """Make the report of a run's folder or a result file.

    Returns
    -------
    (bytes, list of str)
        The page, and the reasons why traces are left out, which the page also shows.

    Raises
    ------
    DataError
        If there is nothing to read, or results are damaged.
    """
    folder = path if path.is_dir() else path.parent
    skipped: list[str] = []
    traces = list(read_traces(folder, skipped.append)) if path.is_dir() else []
    records: list[Record] = []
    model, software, cost, answering_s = "nothing is stored yet", f"{len(traces)} traces", "", 0.0
    if has_results(path) or not traces:  # a job that was killed early may have only traces
        results = open_results(path, verify=False, partial=True)
        records, about, versions = list(results), results.header.model, results.software
        answering_s = results.cost.answering_s
        if results.index.costs:
            told = results.cost.describe(sum(record.status == "done" for record in records))
            cost = "; ".join(filter(None, (told, results.cost.describe_outcome())))
        model = f"{about['name']} ({about['architecture']}, {about['dtype']})"
        software = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("kvr_mpi", "torch"))
    rates = [(trace.header.token_s, trace.header.pair_s) for trace in traces if trace.header.token_s]
    left = None
    if path.is_dir():
        with contextlib.suppress(DataError):  # results without the other files of a run
            left = read_status(folder).left
    facts = RunFacts(
        name=str(path.resolve().name if path.is_dir() else path.name),
        model=model,
        software=software,
        left=left,
        cost=cost,
        answering_s=answering_s,
        skipped=tuple(skipped),
    )
    fastest = min(rates, default=(0.0, 0.0))
    return make_page(facts, records, read_timelines(traces) if traces else None, fastest), skipped


def make_page(facts: RunFacts, records: Sequence[Record], run: TracedRun | None, rates: tuple[float, float]) -> bytes:
    """Make the report.

    Parameters
    ----------
    records : sequence of Record
        Of all documents.
    run : TracedRun or None
        The traces; None: there are none.
    rates : (float, float)
        Seconds per layer of a rank for a token and for a query-key pair; zeros: not known.
    """
    charts = [
        *draw_timelines(run),
        draw_waits(run),
        draw_forecast(run),
        draw_first_token(records),
        draw_slices(records),
        draw_speedup(records, run, rates),
        draw_progress(records, facts.answering_s),
        draw_memory(run),
    ]
    drawn = [_section(chart) for chart in charts if chart.drawing is not None]
    missing: dict[str, list[str]] = {}  # by the reason why it is not drawn
    for chart in charts:
        if chart.drawing is None:
            what, _, why = chart.title.partition(": ")
            missing.setdefault(why, []).append(what)
    warnings = [*(f"A rank's trace is left out: {why}" for why in facts.skipped), *_warnings(run)]
    head = [
        f"<h1>{escaped(facts.name)}</h1>",
        f'<p class="about">{escaped(facts.model)} · {escaped(facts.software)} · '
        f"page made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p>",
        f'<p class="about">cost: {escaped(facts.cost)}</p>' * bool(facts.cost),
        _tiles(facts, records),
        *(
            [f'<section class="warn">{"".join(f"<p>{escaped(line)}</p>" for line in warnings)}</section>']
            * bool(warnings)
        ),
        _failures(records),
    ]
    if missing:
        told = [f"{', '.join(what)}: {why}" for why, what in missing.items()]
        lines = [f'<p class="missing">{escaped(line)}</p>' for line in told]
        drawn.append(f"<section><h2>Not recorded in this run</h2>{''.join(lines)}</section>")
    script, style = _read("page.js"), _palette() + _read("page.css")
    above, below = "".join(head), "".join(drawn)
    room = PAGE_BYTES - len((above + below).encode()) - len(script) - len(style) - 8_000
    packed, note = pack_answers(records, room)
    table = _TABLE.format(note=escaped(note))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escaped(facts.name)}</title>'
        f"<style>{style}</style></head>"
        f'<body><main>{above}{table}{below}</main><script type="application/octet-stream" id="data">{packed}</script>'
        f"<script>{script}</script></body></html>\n"
    )
    return page.encode()


def pack_answers(records: Sequence[Record], room_bytes: int) -> tuple[str, str]:
    """Compress the documents' table into at most `room_bytes` of base64; also describe what was truncated.

    If not all documents fit even without answers, only the first ones are included.
    """
    shown = records
    while True:
        for chars in ANSWER_CHARS:
            packed = _pack(shown, chars)
            if len(packed) <= room_bytes or not shown:
                return packed, _say_cut(records, shown, chars)
        shown = shown[: len(shown) // 2]


def _pack(records: Sequence[Record], chars: int) -> str:
    columns: dict[str, list[Any]] = {
        "id": [one.id for one in records],
        "failed": [int(one.status == "error") for one in records],
        "tokens": [one.prompt_tokens for one in records],
        "seen": [round(one.coverage, 3) for one in records],
        "ttft": [round(one.ttft_s, 2) if one.ttft_s == one.ttft_s else 0 for one in records],
        "question": [one.question[:chars] for one in records],
        "answer": [_cut(one.error if one.status == "error" else one.shown, chars) for one in records],
    }
    data = json.dumps(columns, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: max(0, chars - 1)] + "…"


def _say_cut(records: Sequence[Record], shown: Sequence[Record], chars: int) -> str:
    told = []
    if len(shown) < len(records):
        told.append(f"only the first {len(shown):,} of {len(records):,} documents are shown")
    if any(len(one.shown) > chars for one in shown):
        told.append(f"answers are truncated to {chars:,} characters")
    if not told:
        return "Click a row to read the whole answer."
    return f"To keep this file below {PAGE_BYTES / 1e6:.0f} MB {' and '.join(told)}; kvr inspect shows everything."


_TABLE = (
    '<section><h2>Answers</h2><p class="note">{note}</p><div class="tools">'
    '<input id="query" type="search" placeholder="Search ids, questions, answers" aria-label="Search">'
    '<select id="only" aria-label="Which documents"><option value="all">all</option>'
    '<option value="done">done</option>'
    '<option value="failed">failed</option></select><span id="count" class="count">The answers are being '
    "unpacked; this needs JavaScript.</span></div>"
    '<table id="answers"><thead><tr><th class="wid"><button data-by="id">document</button></th>'
    '<th class="n wnum"><button data-by="tokens">tokens</button></th>'
    '<th class="n wnum"><button data-by="seen">seen</button></th>'
    '<th class="n wnum"><button data-by="ttft">first token</button></th>'
    '<th><button data-by="answer">answer</button></th></tr></thead><tbody id="rows"></tbody></table>'
    '<div class="tools"><button id="more" hidden>Show more</button></div></section>'
)


def _section(chart: Chart) -> str:
    legend = "".join(
        f'<li><svg viewBox="0 0 12 12" aria-hidden="true"><rect class="f-{name}" width="12" height="12" rx="2"/></svg>'
        f"{escaped(text)}</li>"
        for name, text in chart.legend
    )
    legend = f'<ul class="legend">{legend}</ul>' if legend else ""
    note = f'<p class="note">{escaped(chart.note)}</p>' if chart.note else ""
    return f'<section id="{chart.name}"><h2>{escaped(chart.title)}</h2>{legend}{chart.drawing}{note}</section>'


def _tiles(facts: RunFacts, records: Sequence[Record]) -> str:
    done = [one for one in records if one.status == "done"]
    tiles = [(f"{len(done):,}", "documents done"), (f"{len(records) - len(done):,}", "failed")]
    if facts.left:
        tiles.append((f"{facts.left:,}", "not done yet"))
    if done:
        tiles.append((_count(sum(one.prompt_tokens for one in done)), "prompt tokens"))
        tiles.append((_count(sum(one.new_tokens for one in done)), "new tokens"))
        if ranks := sorted({one.ranks for one in done if one.ranks}):
            few = " and ".join(map(str, ranks)) if len(ranks) < 3 else f"{ranks[0]} to {ranks[-1]}"
            tiles.append((few, "ranks per prompt"))
        slowest = max(done, key=lambda one: one.ttft_s)
        tiles.append((duration_text(slowest.ttft_s), "slowest first token"))
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


def _failures(records: Sequence[Record]) -> str:
    reasons = count_reasons((one.id, shorten(one.error), 1) for one in records if one.status == "error")
    if not reasons:
        return ""
    total = sum(reasons.values())
    rows = "".join(
        f'<tr><td class="n wnum">{count:,}</td><td>{escaped(reason)}</td></tr>'
        for reason, count in list(reasons.items())[:REASONS]
    )
    more = f'<p class="note">and {len(reasons) - REASONS} other reasons</p>' if len(reasons) > REASONS else ""
    title = f"{counted(total, 'document')} failed, {next(iter(reasons.values())):,} of them for the same reason"
    return (
        f'<section id="failures"><h2>{title}</h2><table><thead><tr><th class="n wnum">documents</th><th>why</th></tr>'
        "</thead>"
        f"<tbody>{rows}</tbody></table>{more}</section>"
    )


def _warnings(run: TracedRun | None) -> list[str]:
    """Describe problems of the traces."""
    if run is None:
        return []
    lines = []
    if run.backwards:
        lines.append(
            f"{run.backwards} transfers arrived before they were sent: the ranks' clocks were not aligned well enough, "
            f"so the timelines cannot be trusted. kvr doctor checks the clocks."
        )
    if run.full:
        lines.append(f"The trace of {counted(run.full, 'rank')} is full and ends early.")
    if run.damaged:
        lines.append(f"{plain_number(run.damaged)} damaged lines of the trace are left out.")
    if run.incomplete:
        lines.append(f"Only some ranks recorded {counted(run.incomplete, 'prompt')} of their chain: left out.")
    if "cuda" in run.devices:
        lines.append(
            "On GPUs the trace has no layers: kernels run asynchronously, so the rank does not see when a layer is "
            "computed."
        )
    return lines


def _palette() -> str:
    """Return the colours as CSS variables, for light and dark mode, and the classes of charts."""
    days = []
    for dark in (False, True):
        shades = {f"r{number}": colour for number, colour in enumerate(ramp(SHADES, dark))}
        values = {name: pair[dark] for name, pair in COLOURS.items()} | shades
        days.append(":root{" + "".join(f"--{name}:{colour};" for name, colour in values.items()) + "}")
    names: Iterable[str] = (*COLOURS, *(f"r{number}" for number in range(SHADES)))
    classes = "".join(f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in names)
    return f"{days[0]}@media (prefers-color-scheme: dark){{{days[1]}}}{classes}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (files("kvr_mpi.report") / "data" / name).read_text(encoding="utf-8")
