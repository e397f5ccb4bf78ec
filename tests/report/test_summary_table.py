"""The table at the end: every document and error as it is, cut to what can be read, and safe for a terminal."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_reports import TEXT, done

from kvr_mpi.report.table import MAX_ROWS, print_summary, reason_lines
from kvr_mpi.store.record import Record
from kvr_mpi.store.summary import REASON_CHARS, Summary, count_reasons, shorten


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
    assert all(word in rows["minutes.md"] for word in ("1400+1228", "5.15 s", "511", "2628", "The council met."))
    assert "3 prompts" in rows["book.txt"] and "' yes' -12.500" in rows["scored.txt"]
    assert "error: not UTF-8" in rows["broken.txt"]
    assert "3 done, 1 failed. Results: r.h5" in out
    assert "kvr inspect r.h5 minutes.md\n" in out, "a document with an answer"
    assert "kvr inspect r.h5 bad.txt\n" in show(Record("bad.txt", "error", error="not UTF-8")), "better than none"


@pytest.mark.parametrize("count", [0, 1, MAX_ROWS, MAX_ROWS + 1, MAX_ROWS + 25])
def test_the_table_is_cut_and_says_by_how_much(count: int) -> None:
    out = show(*(done(f"doc-{n:03d}") for n in range(count)))
    assert len(re.findall(r"doc-\d+", out.partition("See the results")[0])) == min(count, MAX_ROWS)
    assert f"{count} done, 0 failed" in out
    assert (f"... and {count - MAX_ROWS} more" in out) == (count > MAX_ROWS) == ("... and" in out)


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
        # A heading, the row, a blank line, and the count; of an error, a blank line, a heading, and the reason.
        assert len(above.split("\n")) == (4 if record.status == "done" else 7)
    hostile = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b2J"  # commands for a terminal
    out = show(done(name + hostile, answer=answer + hostile), Record("c", "error", error=error + hostile))
    assert not {"\x1b", "\x07", "\x9b"} & set(out)


def test_errors_come_first_and_are_counted_by_reason() -> None:
    errors = [f"{n}.txt has {n} tokens; 'x{n}' is in /data/corpus/{n}.txt" for n in range(100, 130)]
    failed = [Record(f"{n}.txt", "error", error=error) for n, error in enumerate(errors, 100)]
    out = show(*(done(f"doc-{n:03d}") for n in range(50)), Record("z", "error", error="not UTF-8"), *failed)
    rows = out.splitlines()[1 : MAX_ROWS + 1]
    assert all("error: " in row for row in rows[:31]) and all("doc-" in row for row in rows[31:])
    assert f"30 x such as: {errors[0]}" in out and " 1 x not UTF-8" in out and "--errors" in out
    assert out.index("30 x") < out.index(" 1 x") < out.index("50 done, 31 failed")
    reasons = {f"reason {chr(97 + n)}": 20 - n for n in range(14)}
    first, *_, last = lines = reason_lines(reasons)
    assert first == "20 x such as: reason a" and last == f"{10 + 9 + 8 + 7} for 4 other reasons" and len(lines) == 11


@settings(max_examples=50)
@given(st.text(max_size=2000))
def test_a_reason_is_one_short_line(error: str) -> None:
    reason = shorten(error)
    assert len(reason) <= REASON_CHARS and reason == " ".join(reason.split()) and shorten(reason) == reason
