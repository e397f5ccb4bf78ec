"""Writes the docs' tables and plots from stored measurements: ``make docs``.

    python docs/figures.py                               write tables and plots, name old measurements
    python docs/figures.py --check                       write nothing; exit code 1 if a page differs
    python docs/figures.py --store first-token bench.json    put rows of ``first-token --json`` in place of earlier ones

``docs/data/NAME.json`` is a measurement: command, machine, date, commit, the code it measures, and rows. A page has the
table between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``, with its source in the line below. Figures in
sentences (``said``) must be on the page word by word.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

from kvr_mpi.errors import counted
from kvr_mpi.events import Span, TracedPrompt
from kvr_mpi.report.charts import WIDTH as CHART_WIDTH
from kvr_mpi.report.charts import Chart, draw_timeline
from kvr_mpi.report.style import palette
from kvr_mpi.report.svg import BOTTOM, TOP, Drawing, escaped
from kvr_mpi.report.timeline import Lane, Timeline
from kvr_mpi.store.traces import TraceHeader

ROOT = Path(__file__).resolve().parent.parent
DATA, DRAWN = ROOT / "docs" / "data", ROOT / "docs" / "figures"
BLOCK = re.compile(r"<!-- begin: (?P<name>[a-z0-9-]+) -->\n.*?<!-- end: (?P=name) -->", re.DOTALL)
# The README's table, made of several measurements.
SUMMARY = "summary"
# Rows of measurements that the summary shows.
SUMMARIZED = "SmolLM2-135M, 1,024 tokens"
GPU, GPU_SUMMARIZED = "first-token-gpu", "H200: first token, 16,384 tokens"
NOT_MEASURED = "-"
WIDTH = 120
BAR = 26  # height of a bar


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured, and how.

    date, dated_by : day of the run, or that of the commit which brought the figures: the run is not younger.
    commit : the code that was measured, or the first commit that held the figures.
    measures : files and folders of the code that the figures depend on.
    kind : ``bench``: rows of ``first-token --json``; ``table``: rows of `columns`; ``timeline``: spans of a trace,
        which only the picture shows; ``text``: said in sentences only.
    columns : name of each column, and how its values are written (a format).
    prompt : the prompt of a timeline: document, tokens, and rank, start and stop of each slice.
    said : page, and what is on it word by word.
    """

    name: str
    title: str
    command: str
    machine: str
    date: str
    dated_by: Literal["run", "commit"]
    commit: str
    measures: list[str]
    kind: Literal["bench", "table", "timeline", "text"]
    columns: list[tuple[str, str]] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    prompt: dict[str, Any] = field(default_factory=dict)
    said: dict[str, list[str]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return DATA / f"{self.name}.json"


def load_measurements() -> dict[str, Measurement]:
    """Read all measurements, by name."""
    return {path.stem: Measurement(path.stem, **json.loads(path.read_text())) for path in sorted(DATA.glob("*.json"))}


def render(measured: Measurement) -> str:
    """Write a measurement's table, and where it comes from."""
    table = _bench_table(measured.rows) if measured.kind == "bench" else _plain_table(measured)
    day = date.fromisoformat(measured.date)
    when = f"{day.day} {day:%B %Y}" + (f" (of commit {measured.commit})" if measured.dated_by == "commit" else "")
    source = f"`{measured.command}`, {when}; {measured.machine}."
    lines = textwrap.wrap(source, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*([table, ""] if measured.rows and measured.kind != "timeline" else []), *lines])


def _plain_table(measured: Measurement) -> str:
    forms = [form for _, form in measured.columns]
    rows = [
        [NOT_MEASURED if value is None else form.format(value) for form, value in zip(forms, row, strict=True)]
        for row in measured.rows
    ]
    return _table([name for name, _ in measured.columns], rows)


def _bench_table(rows: Sequence[dict[str, Any]]) -> str:
    """Write a line a length: seconds of every strategy, ours in bold; then the others' time as a multiple of ours."""
    ours = rows[0]["ours"]
    names = sorted(dict.fromkeys(row["strategy"] for row in rows), key=lambda name: name == ours)
    others = [name for name in names if any(row["strategy"] == name and "times_ours" in row for row in rows)]
    lines = []
    for tokens in dict.fromkeys(row["context_tokens"] for row in rows):
        found = {row["strategy"]: row for row in rows if row["context_tokens"] == tokens}
        seconds = [f"{found[name]['ttft_s']:.2f}" if name in found else NOT_MEASURED for name in names]
        seconds[-1] = f"**{seconds[-1]}**"
        wait = f"{100 * found[ours]['wait_s'] / found[ours]['ttft_s']:.1f}%" if ours in found else NOT_MEASURED
        lines.append([f"{tokens:,}", *seconds, *(_ratio(found.get(name)) for name in others if name != ours), wait])
    heads = ["tokens", *names, *(f"x {name}" for name in others if name != ours), "wait of the last rank"]
    return _table(heads, lines)


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None or "times_ours" not in row:
        return NOT_MEASURED
    interval = f" ({row['times_ours_low']:.2f}-{row['times_ours_high']:.2f})" if "times_ours_low" in row else ""
    return f"{row['times_ours']:.2f}{interval}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "|" + "|".join(line) + "|" if line[0] == "---" else f"| {' | '.join(line)} |".replace("|  |", "| |")
        for line in lines
    )


def render_summary(measured: dict[str, Measurement]) -> str:
    """Write the README's table: some of each measurement, side by side."""
    of_model = {dtype: measured[f"first-token-{dtype}"].rows for dtype in ("bfloat16", "float32")}
    small = {dtype: {row[1]: row[3] for row in rows if row[0] == SUMMARIZED} for dtype, rows in of_model.items()}
    first = {row["strategy"]: row["ttft_s"] for row in measured["first-token"].rows if row["context_tokens"] == 4096}
    on_gpu = {row[0]: dict(zip(("kvr-mpi", "transformers"), row[1:], strict=True)) for row in measured[GPU].rows}
    names = [name for name, _ in measured["slow-links"].columns]
    links = [dict(zip(names, row, strict=True)) for row in measured["slow-links"].rows]
    (slow,) = (link for link in links if link["links"] == "100 Mbit/s")
    engines = ("kvr-mpi", "transformers", "ring", "ring with our kernels")
    strategies = ("kvr-s", "single", "ring", "ring --lend")
    rows = []
    for what, found, columns in (
        ("16,384 tokens, bfloat16, Llama 3.1 8B's shape: H200", on_gpu[GPU_SUMMARIZED], engines),
        ("1,024 tokens, bfloat16: Zen 1", small["bfloat16"], engines),
        ("1,024 tokens: Zen 1", small["float32"], engines),
        ("4,096 tokens: Zen 5", first, strategies),
        ("4,096 tokens: Zen 5, two hosts, 100 Mbit/s", slow, strategies),
    ):
        values = [found.get(name, NOT_MEASURED) for name in columns]
        ours, *others = (f"{value:.2f} s" if isinstance(value, float) else value for value in values)
        rows.append([what, f"**{ours}**", *others])
    per_hour = {row[0].partition(":")[0].strip("`"): row[1] for row in measured["documents-an-hour"].rows}
    what = "documents per hour, meeting transcripts: Zen 5"
    rows.append([what, f"**{per_hour['auto']}**", str(per_hour["generate"]), NOT_MEASURED, NOT_MEASURED])
    heads = ["first token", "kvr-mpi", "plain transformers", "ring attention", "ring, our kernels"]
    return _table(heads, rows)


def render_page(text: str, measured: dict[str, Measurement]) -> str:
    """Put into each block of a page what its measurement makes.

    Raises
    ------
    SystemExit
        If a block names no measurement.
    """

    def replace(block: re.Match[str]) -> str:
        name = block["name"]
        if name != SUMMARY and name not in measured:
            raise SystemExit(f"a page has a block {name!r}; expected one of {', '.join([*measured, SUMMARY])}")
        made = render_summary(measured) if name == SUMMARY else render(measured[name])
        return f"<!-- begin: {name} -->\n{made}\n<!-- end: {name} -->"

    return BLOCK.sub(replace, text)


def pages() -> list[Path]:
    """List the pages that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def differing(measured: dict[str, Measurement]) -> list[str]:
    """Say where pages are not what the measurements make of them."""
    found = [
        str(page.relative_to(ROOT)) for page in pages() if render_page(page.read_text(), measured) != page.read_text()
    ]
    for one in measured.values():
        for page, words in one.said.items():
            text = (ROOT / page).read_text()
            found += [f"{page} does not say {word!r} ({one.name})" for word in words if word not in text]
        if one.kind == "bench" and not is_drawn(one):
            found.append(f"docs/figures/{one.name}.svg was drawn from other rows")
    found += [
        f"docs/figures/{name} was drawn from other rows"
        for name, text in charts(measured).items()
        if not (DRAWN / name).is_file() or (DRAWN / name).read_text() != text
    ]
    return found


def digest(measured: Measurement) -> str:
    """Name a measurement's rows, in a plot that was made of them."""
    return f"rows {hashlib.sha256(json.dumps(measured.rows).encode()).hexdigest()[:16]}"


def is_drawn(measured: Measurement) -> bool:
    """Whether there is a plot of a measurement's rows."""
    plot = DRAWN / f"{measured.name}.svg"
    return plot.is_file() and digest(measured) in plot.read_text()


def draw(measured: Measurement) -> None:
    """Draw rows of ``first-token``, for white and for black pages, unless that is done.

    Another version of matplotlib, or of its fonts, would draw the same rows with other coordinates.
    """
    if is_drawn(measured):
        return
    from benchmarks.plots import plot_bench

    DRAWN.mkdir(exist_ok=True)
    plot_bench(measured.rows, DRAWN / f"{measured.name}.svg", about=digest(measured))


def charts(measured: dict[str, Measurement]) -> dict[str, str]:
    """Draw the charts that need no matplotlib, by file name, as the report draws its own."""
    of_dtypes = [measured[f"first-token-{dtype}"].rows for dtype in ("bfloat16", "float32")]
    return {
        "timeline.svg": _as_file(draw_timeline(_timeline(measured["timeline"]))),
        "first-token-bars.svg": _as_file(_bars(of_dtypes)),
    }


def _timeline(measured: Measurement) -> Timeline:
    """Make the timeline of a trace's spans."""
    document, tokens, slices = (measured.prompt[name] for name in ("document", "tokens", "slices"))
    lanes = []
    for rank, start, stop in slices:
        spans = [
            Span(kind, began_s, ended_s, 0, layer, peer, amount)
            for of, kind, layer, peer, began_s, ended_s, amount in measured.rows
            if of == rank
        ]
        header = TraceHeader(rank, len(slices), 1, "", "cpu")
        prompt = TracedPrompt(document, 0, "prompt", tokens, start, stop, 0, len(slices), slices[-1][0])
        (prefill,) = (span for span in spans if span.kind == "prefill")
        lanes.append(Lane(header, prompt, prefill, spans))
    return Timeline(lanes)


def _bars(of_dtypes: list[list[Any]]) -> Chart:
    """Draw seconds to the first token as bars, one for each engine, with what it computes in."""
    bars = [
        (f"{row[1]}: {row[2]}", row[3])
        for rows in of_dtypes
        for row in sorted((row for row in rows if row[0] == SUMMARIZED), key=lambda row: row[3])
    ]
    drawing = Drawing(CHART_WIDTH, TOP + BAR * len(bars) + BOTTOM, f"seconds to the first token: {SUMMARIZED}")
    x = drawing.x_axis(1.1 * max(seconds for _, seconds in bars), f"seconds to the first token, {SUMMARIZED}", left=310)
    for number, (name, seconds) in enumerate(bars):
        top = TOP + BAR * number
        drawing.text(303, top + 17, name, anchor="end", quiet=False)
        drawing.rect(x(0), top + 4, x(seconds) - x(0), BAR - 8, "ours" if name.startswith("kvr-mpi:") else "rival")
        drawing.text(x(seconds) + 6, top + 17, f"{seconds:.2f} s", quiet=False)
    return Chart("", drawing, "")


def _as_file(chart: Chart) -> str:
    """Write a chart as an SVG file, with its legend below, for light and dark pages."""
    drawing = chart.drawing
    width, height = drawing.width, drawing.height + (24 if chart.legend else 0)
    legend, left = Drawing(width, height, ""), 12.0
    for color, text in chart.legend:
        legend.rect(left, height - 15, 12, 12, color)
        legend.text(left + 17, height - 5, text)
        left += 45 + 6.2 * len(text)
    style = (
        palette() + "svg{background:var(--page)}text{font:12px system-ui,sans-serif}.quiet{fill:var(--quiet)}"
        ".loud{fill:var(--text)}.bold{font-weight:600}polyline{fill:none}"
    )
    parts = "".join([*drawing.parts, *legend.parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escaped(drawing.label)}"><style>{style}</style>{parts}</svg>\n'
    )


def age_of(measured: Measurement) -> str:
    """Say whether the code has changed since a measurement; empty if it has not."""
    asked = ["git", "log", "--format=%cs", f"{measured.commit}..HEAD", "--", *measured.measures]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return "whether it is older than its code is not known: this is no clone that holds its commit"
    days = done.stdout.split()
    if not days:
        return ""
    since = f"{counted(len(days), 'commit')} since, the last on {max(days)}"
    return f"older than the code it measures: {since}; `{measured.command}`"


def store(measured: Measurement, source: Path) -> None:
    """Put new rows in the place of earlier ones, with today's date and this commit.

    Raises
    ------
    SystemExit
        If they are no rows of ``first-token``, or what is measured is not what is committed.
    """
    rows = json.loads(source.read_text())
    if measured.kind != "bench" or not (isinstance(rows, list) and rows and "ttft_s" in rows[0]):
        raise SystemExit(f"{source}: expected rows of `first-token --json`, for a measurement of the kind 'bench'")
    changed = _git("status", "--porcelain", "--", *measured.measures)
    if changed:
        raise SystemExit(f"the code it measures is not committed:\n{changed}")
    stored = json.loads(measured.path.read_text())
    stored |= {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "dated_by": "run",
        "commit": _git("rev-parse", "--short", "HEAD"),
    }
    del stored["rows"]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)  # a row a line, so that two versions can be compared
    measured.path.write_text(json.dumps(stored, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n')


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Do what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something differs")
    parser.add_argument("--store", nargs=2, metavar=("NAME", "FILE"), help="take in rows of first-token --json first")
    wanted = parser.parse_args()
    measured = load_measurements()
    if wanted.store:
        name, source = wanted.store
        if name not in measured:
            raise SystemExit(f"--store {name}: expected one of {', '.join(measured)}")
        store(measured[name], Path(source))
        measured = load_measurements()
    if not wanted.check:
        for page in pages():
            text = page.read_text()
            if (made := render_page(text, measured)) != text:
                page.write_text(made)
                print(f"{page.relative_to(ROOT)}: written")
        for one in measured.values():
            if one.kind == "bench":
                draw(one)
        for name, text in charts(measured).items():
            (DRAWN / name).write_text(text)
    for one in measured.values():
        print(f"{one.name}: {age_of(one) or 'as new as the code it measures'}")
    wrong = differing(measured)
    for line in wrong:
        print(f"not as measured: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # where `benchmarks` is: pip does not install it
    sys.exit(main())
