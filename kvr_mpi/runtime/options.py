"""Options of a run, for the command line and the Python API; imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a job, as described in the help of ``kvr run``.

    resume, extend : continue from the results in the folder; `extend` also accepts documents that are new.
    time_limit : minutes, h:mm:ss or d-hh from now, as in sbatch; None: the end of the batch job, if it is known.
    level : quiet: log only warnings, errors and the last line; verbose: also log details for developers.
    bar : show progress as a bar on the terminal.
    """

    overwrite: bool = False
    resume: bool = False
    extend: bool = False
    retry_failed: bool = False
    time_limit: str | None = None
    level: Literal["quiet", "normal", "verbose"] = "normal"
    bar: bool = False

    @property
    def mode(self) -> Literal["new", "overwrite", "resume", "extend"]:
        """How existing results in the output folder are treated."""
        if self.overwrite:
            return "overwrite"
        return "extend" if self.extend else "resume" if self.resume else "new"
