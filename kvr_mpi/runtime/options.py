"""Options of a run, for the command line and the Python API; imports nothing slow."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a job, as described in the help of ``kvr run``.

    overwrite : delete existing results; otherwise documents that have not changed since are not answered again.
    resume : never delete results, not even if this job began the run with `overwrite`.
    time_limit : minutes, h:mm:ss or d-hh from now, as in sbatch; None: the end of the batch job, if it is known.
    table : print a table of the documents at the end.
    """

    overwrite: bool = False
    resume: bool = False
    retry_failed: bool = False
    time_limit: str | None = None
    table: bool = True
    began_s: float = field(default_factory=time.monotonic)
