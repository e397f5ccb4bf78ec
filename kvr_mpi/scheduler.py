"""Batch systems: the variables from which a job learns its id, its restarts, its end and its number in an array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Unix time at which the job must end, for job scripts to set; it overrides the batch system's own variable.
END_TIME = "KVR_END_TIME"


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Names of the variables that a batch system sets in a job; "" if it has none.

    job : all of these are set in every job, and together identify it.
    task : its number in an array; `first` is the lowest one that arrays have by convention.
    restarts : how often it was requeued, as a number, or "Y" if it was.
    end : Unix time at which it must end.
    """

    name: str
    job: tuple[str, ...]
    task: str
    first: int = 0
    cluster: str = ""
    restarts: str = ""
    end: str = ""


SCHEDULERS = (
    Scheduler(
        "SLURM",
        ("SLURM_JOB_ID",),
        "SLURM_ARRAY_TASK_ID",
        cluster="SLURM_CLUSTER_NAME",
        restarts="SLURM_RESTART_COUNT",
        end="SLURM_JOB_END_TIME",
    ),
    Scheduler("PBS", ("PBS_JOBID",), "PBS_ARRAY_INDEX"),
    # The tasks of an array have one id; outside an array, the index is 0.
    Scheduler("LSF", ("LSB_JOBID", "LSB_JOBINDEX"), "LSB_JOBINDEX", first=1, restarts="LSB_RESTART"),
    Scheduler("Flux", ("FLUX_JOB_ID",), "FLUX_JOB_CC"),
    # Outside an array, the task's id is "undefined".
    Scheduler("Grid Engine", ("JOB_ID", "SGE_TASK_ID"), "SGE_TASK_ID", first=1, restarts="RESTARTED"),
)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job of a batch system.

    task : number of this task in its array, starting at 0; None outside an array.
    """

    scheduler: str
    job: str
    restarts: int
    task: int | None


def batch_job(environ: Mapping[str, str]) -> BatchJob | None:
    """Return the job of the batch system whose variables are set; None outside a job."""
    found = next((one for one in SCHEDULERS if all(environ.get(name) for name in one.job)), None)
    if found is None:
        return None
    job = ".".join(environ[name] for name in found.job)
    cluster = environ.get(found.cluster, "")
    task = _number(environ, found.task)
    return BatchJob(
        scheduler=found.name,
        job=f"{job}@{cluster}" if cluster else job,
        restarts=int(environ.get(found.restarts) == "Y") or _number(environ, found.restarts) or 0,
        task=None if task is None or task < found.first else task - found.first,
    )


def end_time(environ: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the Unix time at which this job must end, and the variable that says so; None without one."""
    names = (END_TIME, *(one.end for one in SCHEDULERS if one.end))
    name = next((name for name in names if environ.get(name)), "")
    return _number(environ, name), name


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None
