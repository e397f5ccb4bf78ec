"""Options of a run, for the command line and the Python API; imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a job, as described in the help of ``kvr run``.

    overwrite : delete existing results; otherwise documents that have not changed since are not answered again.
    resume : never delete results, not even if this job began the run with `overwrite`.
    time_limit : minutes, h:mm:ss or d-hh from now, as in sbatch; None: the end of the batch job, if it is known.
    level : quiet: log only warnings, errors and the last line; verbose: also log details for developers.
    bar : show progress as a bar on the terminal.
    """

    overwrite: bool = False
    resume: bool = False
    retry_failed: bool = False
    time_limit: str | None = None
    level: Literal["quiet", "normal", "verbose"] = "normal"
    bar: bool = False
