"""What the user sees: whole lines with time and rank, progress with an estimate, and the table at the end."""

from __future__ import annotations

import io
import re
import shlex
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvr_mpi.report.log import Log
from kvr_mpi.report.progress import Progress, clock_time, wants_bar
from kvr_mpi.report.table import MAX_ROWS, print_summary, reason_lines
from kvr_mpi.store.outputs import Record
from kvr_mpi.store.summary import Summary, count_reasons, reason_of

STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
CLOCK = r"\d+:[0-5]\d:[0-5]\d"
TEXT = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["a\nb", "a\r\nb", "50 %\r100 %", "\n\n", "", "a\x0bb\x0cc\x85d\u2028e", "[red]x[/red]", "[/b]", "😀"]
    ),
)


class RecordedStream(io.StringIO):
    """A stream that remembers in which pieces it was written, and when it was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.unflushed = 0

    def write(self, text: str) -> int:
        self.writes.append(text)
        self.unflushed += 1
        return super().write(text)

    def flush(self) -> None:
        self.unflushed = 0
        super().flush()


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def seconds_of(text: str) -> int:
    hours, minutes, seconds = text.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds)


def done(name: str, **values: object) -> Record:
    return Record(name, "done", **values)  # type: ignore[arg-type]


# Log


def test_rank_0_needs_no_naming() -> None:
    stream = io.StringIO()
    Log(0, 4, stream).line("model loaded")
    assert re.fullmatch(STAMP + r"\] model loaded\n", stream.getvalue())


@pytest.mark.parametrize("rank", [1, 3, 127])
def test_other_ranks_name_themselves_and_their_host(rank: int) -> None:
    stream = io.StringIO()
    Log(rank, 128, stream).line("model loaded")
    assert re.fullmatch(rf"{STAMP} rank {rank} {re.escape(socket.gethostname())}\] model loaded\n", stream.getvalue())


def test_root_lines_come_from_rank_0_only() -> None:
    streams = [io.StringIO() for _ in range(3)]
    for rank, stream in enumerate(streams):
        Log(rank, 3, stream).root("8 documents")
    assert [stream.getvalue().count("8 documents") for stream in streams] == [1, 0, 0]


@settings(max_examples=100, deadline=None)
@given(text=TEXT, rank=st.integers(0, 3))
def test_every_line_is_whole_prefixed_and_written_in_one_piece(text: str, rank: int) -> None:
    stream = RecordedStream()
    Log(rank, 4, stream).line(text)
    prefix = re.compile(STAMP + (rf" rank {rank} \S+" if rank else "") + r"\] ")
    assert stream.writes and stream.unflushed == 0
    for piece in stream.writes:
        assert prefix.match(piece) and piece.endswith("\n") and piece.count("\n") == 1 and "\r" not in piece
    assert [prefix.sub("", piece, count=1)[:-1] for piece in stream.writes] == (text.splitlines() or [""])


def test_the_log_is_standard_error_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    Log().line("words")
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("] words\n")


# Progress


def report_lines(
    records: list[tuple[Record, int]], clock: Clock, step_s: float, *, deadline_s: float | None = None, more: int = 0
) -> Iterator[str]:
    """Report documents, each taking `step_s`, of a job that has `more` of 100 characters behind them."""
    stream = io.StringIO()
    total = sum(chars for _, chars in records) + 100 * more
    with Progress(Log(stream=stream), len(records) + more, total, deadline_s=deadline_s, clock=clock) as progress:
        work = 0
        for number, (record, chars) in enumerate(records, 1):
            clock.now += step_s
            work += chars
            progress.document(record, number, work)
    yield from stream.getvalue().splitlines(keepends=True)


def test_a_line_for_every_document_with_all_that_matters() -> None:
    records = [(done(f"doc-{n}", prompt_tokens=900 + n, ttft_s=1.234, new_tokens=7), 100) for n in range(3)]
    lines = list(report_lines(records, Clock(), 60, deadline_s=1_000_000 + 3600, more=1))
    assert len(lines) == 3
    for number, line in enumerate(lines):
        pattern = (
            rf"{STAMP}\] {number + 1}/4 doc-{number}: {900 + number} tokens, first token 1\.23 s, 7 written .* \| "
            rf"elapsed ({CLOCK}), left ({CLOCK}), wall time left ({CLOCK})\n"
        )
        match = re.fullmatch(pattern, line)
        assert match, line
        # Each of four equal documents takes a minute.
        assert [seconds_of(part) for part in match.groups()] == [
            60 * (number + 1),
            60 * (3 - number),
            3600 - 60 * (number + 1),
        ]


def test_without_a_deadline_there_is_no_wall_time() -> None:
    (line,) = report_lines([(done("a"), 5)], Clock(), 1, more=1)
    assert "wall time" not in line and "elapsed 0:00:01, left 0:00:20" in line


def test_a_deadline_that_has_passed_is_zero() -> None:
    (line,) = report_lines([(done("a"), 5)], Clock(), 100, deadline_s=1_000_000 + 10, more=1)
    assert line.endswith("wall time left 0:00:00\n")


def test_the_last_document_leaves_nothing() -> None:
    lines = list(report_lines([(done("a"), 5), (done("b"), 50)], Clock(), 10, deadline_s=1_000_100))
    assert "left 0:01:40" in lines[0]
    assert lines[1].endswith("elapsed 0:00:20, done, wall time left 0:01:20\n")


@settings(max_examples=100, deadline=None)
@given(
    chars=st.lists(st.integers(0, 10**7), min_size=2, max_size=8),
    step_s=st.floats(2, 10**5),
)
@example(chars=[0, 0], step_s=2.0)
def test_the_time_left_goes_by_characters(chars: list[int], step_s: float) -> None:
    clock, began = Clock(), Clock().now
    stream = io.StringIO()
    progress = Progress(Log(stream=stream), len(chars), sum(chars), clock=clock)
    for number in range(1, len(chars)):
        clock.now += step_s
        progress.document(done("a"), number, sum(chars[:number]))
        line = stream.getvalue().splitlines()[-1]
        elapsed, worked = clock.now - began, sum(chars[:number])
        if worked < 0.04 * sum(chars) or not worked:
            assert line.endswith("left unknown"), "too little is done to know"
            continue
        match = re.search(rf"elapsed ({CLOCK}), left ({CLOCK})$", line)
        assert match, line
        assert seconds_of(match[1]) == pytest.approx(elapsed, abs=1)
        assert seconds_of(match[2]) == pytest.approx(elapsed * (sum(chars) - worked) / worked, abs=1)


def test_long_documents_count_for_more_than_short_ones() -> None:
    def left(first: int) -> int:
        stream, clock = io.StringIO(), Clock()
        progress = Progress(Log(stream=stream), 2, 1000, clock=clock)
        clock.now += 100
        progress.document(done("a"), 1, first)
        return seconds_of(stream.getvalue().rsplit(" ", 1)[1].strip())

    assert left(900) < left(500) < left(100) and left(500) == 100


def test_an_error_is_told_and_counted() -> None:
    records = [(Record("bad", "error", error="the file is not UTF-8"), 100), (done("good"), 100)]
    first, second = report_lines(records, Clock(), 1)
    assert "1/2 bad: error: the file is not UTF-8 | elapsed" in first
    assert "2/2 good: " in second and "error" not in second


@settings(max_examples=80, deadline=None)
@given(name=TEXT, error=TEXT, status=st.sampled_from(["done", "error"]))
def test_progress_is_whole_lines_without_carriage_returns(name: str, error: str, status: str) -> None:
    lines = list(report_lines([(Record(name, status, error=error), 10)] * 2, Clock(), 1, deadline_s=1_000_009))
    assert all(re.match(STAMP + r"\] ", line) and line.endswith("\n") and "\r" not in line for line in lines)
    text = "".join(lines)
    assert text.count("wall time left") == 2 + 2 * (name + error).count("wall time left")


@pytest.mark.parametrize("name", ["plain", "[red]x[/red]", "[/b]", "[link=x]", "a\nb", "x" * 300, ":warning:"])
def test_a_bar_draws_any_name_and_tells_errors(capsys: pytest.CaptureFixture[str], name: str) -> None:
    stream = io.StringIO()
    with Progress(Log(stream=stream), 2, 20, bar=True) as progress:
        progress.document(Record(name, "error", error="the file is [/not] UTF-8"), 1, 10)
        progress.document(done(name), 2, 20)
    out, err = capsys.readouterr()
    assert out == "" and stream.getvalue() == ""
    assert "2/2" in err and "the file is [/not] UTF-8" in " ".join(err.split())


def test_a_bar_ends_even_if_the_job_fails() -> None:
    with pytest.raises(ZeroDivisionError), Progress(Log(stream=io.StringIO()), 1, 1, bar=True):
        raise ZeroDivisionError
    # Rich allows one bar at a time: the next one would fail if the first were still drawn.
    with Progress(Log(stream=io.StringIO()), 1, 1, bar=True) as progress:
        progress.document(done("a"), 1, 1)


def test_every_document_is_told_of_however_fast_they_come() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(Log(stream=stream), 40, 40, clock=clock) as progress:
        for number in range(1, 41):
            clock.now += 0.001
            status = "error" if number in (5, 6) else "done"
            progress.document(Record(f"d{number}", status), number, number)
    told = [int(line.split("/40")[0].rsplit(" ", 1)[1]) for line in stream.getvalue().splitlines()]
    assert told == list(range(1, 41))


def test_no_time_left_is_made_up_from_a_first_short_document() -> None:
    """Nine tenths of a wave are prefilled when its first document, a short one, is done."""
    stream, clock = io.StringIO(), Clock()
    with Progress(Log(stream=stream), 30, 100_000, clock=clock) as progress:
        clock.now += 50
        progress.document(done("short"), 1, 30, 90_000)
        clock.now += 10
        progress.document(done("long"), 2, 10_000, 90_000)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("left unknown")
    assert second.endswith("left 0:01:00"), "half of the work, half of it by its prefill"


def test_many_short_documents_are_evidence_too() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(Log(stream=stream), 1000, 1_000_000, clock=clock) as progress:
        for number in range(1, 21):
            clock.now += 1
            progress.document(done(f"d{number}"), number, 1000 * number)
    lines = stream.getvalue().splitlines()
    assert all(line.endswith("left unknown") for line in lines[:19]) and lines[19].endswith("left 0:16:20")


def test_a_bar_moves_with_what_is_prefilled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lengths = []
    for prefilled in (0, 500, 1000):
        with Progress(Log(stream=io.StringIO()), 2, 1000, bar=True) as progress:
            if prefilled:
                progress.prefilled("a", 900, 1.5, prefilled)
        lengths.append(capsys.readouterr().err.count("━") and bar_share(progress))
    assert lengths == [0.0, 0.25, 0.5]
    with Progress(Log(stream=io.StringIO()), 2, 1000, bar=True) as progress:
        progress.prefilled("a", 900, 1.5, 1000)
        progress.document(done("a"), 1, 400, 1000)
        assert bar_share(progress) == 0.7
    assert "1/2 a: " in capsys.readouterr().err, "each document has its line, above the bar"


def bar_share(progress: Progress) -> float:
    """How far the bar is."""
    assert progress._bar is not None
    (task,) = progress._bar.tasks
    return task.completed / (task.total or 1)


def test_prompts_that_wait_for_their_answers_are_told_of() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(Log(stream=stream), 3, 3, deadline_s=clock.now + 600, clock=clock) as progress:
        for number in range(8):
            clock.now += 0.5
            progress.prefilled(f"d{number}", 900, 1.5)
    lines = stream.getvalue().splitlines()
    assert 3 <= len(lines) <= 5
    assert all(
        re.search(r"prefilled d\d: 900 tokens in 1\.50 s \| elapsed 0:00:0\d, wall time left 0:(09:5|10:0)", line)
        for line in lines
    )


def test_a_silent_report_tells_nothing() -> None:
    stream = io.StringIO()
    with Progress(Log(stream=stream), 1, 1, silent=True) as progress:
        progress.document(Record("d", "error"), 1, 1)
    assert not stream.getvalue()


def test_a_bar_is_for_a_terminal_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert not wants_bar("auto", False)
    monkeypatch.setattr("sys.stderr", Terminal())
    # Under a launcher, the terminal is the launcher's, and shared by all ranks.
    assert wants_bar("auto", False) and not wants_bar("auto", True)
    assert wants_bar("bar", True) and not wants_bar("lines", False)


# clock_time


@settings(max_examples=200, deadline=None)
@given(seconds=st.floats(-(10**6), 10**9))
@example(59.6)
@example(3599.5)
@example(-0.4)
def test_clock_time_is_hours_minutes_seconds(seconds: float) -> None:
    text = clock_time(seconds)
    assert re.fullmatch(CLOCK, text)
    assert seconds_of(text) == max(0, round(seconds))


def test_clock_time_of_more_than_a_day() -> None:
    assert [clock_time(s) for s in (0, 61, 3600, 90061)] == ["0:00:00", "0:01:01", "1:00:00", "25:01:01"]


# The table


def show(records: Sequence[Record], result: Path) -> None:
    """Print the table of a run that has these documents."""
    failed = [record for record in records if record.status == "error"]
    reasons = count_reasons(reason_of(record.id, record.error) for record in failed)
    rows = [*failed, *(record for record in records if record.status == "done")][:MAX_ROWS]
    print_summary(Summary(len(records) - len(failed), len(failed), reasons), rows, result)


@pytest.fixture(params=[None, "60", "300"], ids=["no-terminal", "narrow", "wide"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if request.param is not None:
        monkeypatch.setenv("COLUMNS", request.param)
    width: str | None = request.param
    return width


def test_the_table_shows_each_document_and_counts_them(capsys: pytest.CaptureFixture[str], columns: str | None) -> None:
    records = [
        done("minutes.md", prompt_tokens=2628, slices=(0, 1400, 2628), ttft_s=5.147, prefill_tokens_per_s=510.6,
             answer="The council\nmet."),
        done("book.txt", prompt_tokens=9999, slices=(0, 9999), parts=3, answer="Long."),
        Record("broken.txt", "error", error="not UTF-8"),
    ]  # fmt: skip
    show(records, Path("runs/x/results.h5"))
    out, err = capsys.readouterr()
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert err == ""
    assert "1400+1228" in rows["minutes.md"] and "5.15 s" in rows["minutes.md"] and "511" in rows["minutes.md"]
    assert "2628" in rows["minutes.md"] and "The council met." in rows["minutes.md"]
    assert "3 prompts" in rows["book.txt"]
    assert "error: not UTF-8" in rows["broken.txt"]
    assert "2 done, 1 error(s). Results: runs/x/results.h5" in out


@pytest.mark.parametrize("count", [0, 1, MAX_ROWS, MAX_ROWS + 1, MAX_ROWS + 25])
def test_the_table_is_cut_and_says_by_how_much(capsys: pytest.CaptureFixture[str], count: int) -> None:
    show([done(f"doc-{n:03d}") for n in range(count)], Path("results.h5"))
    out = capsys.readouterr().out
    assert len(re.findall(r"doc-\d+", out.partition("Look into it")[0])) == min(count, MAX_ROWS)
    assert f"{count} done, 0 error(s)" in out
    assert (f"... and {count - MAX_ROWS} more" in out) == (count > MAX_ROWS) == ("... and" in out)


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/b]", ":warning:", "[link=https://x.org]y", "100%", "\\[x]"])
def test_names_and_answers_are_shown_as_they_are(capsys: pytest.CaptureFixture[str], name: str) -> None:
    show([done(name, answer=name + " says"), Record("bad", "error", error=name)], Path("results.h5"))
    out = capsys.readouterr().out
    # An id may be cut with an ellipsis, an answer has room.
    assert f"{name} says" in out and f"error: {name}" in out and name[:11] in out


@pytest.mark.parametrize(
    "path",
    [
        "runs/[test]/results.h5",
        "runs/[/b]/results.h5",
        "runs/:warning:/results.h5",
        "runs/" + "x" * 300 + "/results.h5",
    ],
    ids=["markup", "closing-markup", "emoji", "long"],
)
def test_the_path_of_the_results_is_shown_as_it_is(capsys: pytest.CaptureFixture[str], path: str) -> None:
    show([done("a")], Path(path))
    out = capsys.readouterr().out
    assert f"Results: {path}\n" in out
    quoted = shlex.quote(path)
    assert f"kvr inspect {quoted}\n" in out and f"kvr export {quoted} --format jsonl\n" in out
    assert f"kvr inspect {quoted} a\n" in out


@settings(max_examples=40, deadline=None)
@given(name=st.text(st.characters(exclude_categories=("Cs", "Cc"))), answer=TEXT, error=TEXT)
@example(name="a", answer="a\nb", error="a\nb")
def test_any_record_gives_one_row(name: str, answer: str, error: str) -> None:
    for record in (done(name, answer=answer), Record(name, "error", error=error)):
        stream = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout", stream)
            show([record], Path("results.h5"))
        above, _, _ = stream.getvalue().partition(" done, ")
        # A heading, the row, a blank line, and the count; of an error, a blank line, a heading, and the reason.
        assert len(above.split("\n")) == (4 if record.status == "done" else 7)


def test_no_terminal_command_gets_through(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b2J"
    show([done("a" + hostile, answer="b" + hostile), Record("c", "error", error=hostile)], Path("results.h5"))
    assert not {"\x1b", "\x07", "\x9b"} & set(capsys.readouterr().out)


def test_errors_come_first_and_are_counted_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [f"{n}.txt has {n} tokens; 'x{n}' is in /data/corpus/{n}.txt" for n in range(100, 130)]
    failed = [Record(f"{n}.txt", "error", error=error) for n, error in enumerate(errors, 100)]
    show([*(done(f"doc-{n:03d}") for n in range(50)), Record("z", "error", error="not UTF-8"), *failed], Path("r.h5"))
    out = capsys.readouterr().out
    rows = out.splitlines()[1 : MAX_ROWS + 1]
    assert all("error: " in row for row in rows[:31]) and all("doc-" in row for row in rows[31:])
    assert "30 x ... has N tokens; ... is in ..." in out and " 1 x not UTF-8" in out and "--errors" in out
    assert out.index("30 x") < out.index(" 1 x") < out.index("50 done, 31 error(s)")


def test_only_the_most_frequent_reasons_are_shown() -> None:
    reasons = {f"reason {chr(97 + n)}": 20 - n for n in range(14)}
    lines = reason_lines(reasons)
    assert lines[0] == "20 x reason a" and lines[-1] == f"{10 + 9 + 8 + 7} for 4 other reasons" and len(lines) == 11


@settings(max_examples=50, deadline=None)
@given(name=st.text(max_size=8), error=st.text(max_size=300))
def test_a_reason_is_one_short_line(name: str, error: str) -> None:
    reason = reason_of(name, error)
    assert len(reason) <= 160 and reason == " ".join(reason.split()) and reason_of(name, error) == reason
