"""Progress: a line for every document, with an estimate that is not made up, or a bar."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_reports import STAMP, TEXT, done

from kvr_mpi.duration import duration_text
from kvr_mpi.report.log import Log
from kvr_mpi.report.progress import Progress
from kvr_mpi.store.record import Record

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
    with Progress(Log(stream=stream), documents, work, clock=clock, **options) as progress:  # type: ignore[arg-type]
        report(progress, clock)
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
    lines = report_lines(records, 60, 1, deadline_s=START_S + 3600)
    assert len(lines) == 3
    for number, line in enumerate(lines):
        pattern = (
            rf"{STAMP}\] {number + 1}/4 doc-{number}: {900 + number} tokens, first token 1\.23 s, "
            rf"7 tokens generated in .* \| elapsed (.*), left (.*), wall time left (.*)\n"
        )
        match = re.fullmatch(pattern, line)
        assert match, line
        # Each of four equal documents takes a minute.
        seconds = (60 * (number + 1), 60 * (3 - number), 3600 - 60 * (number + 1))
        assert match.groups() == tuple(map(duration_text, seconds))


def test_a_split_document_has_no_sum_of_times_that_ran_side_by_side() -> None:
    record = done("book", prompt_tokens=9000, ttft_s=46.0, decode_s=204.41, new_tokens=192, parts=8)
    (line,) = report_lines([(record, 5)], 57)
    assert "9000 tokens, 8 prompts: prefill 46.00 s, 192 tokens generated |" in line and "204" not in line
    (line,) = report_lines([(replace(record, parts=1), 5)], 57)
    assert "first token 46.00 s, 192 tokens generated in 204.41 s |" in line


@pytest.mark.parametrize(
    ("step_s", "more", "options", "end"),
    [
        (1, 1, {}, "elapsed 1.00 s, left 20.0 s"),
        (100, 1, {"deadline_s": START_S + 10}, "wall time left 0 s"),
        (20, 0, {"deadline_s": START_S + 100}, "elapsed 20.0 s, done, wall time left 80.0 s"),
    ],
)
def test_how_a_line_ends(step_s: float, more: int, options: dict[str, float], end: str) -> None:
    (line,) = report_lines([(done("a"), 5)], step_s, more, **options)
    assert line.endswith(f"{end}\n")


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


def test_an_error_is_told_and_counted() -> None:
    first, second = report_lines([(Record("bad", "error", error="it is not UTF-8"), 100), (done("good"), 100)], 1)
    assert "1/2 bad: error: it is not UTF-8 | elapsed" in first
    assert "2/2 good: " in second and "error" not in second


@settings(max_examples=80)
@given(name=TEXT, error=TEXT, status=st.sampled_from(["done", "error"]))
def test_progress_is_whole_lines_without_carriage_returns(name: str, error: str, status: str) -> None:
    lines = report_lines([(Record(name, status, error=error), 10)] * 2, 1, deadline_s=START_S + 9)
    assert all(re.match(STAMP + r"\] ", line) and line.endswith("\n") and "\r" not in line for line in lines)
    assert "".join(lines).count("wall time left") == 2 + 2 * (name + error).count("wall time left")


def test_every_document_is_told_of_however_fast_they_come() -> None:
    records = [(Record(f"d{n}", "error" if n in (5, 6) else "done"), 1) for n in range(1, 41)]
    told = [int(line.split("/40")[0].rsplit(" ", 1)[1]) for line in report_lines(records, 0.001)]
    assert told == list(range(1, 41))


def test_no_time_left_is_made_up_from_a_first_short_document() -> None:
    """Nine tenths of a wave are prefilled when its first document, a short one, is done."""

    def report(progress: Progress, clock: Clock) -> None:
        clock.now += 50
        progress.document(done("short"), 1, 30, 90_000)
        clock.now += 10
        progress.document(done("long"), 2, 10_000, 90_000)

    first, second = lines_of(30, 100_000, report)
    assert first.endswith("left unknown\n")
    assert second.endswith("left 60.0 s\n"), "half of the work, half of it by its prefill"


def test_many_short_documents_are_evidence_too() -> None:
    lines = report_lines([(done(f"d{n}"), 1000) for n in range(20)], 1, 9800)
    assert all(line.endswith("left unknown\n") for line in lines[:19]) and lines[19].endswith("left 16 min 20 s\n")


def test_prompts_that_wait_for_their_answers_are_told_of() -> None:
    def report(progress: Progress, clock: Clock) -> None:
        for number in range(8):
            clock.now += 0.5
            progress.prefilled(f"d{number}", 900, 1.5)

    lines = lines_of(3, 3, report, deadline_s=START_S + 600)
    assert 3 <= len(lines) <= 5
    assert all(
        re.search(r"prefilled d\d: 900 tokens in 1\.50 s \| elapsed .* m?s, wall time left (9 min 5\d s|10 min)", line)
        for line in lines
    )


def test_a_silent_report_tells_nothing() -> None:
    assert not lines_of(1, 1, lambda progress, clock: progress.document(Record("d", "error"), 1, 1), silent=True)


# The bar


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch) -> Iterator[Progress]:
    """A bar of two documents and 1000 characters; rich allows one at a time."""
    monkeypatch.setenv("COLUMNS", "100")
    clock = Clock()
    options = {"bar": True, "deadline_s": START_S + 100, "clock": clock}
    with Progress(Log(stream=io.StringIO()), 2, 1000, **options) as progress:  # type: ignore[arg-type]
        clock.now += 10
        yield progress


def task_of(progress: Progress) -> tuple[float, str]:
    """How far the bar is, and the pace that it shows."""
    assert progress._bar is not None
    (task,) = progress._bar.tasks
    return task.completed / (task.total or 1), task.fields["pace"]


@pytest.mark.parametrize("name", ["plain", "[red]x[/red]", "[/b]", "[link=x]", "a\nb", "x" * 300, ":warning:"])
def test_a_bar_draws_any_name_and_tells_errors(capsys: pytest.CaptureFixture[str], bar: Progress, name: str) -> None:
    bar.document(Record(name, "error", error="the file is [/not] UTF-8"), 1, 10)
    bar.document(done(name), 2, 20)
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err and "the file is [/not] UTF-8" in " ".join(err.split())


def test_a_bar_moves_with_what_is_prefilled_and_says_the_pace(
    capsys: pytest.CaptureFixture[str], bar: Progress
) -> None:
    for prefilled, share in ((0, 0.0), (500, 0.25), (1000, 0.5)):
        bar.prefilled("a", 900, 1.5, prefilled)
        assert task_of(bar)[0] == share
    bar.document(done("a"), 1, 400, 1000, tokens=500)
    assert task_of(bar) == (0.7, "50 tokens/s, wall time left 90.0 s")
    assert "1/2 a: " in capsys.readouterr().err, "each document has its line, above the bar"


def test_a_bar_ends_even_if_the_job_fails() -> None:
    for _ in range(2):  # rich allows one bar at a time: the second would fail if the first were still drawn
        with pytest.raises(ZeroDivisionError), Progress(Log(stream=io.StringIO()), 1, 1, bar=True):
            raise ZeroDivisionError
