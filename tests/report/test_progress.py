"""Progress: a line for every document, with an estimate that is not made up, or a bar."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_reports import STAMP, TEXT, done

from kvr_mpi.duration import duration_text
from kvr_mpi.report.log import Log
from kvr_mpi.report.progress import Progress
from kvr_mpi.store.record import Record


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# Progress


def report_lines(
    records: list[tuple[Record, int]], clock: Clock, step_s: float, *, deadline_s: float | None = None, more: int = 0
) -> Iterator[str]:
    """Report documents, each taking `step_s`, of a job that has `more` of 100 characters after them."""
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
            rf"{STAMP}\] {number + 1}/4 doc-{number}: {900 + number} tokens, first token 1\.23 s, "
            rf"7 tokens generated in .* \| "
            rf"elapsed (.*), left (.*), wall time left (.*)\n"
        )
        match = re.fullmatch(pattern, line)
        assert match, line
        # Each of four equal documents takes a minute.
        seconds = (60 * (number + 1), 60 * (3 - number), 3600 - 60 * (number + 1))
        assert match.groups() == tuple(map(duration_text, seconds))


def test_a_split_document_has_no_sum_of_times_that_ran_side_by_side() -> None:
    record = done("book", prompt_tokens=9000, ttft_s=46.0, decode_s=204.41, new_tokens=192, parts=8)
    (line,) = report_lines([(record, 5)], Clock(), 57)
    assert "9000 tokens, 8 prompts: prefill 46.00 s, 192 tokens generated |" in line and "204" not in line
    (line,) = report_lines([(replace(record, parts=1), 5)], Clock(), 57)
    assert "first token 46.00 s, 192 tokens generated in 204.41 s |" in line


def test_without_a_deadline_there_is_no_wall_time() -> None:
    (line,) = report_lines([(done("a"), 5)], Clock(), 1, more=1)
    assert "wall time" not in line and "elapsed 1.00 s, left 20.0 s" in line


def test_a_deadline_that_has_passed_is_zero() -> None:
    (line,) = report_lines([(done("a"), 5)], Clock(), 100, deadline_s=1_000_000 + 10, more=1)
    assert line.endswith("wall time left 0 s\n")


def test_the_last_document_leaves_nothing() -> None:
    lines = list(report_lines([(done("a"), 5), (done("b"), 50)], Clock(), 10, deadline_s=1_000_100))
    assert "left 1 min 40 s" in lines[0]
    assert lines[1].endswith("elapsed 20.0 s, done, wall time left 80.0 s\n")


@settings(max_examples=100)
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
        left = round(elapsed * (sum(chars) - worked) / worked, 3)
        assert line.endswith(f"elapsed {duration_text(elapsed)}, left {duration_text(left)}")


def test_long_documents_count_for_more_than_short_ones() -> None:
    def left(first: int) -> str:
        stream, clock = io.StringIO(), Clock()
        progress = Progress(Log(stream=stream), 2, 1000, clock=clock)
        clock.now += 100
        progress.document(done("a"), 1, first)
        return stream.getvalue().rsplit("left ", 1)[1].strip()

    assert [left(first) for first in (900, 500, 100)] == ["11.1 s", "1 min 40 s", "15 min"]


def test_an_error_is_told_and_counted() -> None:
    records = [(Record("bad", "error", error="the file is not UTF-8"), 100), (done("good"), 100)]
    first, second = report_lines(records, Clock(), 1)
    assert "1/2 bad: error: the file is not UTF-8 | elapsed" in first
    assert "2/2 good: " in second and "error" not in second


@settings(max_examples=80)
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
    assert second.endswith("left 60.0 s"), "half of the work, half of it by its prefill"


def test_many_short_documents_are_evidence_too() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(Log(stream=stream), 1000, 1_000_000, clock=clock) as progress:
        for number in range(1, 21):
            clock.now += 1
            progress.document(done(f"d{number}"), number, 1000 * number)
    lines = stream.getvalue().splitlines()
    assert all(line.endswith("left unknown") for line in lines[:19]) and lines[19].endswith("left 16 min 20 s")


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


def test_a_bar_says_the_pace_and_the_wall_time() -> None:
    for deadline_s, said in ((None, "50 tokens/s"), (1_000_100.0, "50 tokens/s, wall time left 90.0 s")):
        clock = Clock()
        with Progress(Log(stream=io.StringIO()), 2, 20, bar=True, deadline_s=deadline_s, clock=clock) as progress:
            clock.now += 10
            progress.document(done("a"), 1, 10, 10, tokens=500)
            assert progress._bar is not None
            assert progress._bar.tasks[0].fields["pace"] == said


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
        re.search(r"prefilled d\d: 900 tokens in 1\.50 s \| elapsed .* m?s, wall time left (9 min 5\d s|10 min)", line)
        for line in lines
    )


def test_a_silent_report_tells_nothing() -> None:
    stream = io.StringIO()
    with Progress(Log(stream=stream), 1, 1, silent=True) as progress:
        progress.document(Record("d", "error"), 1, 1)
    assert not stream.getvalue()
