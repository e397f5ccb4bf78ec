"""Progress of one chain's documents: a bar on a terminal, whole lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvr_mpi.report.log import Log
from kvr_mpi.store.outputs import Record


class ProgressReport:
    """Tell what is done, what is left, and for how long.

    The time left is by work, in characters of text or any other unit, so that long documents count for more than
    short ones.

    Parameters
    ----------
    log : Log
    documents, work : int
        Documents to be told of, and the work of all this rank takes part in.
    deadline_s : float or None
        Unix time at which the batch system ends the job.
    bar : bool
        Draw a bar; else write a line for every document.
    """

    def __init__(
        self,
        log: Log,
        documents: int,
        work: int,
        *,
        deadline_s: float | None = None,
        bar: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log, self._documents, self._work = log, documents, work
        self._deadline_s, self._clock = deadline_s, clock
        self._began = clock()
        self._done = self._done_work = 0
        self._bar: Progress | None = None
        if bar:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("documents", total=documents)

    def __enter__(self) -> ProgressReport:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def passed(self, work: int) -> None:
        """Count work on a document that another rank tells of."""
        self._done_work += work

    def document(self, record: Record, work: int) -> None:
        """Count a document as done, and tell of it."""
        self._done += 1
        self._done_work += work
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=record.id[:40])
            if record.status == "error":
                self._bar.console.print(f"{record.id}: {record.error}", markup=False)
            return
        if record.status == "error":
            what = f"error: {record.error}"
        else:
            what = (
                f"{record.prompt_tokens} tokens, first token {record.ttft_s:.2f} s, "
                f"{record.new_tokens} written in {record.decode_s:.2f} s"
            )
        self._log.line(f"{self._done}/{self._documents} {record.id}: {what} | {self._left()}")

    def _left(self) -> str:
        elapsed = self._clock() - self._began
        work_left = self._work - self._done_work
        left = "done" if self._done >= self._documents else "left unknown"
        if self._done < self._documents and self._done_work:
            left = f"left {clock_time(elapsed * work_left / self._done_work)}"
        text = f"elapsed {clock_time(elapsed)}, {left}"
        if self._deadline_s is not None:
            text += f", wall time left {clock_time(self._deadline_s - self._clock())}"
        return text


def wants_bar(choice: str, launched: bool) -> bool:
    """Whether to draw a bar: asked for, or ``auto`` on a terminal of our own, not one that a launcher gave us."""
    if choice == "auto":
        return sys.stderr.isatty() and not launched
    return choice == "bar"


def clock_time(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
