"""What a job prints: a line for every document with an estimate that is not made up; a table in the end."""

from __future__ import annotations

import io
import re
import shlex
import socket
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.plots import log_ticks, token_ticks
from kvr_mpi.cli.log_lines import show_log
from kvr_mpi.duration import duration_text
from kvr_mpi.logs import RankLogger
from kvr_mpi.report.progress import Progress
from kvr_mpi.report.style import bytes_text, nice_ticks, percent_text, plain_number, tokens_text
from kvr_mpi.report.table import MAX_ROWS, print_summary, reason_lines
from kvr_mpi.store.record import Record
from kvr_mpi.store.summary import REASON_CHARS, Summary, count_reasons, shorten

STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
TEXT = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["a\nb", "a\r\nb", "50%\r100%", "\n\n", "", "a\x0bb\x0cc\x85d\u2028e", "[red]x[/red]", "[/b]", "😀"]
    ),
)


def done(name: str, **values: object) -> Record:
    return Record(name, "done", **values)  # type: ignore[arg-type]


START_S = 1_000_000.0


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = START_S) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def lines_of(documents: int, work: int, report: Callable[[Progress, Clock], None], **options: float) -> list[str]:
    """What a job of so many documents and so much work logs."""
    stream, clock = io.StringIO(), Clock()
    show_log()
    with redirect_stderr(stream):
        report(Progress(RankLogger(), documents, work, clock=clock, **options), clock)  # type: ignore[arg-type]
    return stream.getvalue().splitlines(keepends=True)


def report_lines(records: Sequence[tuple[Record, int]], step_s: float, more: int = 0, **options: float) -> list[str]:
    """Report documents, each taking `step_s`, of a job that has `more` of 100 characters after them."""

    def report(progress: Progress, clock: Clock) -> None:
        work = 0
        for number, (record, chars) in enumerate(records, 1):
            clock.now += step_s
            work += chars
            progress.document(record, number, work)

    return lines_of(len(records) + more, sum(chars for _, chars in records) + 100 * more, report, **options)


def test_a_line_for_every_document_with_all_that_matters() -> None:
    records = [(done(f"doc-{n}", prompt_tokens=900 + n, ttft_s=1.234, new_tokens=7), 100) for n in range(3)]
    records[1] = (Record("doc-1", "error", error="it is not UTF-8"), 100)
    lines = report_lines(records, 60, 1, deadline_s=START_S + 3600)
    assert len(lines) == 3
    for number, line in enumerate(lines):
        what = rf"{900 + number} tokens, TTFT 1\.23 s, decode .* s \(7 tokens\)"
        what = "error: it is not UTF-8" if number == 1 else what
        pattern = rf"{STAMP}\] {number + 1}/4 doc-{number}: {what} \| elapsed (.*), left (.*), wall time left (.*)\n"
        match = re.fullmatch(pattern, line)
        assert match, line
        # Each of four equal documents takes a minute.
        seconds = (60 * (number + 1), 60 * (3 - number), 3600 - 60 * (number + 1))
        assert match.groups() == tuple(map(duration_text, seconds))
    fast = report_lines([(done(f"d{n}"), 1) for n in range(40)], 0.001, deadline_s=START_S)
    assert [line.split("/40")[0].rsplit(" ", 1)[1] for line in fast] == [f"{n}" for n in range(1, 41)]
    assert fast[-1].endswith("done, wall time left 0 s\n")


def test_a_split_document_has_no_sum_of_times_that_ran_side_by_side() -> None:
    record = done("book", prompt_tokens=9000, ttft_s=46.0, decode_s=204.41, new_tokens=192, parts=8)
    (line,) = report_lines([(record, 5)], 57)
    assert (
        "9,000 tokens, 7 parts and a combining prompt: prefill 46.00 s, 192 tokens generated |" in line
        and "204" not in line
    )
    (line,) = report_lines([(replace(record, parts=1), 5)], 57)
    assert "TTFT 46.00 s, decode 204.41 s (192 tokens) |" in line


@settings(max_examples=100)
@given(
    chars=st.lists(st.integers(0, 10**7), min_size=2, max_size=8),
    step_s=st.floats(2, 10**5),
)
@example(chars=[0, 0], step_s=2.0)
@example(chars=[900, 100], step_s=100.0)
def test_the_time_left_goes_by_characters(chars: list[int], step_s: float) -> None:
    lines = report_lines([(done("a"), each) for each in chars], step_s)
    now = START_S
    for number, line in enumerate(lines[:-1], 1):
        now += step_s
        elapsed, worked = now - START_S, sum(chars[:number])
        if worked < 0.04 * sum(chars) or not worked:
            assert line.endswith("left unknown\n"), "too little is done to know"
            continue
        left = round(elapsed * (sum(chars) - worked) / worked, 3)
        assert line.endswith(f"elapsed {duration_text(elapsed)}, left {duration_text(left)}\n")
    assert lines[-1].endswith(", done\n")


def test_no_time_left_is_made_up_from_short_documents_alone() -> None:
    """Nine tenths of a wave are prefilled when its first document, a short one, is done."""

    def report(progress: Progress, clock: Clock) -> None:
        clock.now += 50
        progress.document(done("short"), 1, 30, 90_000)
        clock.now += 10
        progress.document(done("long"), 2, 10_000, 90_000)

    first, second = lines_of(30, 100_000, report)
    assert first.endswith("left unknown\n")
    assert second.endswith("left 60.0 s\n"), "half of the work, half of it by its prefill"
    lines = report_lines([(done(f"d{n}"), 1000) for n in range(20)], 1, 9800)
    assert all(line.endswith("left unknown\n") for line in lines[:19]), "many of them are evidence, too"
    assert lines[19].endswith("left 16 min 20 s\n")


# Lines of any text


@settings(max_examples=100)
@given(text=TEXT, rank=st.integers(0, 3))
def test_every_line_is_whole_and_prefixed(text: str, rank: int) -> None:
    stream = io.StringIO(newline="")
    show_log()
    with redirect_stderr(stream):
        RankLogger(rank).info(text)
    who = rf" rank {rank} {re.escape(socket.gethostname())}" if rank else ""
    prefix = re.compile(STAMP + who + r"\] ")
    written = stream.getvalue()
    lines = written.removesuffix("\n").split("\n")
    assert written.endswith("\n") and "\r" not in written and all(prefix.match(line) for line in lines)
    assert [prefix.sub("", line, count=1) for line in lines] == (text.splitlines() or [""])


def show(*records: Record, result: str = "r.h5") -> str:
    """What is printed of a run that has these documents."""
    failed = [record for record in records if record.status == "error"]
    reasons = count_reasons((record.id, shorten(record.error), 1) for record in failed)
    rows = [*failed, *(record for record in records if record.status == "done")][:MAX_ROWS]
    with redirect_stdout(io.StringIO()) as printed:
        print_summary(Summary(len(records) - len(failed), len(failed), reasons), rows, Path(result))
    return printed.getvalue()


@pytest.mark.parametrize("columns", [None, "60", "300"], ids=["no-terminal", "narrow", "wide"])
def test_the_table_shows_each_document_and_counts_them(columns: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    out = show(
        done("minutes.md", prompt_tokens=2628, slices=(0, 1400, 2628), ttft_s=5.147, prefill_tokens_per_s=510.6,
             answer="The council\nmet."),
        done("book.txt", prompt_tokens=9999, slices=(0, 9999), parts=3, answer="Long."),
        done("scored.txt", scores='[{"text": " yes", "logprob": -12.5}, {"text": " no", "logprob": -11}]'),
        Record("broken.txt", "error", error="not UTF-8"),
    )  # fmt: skip
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert all(word in rows["minutes.md"] for word in ("1400+1228", "5.15 s", "511", "2,628", "The council met."))
    assert "3 prompts" in rows["book.txt"] and "' yes' -12.500" in rows["scored.txt"]
    assert "error: not UTF-8" in rows["broken.txt"]
    assert "3 done, 1 failed. Results: r.h5" in out
    assert "kvr inspect r.h5 minutes.md\n" in out, "a document with an answer"
    assert "kvr inspect r.h5 bad.txt\n" in show(Record("bad.txt", "error", error="not UTF-8")), "better than none"


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/b]", ":warning:", "[link=https://x.org]y", "\\[x]", "x" * 300])
def test_names_answers_and_paths_are_shown_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    path = str(Path("runs", name, "results.h5"))
    out = show(done(name, answer=name[:30] + " says"), Record("bad", "error", error=name[:30]), result=path)
    # An id may be cut with an ellipsis, an answer has room.
    assert f"{name[:30]} says" in out and f"error: {name[:30]}" in out and name[:11] in out
    quoted = shlex.quote(path)
    assert f"Results: {path}\n" in out and f"kvr inspect {quoted} {shlex.quote(name)}\n" in out
    assert f"kvr inspect {quoted}\n" in out and f"kvr export {quoted} --format jsonl\n" in out


@settings(max_examples=40)
@given(name=st.text(st.characters(exclude_categories=("Cs", "Cc"))), answer=TEXT, error=TEXT)
@example(name="a", answer="a\nb", error="a\nb")
def test_any_record_gives_one_row(name: str, answer: str, error: str) -> None:
    for record in (done(name, answer=answer), Record(name, "error", error=error)):
        above, _, _ = show(record).partition(" done, ")
        # A heading (two lines), row, blank line, and count; of an error also a blank line, a heading, and the reason.
        assert len(above.split("\n")) == (5 if record.status == "done" else 8)
    hostile = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b2J"  # commands for a terminal
    out = show(done(name + hostile, answer=answer + hostile), Record("c", "error", error=error + hostile))
    assert not {"\x1b", "\x07", "\x9b"} & set(out)


def test_errors_come_first_and_are_counted_by_reason() -> None:
    errors = [f"{n}.txt has {n} tokens; 'x{n}' is in /data/corpus/{n}.txt" for n in range(100, 130)]
    failed = [Record(f"{n}.txt", "error", error=error) for n, error in enumerate(errors, 100)]
    out = show(*(done(f"doc-{n:03d}") for n in range(50)), Record("z", "error", error="not UTF-8"), *failed)
    rows = out.splitlines()[2 : MAX_ROWS + 2]
    assert all("error: " in row for row in rows[:31]) and all("doc-" in row for row in rows[31:])
    assert f"30 x {errors[0]} (and similar)\n" in out and " 1 x not UTF-8" in out and "--errors" in out
    assert out.index("30 x") < out.index(" 1 x") < out.index("50 done, 31 failed")
    reasons = {f"reason {chr(97 + n)}": 20 - n for n in range(14)}
    first, *_, last = lines = reason_lines(reasons)
    assert first == "20 x reason a" and last == f"{10 + 9 + 8 + 7} for 4 other reasons" and len(lines) == 11


@settings(max_examples=50)
@given(st.text(max_size=2000))
def test_a_reason_is_one_short_line(error: str) -> None:
    reason = shorten(error)
    assert len(reason) <= REASON_CHARS and reason == " ".join(reason.split()) and shorten(reason) == reason


# Numbers and ticks


def test_lengths_and_sizes_are_said_plainly() -> None:
    assert [tokens_text(n) for n in (512, 4096, 5682, 131072, 1 << 20)] == ["512", "4.1k", "5.7k", "131k", "1M"]
    sizes = {
        0: "0 B",
        1023: "1023 B",
        2048: "2 KiB",
        3.4 * 2**20: "3.4 MiB",
        12 << 30: "12 GiB",
        3.1 * 2**40: "3.1 TiB",
    }
    assert {size: bytes_text(size) for size in sizes} == sizes
    assert [percent_text(p) for p in (0, 0.004, 0.034, 1)] == ["0%", "0.4%", "3%", "100%"]
    assert [plain_number(n) for n in (0.5, 10, 4000)] == ["0.5", "10", "4,000"]


@pytest.mark.parametrize("high", [0.003, 0.7, 1, 9.99, 57.3, 1e3, 8.1e6])
def test_ticks_are_few_round_and_within(high: float) -> None:
    for ticks in (nice_ticks(0, high), log_ticks(high / 1000, high)):
        assert 2 <= len(ticks) <= 10 and ticks == sorted(ticks)
        assert -1e-12 <= ticks[0] and ticks[-1] <= high * 1.001
        assert all("e" not in plain_number(tick) or tick < 1e-4 for tick in ticks)
    assert token_ticks(900, 20_000) == [1024, 2048, 4096, 8192, 16384]
    assert len(token_ticks(64, 1 << 24)) <= 9
    assert [tokens_text(tick) for tick in nice_ticks(0, 5900)] == ["0", "1k", "2k", "3k", "4k", "5k"]
