"""Progress of a job's documents: a bar on a terminal, whole lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

import rich.progress
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvr_mpi.report.log import Log
from kvr_mpi.store.outputs import Record

# Least time between two lines of one rank that tell of documents.
LINE_S = 1.0


class Progress:
    """Tell what is done, what is left, and for how long.

    The time left is by work, in characters of text or any other unit, so that long documents count for more than
    short ones.

    Parameters
    ----------
    log : Log
    documents, work : int
        Documents of the whole job, and their work.
    deadline_s : float or None
        Unix time at which the batch system ends the job.
    silent : bool
        Tell nothing.
    bar : bool
        Draw a bar; else write lines: one for a document, but not more than one in `LINE_S`, except for errors.
    """

    def __init__(
        self,
        log: Log,
        documents: int,
        work: int,
        *,
        deadline_s: float | None = None,
        bar: bool = False,
        silent: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log, self._documents, self._work = log, documents, work
        self._deadline_s, self._clock = deadline_s, clock
        self._began = clock()
        self._told, self._silent = 0.0, silent
        self._bar: rich.progress.Progress | None = None
        if bar:
            self._bar = rich.progress.Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("documents", total=documents)

    def __enter__(self) -> Progress:
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

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first document began."""
        return self._clock() - self._began

    def document(self, record: Record, done: int, work: int) -> None:
        """Tell of a document.

        Parameters
        ----------
        done, work : int
            Documents of the whole job that are done with it, and their work.
        """
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=record.id[:40])
            if record.status == "error":
                self._bar.console.print(f"{record.id}: {record.error}", markup=False)
            return
        if self._silent:
            return
        now = self._clock()
        if record.status == "error":
            what = f"error: {record.error}"
        elif now - self._told < LINE_S and done < self._documents:
            return
        else:
            self._told = now
            what = (
                f"{record.prompt_tokens} tokens, first token {record.ttft_s:.2f} s, "
                f"{record.new_tokens} written in {record.decode_s:.2f} s"
            )
        self._log.line(f"{done}/{self._documents} {record.id}: {what} | {self._left(done, work)}")

    def prefilled(self, name: str, tokens: int, seconds: float) -> None:
        """Tell of a prompt that waits for its answer: many are answered together, so it may be long until then."""
        now = self._clock()
        if self._bar is None and not self._silent and now - self._told >= LINE_S:
            self._told = now
            self._log.line(f"prefilled {name}: {tokens} tokens in {seconds:.2f} s | {self._times()}")

    def _left(self, done: int, work: int) -> str:
        left = "done" if done >= self._documents else "left unknown"
        if done < self._documents and work:
            left = f"left {clock_time(self.elapsed_s * (self._work - work) / work)}"
        return self._times(f", {left}")

    def _times(self, left: str = "") -> str:
        text = f"elapsed {clock_time(self.elapsed_s)}{left}"
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
