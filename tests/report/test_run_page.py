"""``kvr report``: a page that needs nothing else, says what there is, and reads no document as markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_runs import STAMP, take, write

from kvr_mpi.cli import group
from kvr_mpi.errors import DataError
from kvr_mpi.events import Events, Span, TracedPrompt
from kvr_mpi.logs import SILENT
from kvr_mpi.report.charts import Chart, draw_first_token, draw_memory, draw_progress
from kvr_mpi.report.page import PAGE_BYTES, RunFacts, make_page, pack_answers, page_of
from kvr_mpi.report.timeline import TracedRun, read_timelines
from kvr_mpi.store.record import Record
from kvr_mpi.store.traces import RankTrace, TraceHeader, TraceWriter, read_traces

HOSTILE = [
    "</script><script>alert(1)</script>",
    "</title><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "<!--<script>",
    "]]>&lt;b&gt;\u202e\x1b[2J",
    "' style='background:url(https://evil.example/)'",
]
FACTS = RunFacts("a run", "tiny (Llama, float32)", "kvr_mpi 0")


class Elements(HTMLParser):
    """Which elements there are, with their attributes, and what stands in scripts."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self._last = ""
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))
        self._last = tag

    def handle_data(self, data: str) -> None:
        self.inside.setdefault(self._last, []).append(data)


def done(name: str, **more: Any) -> Record:
    given: dict[str, Any] = {"prompt_tokens": 900, "slices": (0, 600, 900), "ttft_s": 1.5, "strategy": "kvr"}
    given |= {"answer": f"about {name}", "new_tokens": 3, "finished_at": STAMP}
    values = {**given, **more}
    return Record(name, "done", **{"computed_tokens": values["prompt_tokens"], **values})


def page_with(records: Sequence[Record]) -> bytes:
    return make_page(FACTS, records, TracedRun())


def drawn(chart: Chart | str) -> Chart:
    assert isinstance(chart, Chart), chart
    return chart


def packed(page: bytes) -> Any:
    (data,) = re.findall(rb'<script type="application/octet-stream" id="data">([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(data)))


def record_run(folder: Path, documents: Sequence[str], ahead_s: float = 0.0) -> None:
    """Two ranks' traces: rank 0 computes for 2 s and sends; rank 1 waits 0.5 s for it."""
    for rank in range(2):
        events = Events(keeps_spans=True)
        header = TraceHeader(rank, 2, 1, "here", "cpu")
        writer = TraceWriter(folder, header, events, offset_s=1000.0, limit_bytes=1 << 20, logger=SILENT)
        writer.add_clock(ahead_s * rank, 1e-4)
        for number, name in enumerate(documents):
            bounds = ((0, 600), (600, 900))[rank]
            prompt = TracedPrompt(name, 0, "prompt", 900, *bounds, 0, 2, 1)
            events.begin_prompt(prompt)
            at = 10.0 * number
            events.add(Span("prefill", at, at + 2.5, number))
            events.add(Span("layer", at, at + 2.5, number, 0))
            if rank:
                events.add(Span("wait", at + 1, at + 1.5, number, 0, 0))
                events.add(Span("receive", at, at + 1.5, number, 0, 0, 64))
            else:
                events.add(Span("send", at + 1.2, at + 1.5, number, 0, 1, 64))
        writer.close()


@pytest.mark.parametrize("text", HOSTILE)
def test_no_document_is_ever_markup(text: str, tmp_path: Path) -> None:
    plain, hostile = tmp_path / "plain", tmp_path / "hostile"
    pages = []
    for folder, word in ((plain, "plain"), (hostile, text)):
        names = [word, f"{word} too"]
        folder.mkdir()
        record_run(folder, names)
        records = [
            done(names[0], answer=word, question=word, document=word),
            done(names[1], finished_at="2026-01-01T01:00:00.000+00:00"),
            Record("bad", "error", error=f"{word} failed", finished_at=STAMP),
        ]
        facts = replace(FACTS, name=word, model=word)
        pages.append(make_page(facts, records, read_timelines(read_traces(folder))))
    first, second = (Elements(page) for page in pages)
    kinds = [{(tag, *given) for tag, given in elements.found} for elements in (first, second)]
    assert kinds[0] == kinds[1], "the same elements, whatever is said"
    assert [tag for tag, _ in second.found].count("script") == 2
    assert packed(pages[1])["answer"][0] == text and packed(pages[1])["id"][0] == text
    assert "\u202e" not in pages[1].decode() and "\x1b" not in pages[1].decode()


def test_the_time_of_a_run_and_its_failures_are_counted_as_they_were() -> None:
    """Times of a split document are of several prompts: they say nothing of when the run began."""
    at = [f"2026-01-01T00:0{minute}:00.000+00:00" for minute in (1, 2)]
    short = [done(name, finished_at=one, ttft_s=40.0) for name, one in zip("ab", at, strict=True)]
    split = [short[0], replace(short[1], parts=8, decode_s=5000.0)]
    whole = [short[0], replace(short[1], decode_s=5000.0)]
    titles = [drawn(draw_progress(each)).title for each in (split, short, whole)]
    assert titles[0] == titles[1] != titles[2]
    at = [f"2026-01-01T00:00:{second:02}.000+00:00" for second in range(10, 40, 3)]
    answered = [done(f"{number}", finished_at=one, ttft_s=10.0) for number, one in enumerate(at[:4])]
    failed = [Record(f"{number}", "error", error="empty", finished_at=one) for number, one in enumerate(at[4:], 4)]
    title = drawn(draw_progress([*answered, *failed])).title
    assert "4 answered, 6 failed in " in title and title.endswith("389 per hour"), title
    header = TraceHeader(0, 1, 1, "here", "cpu")
    memory = [[(0.0, 1 << 30), (9.0, 1 << 30)], [(500.0, 1 << 31)] * 2]
    run = TracedRun([RankTrace(header, memory=samples) for samples in memory])
    assert str(drawn(draw_memory(run)).drawing).count('<polyline class="s-ours"') == 2, "no line from job to job"


def test_a_page_asks_for_nothing_and_forbids_it() -> None:
    page = page_with([done("a", answer="x" * 5000), done("b", ttft_s=float("nan"))])
    assert packed(page)["answer"][0] == "x" * 5000 and packed(page)["ttft"][1] == -1
    assert "truncated to" not in page.decode()
    elements = Elements(page)
    assert not [tag for tag, _ in elements.found if tag in ("link", "img", "iframe", "object", "embed", "base", "a")]
    assert not [given for _, given in elements.found if {"src", "href", "style", "srcdoc"} & given.keys()]
    assert not [name for _, given in elements.found for name in given if name.startswith("on")]
    assert b"http://" not in page and b"https://" not in page
    equivalents = {given.get("http-equiv"): given.get("content") for _, given in elements.found}
    policy = equivalents["Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'")
    for tag in ("script", "style"):
        (text,) = (each for each in elements.inside[tag] if len(each) > 500 and "{" in each)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_the_trace_is_drawn_as_it_was(tmp_path: Path) -> None:
    take(tmp_path).lock.release()
    write(tmp_path, 0, [done("a"), done("b", prompt_tokens=901), done("c", slices=(0, 100), prompt_tokens=800)])
    page = page_of(tmp_path)[0].decode()
    assert "Timeline of a prompt, Waits by rank and layer, Memory of the ranks: no" in page
    assert page.index("<h2>Answers") < page.index('<section id="ttft">'), "answers come before charts"
    record_run(tmp_path, ["a", "b"])
    page = page_of(tmp_path)[0].decode()
    assert "a: 900 tokens over 2 ranks took 2.50 s to the first token; rank 1 waited 20% of it" in page
    assert "Rank 1 waited longest: 1.00 s, 20% of its prefill time, longest in layer 0" in page
    assert "layer 0: waited 500 ms for rank 0" in page and "layer 0: send to rank 1, 64 B in 300 ms" in page
    assert "not drawn" not in page and "arrived before" not in page


def test_what_a_run_does_not_hold_is_said_in_a_line(tmp_path: Path) -> None:
    page = page_with([Record("bad", "error", error="it is empty", finished_at=STAMP)]).decode()
    assert page.count('class="missing"') == 3 and page.count("output.trace = true") == 1
    assert "1 document failed" in page and "it is empty" in page and "<polyline" not in page
    with pytest.raises(DataError, match="is empty"):
        page_of(tmp_path)
    record_run(tmp_path, ["a"])  # of a job that was killed early
    page = page_of(tmp_path)[0].decode()
    assert "no results stored yet" in page and "a: 900 tokens over 2 ranks took 2.50 s" in page


def test_prompts_that_reused_most_of_their_tokens_are_compared_with_none() -> None:
    """Two prompts about each document: the second finds the document's keys and values, and runs on one rank."""
    first = [done(f"{name} first", ttft_s=9.0) for name in "abc"]
    second = [done(f"{name} second", computed_tokens=13, slices=(0, 900), ttft_s=0.5) for name in "abc"]
    assert drawn(draw_first_token([*first, *second])).title == drawn(draw_first_token(first)).title
    assert isinstance(draw_first_token([done("split", parts=8)] * 3), str), "the times of several prompts"
    assert isinstance(draw_first_token(first[:2]), str), "too few for a chart"
    # A template's beginning, which is computed once for all documents, is a small part of a prompt.
    rate = drawn(draw_first_token([done("d", computed_tokens=880, ttft_s=2.0)] * 3)).title
    assert "440" in rate and "450" not in rate, "what was computed, by the seconds"


@pytest.mark.parametrize(
    "damage", ["no trace\n", "{}\n", "[1]\n", "[\n{},\n", "[\n1,\n", '[\n{"ph": "X", "ts": 1, "dur": 1},\n', "a link"]
)
def test_a_damaged_trace_is_named_and_the_others_are_drawn(damage: str, tmp_path: Path) -> None:
    take(tmp_path).lock.release()
    write(tmp_path, 0, [done("a")])
    record_run(tmp_path, ["a"])
    bad = tmp_path / "trace" / "0002-0000.json"
    bad.symlink_to("/dev/zero") if damage == "a link" else bad.write_text(damage)
    told = CliRunner().invoke(group, ["report", str(tmp_path)])
    assert told.exit_code == 0 and told.stderr.count(str(bad)) == 1
    page = (tmp_path / "report.html").read_text()
    assert page.count(bad.name) == 1 and "took 2.50 s to the first token" in page


@pytest.mark.parametrize(("ahead_s", "backwards"), [(0.7, 1), (0.30005, 0), (0.0, 0)])
def test_clocks_that_were_not_aligned_are_noticed(tmp_path: Path, ahead_s: float, backwards: int) -> None:
    """Rank 0 begins to send 0.3 s before rank 1 has received; clocks agree to 0.1 ms."""
    record_run(tmp_path, ["a"], ahead_s)
    run = read_timelines(read_traces(tmp_path))
    assert run.backwards == backwards
    page = make_page(FACTS, [done("a")], run).decode()
    assert ("arrived before they were sent" in page) == bool(backwards)


def test_a_prompt_that_one_rank_knows_nothing_of_is_not_drawn(tmp_path: Path) -> None:
    record_run(tmp_path, ["a", "b"])
    path = tmp_path / "trace" / "0001-0001.json"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"a"' not in line))
    run = read_timelines(read_traces(tmp_path))
    assert [one.prompt.document for one in run.timelines] == ["b"] and run.incomplete == 1


def test_ten_thousand_documents_are_a_small_page() -> None:
    draw = random.Random(7)
    words = [f"{draw.choice(('ka', 'lo', 'mi', 'tre'))}{draw.randrange(4000)}" for _ in range(6000)]
    records = [done(f"doc-{n:05d}", answer=" ".join(draw.choices(words, k=120))) for n in range(10_000)]
    page = page_with(records)
    assert len(page) < PAGE_BYTES
    assert packed(page)["answer"] == [one.answer for one in records] and "truncated to" not in page.decode()
    data, note = pack_answers(records[:1000], 100_000)
    assert 50_000 < len(data) <= 100_000 and "answers are truncated to" in note and "kvr inspect" in note
    data, note = pack_answers(records[:1000], 2_000)
    assert len(data) <= 2_000 and "of 1,000 documents" in note


def test_unsupported_words_are_counted_and_marked() -> None:
    """Only within what is shown of an answer; documents in parts have no time to the first token."""
    flags = [{"text": "Rome", "kind": "name", "start": at, "stop": at + 4} for at in (6, 30_000)]
    long = done("long", answer=f"So in Rome {'a' * 29_989}Rome.", unsupported=json.dumps(flags))
    columns = packed(page_with([long, done("plain"), done("fine", unsupported="[]"), done("book", parts=3)]))
    assert columns["unsupported"] == [2, -1, 0, -1]
    assert columns["marks"] == [[[6, 10]], [], [], []]
    assert columns["ttft"] == [1.5, 1.5, 1.5, -1]


def test_headings_of_narrow_columns_fit_into_them() -> None:
    """At 13.5 px, a bold character of a wide font such as DejaVu Sans takes about 9 px."""
    page = page_with([done("a")]).decode()
    narrowest = min(map(int, re.findall(r"\.wnum \{ width: (\d+)px", page))) - 2 * 5
    headings = re.findall(r'<th class="n wnum"><button[^>]*>([^<]*)<', page)
    words = [word for heading in headings for word in re.split(r" |(?<=&shy;)", heading)]
    assert len(headings) == 4 and max(len(word.replace("&shy;", "-")) for word in words) * 9 <= narrowest
