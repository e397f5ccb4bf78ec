"""The table a job ends with."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvr_mpi.store.outputs import Record

MAX_ROWS = 40
WORDS_CHARS = 200


def printable(text: str, keep: str = "\n\t") -> str:
    """Text without what would steer a terminal."""
    return "".join(char for char in text if char.isprintable() or char in keep)


def _short(text: str) -> Text:
    return Text(printable(" ".join(text.split())[:WORDS_CHARS]))


def print_summary(records: Iterable[Record], result: Path) -> None:
    """Print what became of each document, and how to look into the result."""
    columns = shutil.get_terminal_size((140, 24)).columns
    # Open MPI gives its ranks a terminal of their own even where the output goes to a file: no colours, ever.
    console = Console(file=sys.stdout, width=max(100, columns), highlight=False, force_terminal=False)
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("document", no_wrap=True, overflow="ellipsis", min_width=12, max_width=32)
    for name in ("tokens", "slices", "first token", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("answer", no_wrap=True, overflow="ellipsis", ratio=1)
    done = errors = 0
    for record in records:
        done, errors = done + (record.status == "done"), errors + (record.status == "error")
        if done + errors > MAX_ROWS:
            continue
        if record.status == "error":
            table.add_row(_short(record.id), "", "", "", "", _short(f"error: {record.error}"))
            continue
        slices = "+".join(str(b - a) for a, b in zip(record.slices, record.slices[1:], strict=False))
        table.add_row(
            _short(record.id),
            str(record.prompt_tokens),
            slices if record.parts == 1 else f"{record.parts} prompts",
            f"{record.ttft_s:.2f} s",
            f"{record.prefill_tokens_per_s:.0f}",
            _short(record.answer),
        )
    console.print(table)
    if done + errors > MAX_ROWS:
        console.print(f"... and {done + errors - MAX_ROWS} more")
    for line in (
        f"\n{done} done, {errors} error(s). Results: {result}",
        f"Look into it:  kvr inspect {result}",
        f"               kvr inspect {result} DOCUMENT",
        f"               kvr export {result} --format jsonl",
    ):
        console.print(line, soft_wrap=True, markup=False, emoji=False)
