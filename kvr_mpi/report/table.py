"""The table at the end of a job."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvr_mpi.errors import counted, printable
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import Results
from kvr_mpi.store.summary import Summary

MAX_ROWS = 40
MAX_REASONS = 10
WORDS_CHARS = 200


def rows_of(results: Results) -> Iterator[Record]:
    """Read the records that fit into the table, failed ones first."""
    names = chain(results.places.ordered("error"), results.places.ordered("done"))
    return results.read(islice(names, MAX_ROWS))


def reason_lines(reasons: Mapping[str, int]) -> list[str]:
    """Count failed documents by cause, the most frequent first, with one example message each."""
    width = max((len(str(count)) for count in reasons.values()), default=0)
    shown = list(reasons.items())[:MAX_REASONS]
    lines = [f"{n:{width}} x {printable(reason, '')}" for reason, n in shown]
    rest = list(reasons.values())[MAX_REASONS:]
    return lines + ([f"{sum(rest)} for {len(rest)} other reasons"] if rest else [])


def ending_lines(endings: Mapping[str, int], answers: int) -> Iterator[tuple[str, str]]:
    """For each cause in `Record.ended_early`, yield a heading, and how many answers it ended and what to do."""
    for cause, heading, what, advice in (
        (
            "reasoning",
            "no answer",
            "empty, since the model was still reasoning",
            "raise generation.max_new_tokens, or switch the reasoning off with prompt.template_args, and rerun into a "
            "new output.path",
        ),
        (
            "length",
            "cut off",
            "cut off at generation.max_new_tokens (finish_reason = length)",
            "raise it and rerun into a new output.path",
        ),
        (
            "repetition",
            "repeated",
            "stopped because they repeated themselves (finish_reason = repetition)",
            "use a larger model, or set generation.repetition_penalty = 1.1",
        ),
    ):
        if count := endings.get(cause, 0):
            yield heading, f"{count:,} of {counted(answers, 'answer')} {what}: {advice}"


def _how_computed(record: Record) -> str:
    """Describe how a prompt was computed: its slices, its computed tokens, or its number of prompts."""
    if record.question and record.computed_tokens < record.prompt_tokens:
        return f"{record.computed_tokens:,} computed"
    if record.parts > 1:
        return f"{record.parts} prompts"
    return "+".join(str(b - a) for a, b in zip(record.slices, record.slices[1:], strict=False))


def _short(text: str) -> Text:
    return Text(printable(" ".join(text.split())[:WORDS_CHARS]))


def kvr_command(program: str | None = None) -> str:
    """Return the command for ``kvr``: its name, or its path if the name resolves to another program."""
    beside = Path(program or sys.argv[0]).with_name("kvr")
    found = shutil.which("kvr")
    is_found = found is not None and os.path.realpath(found) == os.path.realpath(beside)
    # The user typed a relative path; an absolute one may have been found in PATH.
    if not beside.is_file() or (beside.is_absolute() and is_found):
        return "kvr"
    return shlex.quote(str(beside))


def print_summary(summary: Summary, rows: Iterable[Record], result: Path, *, by_inspect: bool = False) -> None:
    """Print the results of documents, `rows` of them in a table (see `rows_of`), and the commands that show more.

    `by_inspect` leaves out the hint to ``kvr inspect``, which then prints this.
    """
    console = open_console(max(100, shutil.get_terminal_size((140, 24)).columns))
    rows = list(rows)
    is_checked = any(record.unsupported_count is not None for record in rows)
    heads = ("tokens", "seen", "slices", "first\ntoken", "prefill\ntokens/s")
    table = documents_table((*heads, "unsup-\nported") if is_checked else heads)
    table.add_column("answer", no_wrap=True, overflow="ellipsis", ratio=1)
    example, example_is_done = "", False  # id for the hint, preferably of an answered document
    caches: dict[str, None] = {}
    for record in rows:
        caches |= {record.cache: None} if record.cache else {}
        is_better = not example or (record.status == "done" and not example_is_done)
        if is_better and record.id.isprintable() and not record.id.startswith("-"):
            example, example_is_done = record.id, record.status == "done"
        _add_row(table, record, is_checked=is_checked)
    console.print(table)
    lines = [f"... and {summary.documents - table.row_count:,} more"] if summary.documents > table.row_count else []
    if summary.failed:
        lines += ["\nerrors:", *(f"  {line}" for line in reason_lines(summary.reasons))]
    lines += [f"\nanswers by a {cache}" for cache in caches]
    kvr, where = kvr_command(), shlex.quote(str(result))
    hints = [f"{kvr} inspect {where}", f"{kvr} export {where} --format jsonl"]
    if summary.failed:
        hints.insert(1, f"{kvr} inspect {where} --errors")
    if example:
        hints.insert(1, f"{kvr} inspect {where} {shlex.quote(example)}")
    hints = hints[by_inspect:]
    lines += [
        f"\n{summary.done:,} done, {summary.failed:,} failed. Results: {result}",
        *(f"{'' if number else 'See the results:':<16}  {hint}" for number, hint in enumerate(hints)),
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, emoji=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under column headers, the first column left-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if 0 < number < len(columns) - 1 else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_short(str(each)) for each in row))
    open_console(1000).print(table)


def open_console(width: int) -> Console:
    """Return a console on standard output."""
    # Open MPI gives its ranks a terminal even if the output goes to a file, so never use colors.
    return Console(file=sys.stdout, width=width, highlight=False, force_terminal=False)


def documents_table(numbers: Sequence[str]) -> Table:
    """Return a table with columns for a document's id and some numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("document", no_wrap=True, overflow="ellipsis", min_width=12, max_width=32)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, name.split("\n"))))
    return table


def _add_row(table: Table, record: Record, *, is_checked: bool) -> None:
    if record.status == "error":
        table.add_row(_short(record.id), *(5 + is_checked) * [""], _short(f"error: {record.error}"))
        return
    unsupported = "" if record.unsupported_count is None else str(record.unsupported_count)
    table.add_row(
        _short(record.id),
        f"{record.prompt_tokens:,}",
        f"{100 * record.coverage:.0f}%",
        _how_computed(record),
        "" if record.parts > 1 else f"{record.ttft_s:.2f} s",
        f"{record.prefill_tokens_per_s:,.0f}",
        *([unsupported] if is_checked else []),
        _short(record.marked or record.shown),
    )
