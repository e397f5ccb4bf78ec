"""What a job is at, for other programs: ``progress.json``, ``metrics.prom`` and, at its end, ``metrics.json``.

``metrics.prom`` is in Prometheus' text format, for the node exporter's textfile collector. Every file is replaced as a
whole; what cannot be written is said once, and the job goes on without.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvr_mpi.disk import replacing
from kvr_mpi.store.traces import METRICS_FILE, PROGRESS_FILE, PROMETHEUS_FILE

# Least time between two writes.
EVERY_S = 5.0
PREFIX = "kvr_"
HELP = {
    "documents": "documents that this job has to process",
    "documents_done": "documents finished since this job began, including those with error records",
    "tokens_done": "tokens computed for prompts and answers of documents finished since this job began",
    "work_done_share": "fraction of the job's work that is done, by length of the documents",
    "work_prefilled_share": "fraction of the job's work that is prefilled",
    "elapsed_s": "seconds since the first document was started",
    "left_s": "forecast of the remaining seconds",
    "wall_time_left_s": "seconds until the batch system ends the job",
    "written_at_s": "Unix time when this was written",
}


class ProgressFiles:
    """Keeps the files of a job at work; on one rank.

    Parameters
    ----------
    folder : Path
        Of the run.
    say : callable
        For a line of text.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._folder, self._say, self._clock = folder, say, clock
        self._written_s = float("-inf")
        self._has_failed = False

    def write(self, values: Mapping[str, float | None], *, at_once: bool = False) -> None:
        """Write values, by the names of `HELP`, unless that was done a moment ago; None: not known."""
        now = self._clock()
        if self._has_failed or (now - self._written_s < EVERY_S and not at_once):
            return
        self._written_s = now
        found = {**values, "written_at_s": round(now, 3)}
        try:
            _replace(self._folder / PROGRESS_FILE, json.dumps(found, indent=1) + "\n")
            _replace(self._folder / PROMETHEUS_FILE, as_prometheus(found))
        except OSError as error:
            self._has_failed = True
            self._say(f"warning: {PROGRESS_FILE} can no longer be written: {error.strerror or error}")


def as_prometheus(values: Mapping[str, float | None]) -> str:
    """Write values in Prometheus' text format; what is not known is left out."""
    lines = []
    for name, value in values.items():
        if value is not None:
            full = PREFIX + (name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name)
            lines += [f"# HELP {full} {HELP[name]}", f"# TYPE {full} gauge", f"{full} {value}"]
    return "\n".join(lines) + "\n"


def write_metrics(
    folder: Path, ranks: Sequence[Mapping[str, Any]], documents: int, seconds: float, say: Callable[[str], None]
) -> None:
    """Write what a job did in the end: in all, and each rank's sums (`Tally`)."""
    found = {"documents": documents, "seconds": round(seconds, 3), "ranks": list(ranks)}
    try:
        _replace(folder / METRICS_FILE, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        say(f"warning: {METRICS_FILE} cannot be written: {error.strerror or error}")


def _replace(path: Path, text: str) -> None:
    with replacing(path) as stream:
        stream.write(text.encode())
