"""How a job is run, for the command line and for Python; imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvr_mpi.setup.job_setup import Machine
    from kvr_mpi.store.lock import Owner


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run a job, as described in the help of ``kvr run``.

    resume, extend : go on from results in the folder, of the same documents, or of others, too.
    time_limit : minutes, h:mm:ss or d-hh from now, as in sbatch; None: the end of the SLURM job, if it is one.
    level : quiet: of the log, only warnings, errors and the last line; verbose: also what a developer needs.
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


@dataclass(frozen=True, slots=True)
class Environment:
    """Properties of the machine and the batch system.

    owner : this process, as others see who holds an output folder.
    deadline_s : Unix time at which the job is ended; None: never.
    """

    machine: Machine
    owner: Owner
    deadline_s: float | None = None
