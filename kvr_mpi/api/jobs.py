"""Run, plan and forecast jobs from Python, as the commands do, with return values instead of printed output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvr_mpi.api.ranks import ending_all, join_ranks, leave_bars_to_rank_0
from kvr_mpi.cli.environment import is_offline, read_environment
from kvr_mpi.cli.run import run_on
from kvr_mpi.errors import EXIT_OK, ConfigError
from kvr_mpi.job import JobSpec, load_job, make_job
from kvr_mpi.job.combinations import check_combinations
from kvr_mpi.runtime.options import RunOptions
from kvr_mpi.schedule.simulate import HARDWARE, ForecastRow, costs_on
from kvr_mpi.schedule.simulate import simulate as forecast
from kvr_mpi.store.results import Results, open_results
from kvr_mpi.transport import on_root, share_json
from kvr_mpi.transport.mpi import release

if TYPE_CHECKING:
    from kvr_mpi.runtime.prediction import PlannedJob

GIVEN = "the job given"  # name of a job without a file, in error messages

# A job: the path of its file, the contents of such a file, or a job that was already read.
Job = str | PathLike[str] | Mapping[str, Any] | JobSpec


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a job.

    exit_code : 0; 65 if more documents have error records than ``output.max_failed`` allows; 75 if it was stopped
        before the end, so that the same call with ``resume=True`` continues it.
    folder : its output folder.
    """

    exit_code: int
    folder: Path

    @property
    def is_complete(self) -> bool:
        """Whether every document is done, except for allowed failures."""
        return self.exit_code == EXIT_OK

    def open(self) -> Results:
        return open_results(self.folder)


def run(
    job: Job,
    *,
    settings: Sequence[str] = (),
    comm: Any = None,
    overwrite: bool = False,
    resume: bool = False,
    retry_failed: bool = False,
    time_limit: str | None = None,
) -> RunOutcome:
    """Run a job on the ranks of a communicator: prefill, answer and store every document. All ranks call this.

    What happens is logged to the logger ``kvr_mpi`` and those below it, which have no handlers: configure `logging` to
    see more than warnings. A rank that fails alone ends all ranks, since they would wait for it forever. Signals that
    stop the job are handled only if this is called in the main thread.

    Parameters
    ----------
    job : path, mapping or JobSpec
        A job file, or its contents: ``{"model": {"path": ...}, "documents": {"path": ...}, ...}``. Only rank 0's is
        used.
    settings : sequence of str
        ``section.key=value``, as for ``--set``.
    comm : mpi4py.MPI.Comm, optional
        Default: all ranks that ``mpirun`` or ``srun`` started; without a launcher this process alone.
    overwrite, resume, retry_failed : bool
        What to do with existing results in the output folder, as for ``kvr-run``.
    time_limit : str, optional
        Skip documents that cannot finish within this time: ``90m``, ``2h30m``, or as for sbatch.

    Raises
    ------
    KvrError
        On every rank, if the job cannot be run as written; one of them has the reason in its message.
    """
    if overwrite and resume:
        raise ConfigError("overwrite=True deletes what resume=True continues from: choose one")
    options = RunOptions(overwrite=overwrite, resume=resume, retry_failed=retry_failed, time_limit=time_limit)
    world = join_ranks(comm)
    with ending_all(world):
        text = share_json(world, on_root(world, lambda: read_job(job, settings).model_dump_json()))
        spec = JobSpec.model_validate_json(text)
        name, bars = str(job) if isinstance(job, str | PathLike) else GIVEN, partial(leave_bars_to_rank_0, world)
        code = run_on(world, name, options, lambda: (spec, {}), on_import=bars)
    if comm is not None:
        release(world)
    return RunOutcome(code, Path(spec.output.path))


def plan(job: Job, ranks: int, hardware: str | None = None, *, settings: Sequence[str] = ()) -> PlannedJob:
    """Plan a job for a number of ranks, without MPI or weights.

    Parameters
    ----------
    job, settings
        As for `run`.
    hardware : str, optional
        Speed of a rank: a hardware profile, a JSON file, or a lookup table or folder of them.

    Raises
    ------
    ConfigError
        If the job cannot be run as written, or the speed of a rank is unknown.
    """
    if ranks < 1:
        raise ConfigError(f"ranks = {ranks}: expected the number of ranks of the job, at least 1")
    from kvr_mpi.runtime.prediction import plan_job

    return plan_job(read_job(job, settings), read_environment(), ranks, hardware)


def simulate(
    model: str,
    hardware: str = HARDWARE,
    *,
    ranks: Sequence[int] = (1, 2, 4, 8),
    contexts: Sequence[int] = (8192, 32768, 131072),
    link_gigabytes_per_s: float | None = None,
) -> list[ForecastRow]:
    """Forecast the time to the first token for prompt lengths and numbers of ranks.

    Parameters
    ----------
    model : str
        A named shape (``Llama 3.1 8B``), a model's folder, .gguf file or hub id.
    hardware : str
        A profile or a JSON file.
    contexts : sequence of int
        Prompt lengths in tokens.
    link_gigabytes_per_s : float, optional
        Bandwidth of each link, one direction; default: the profile's.

    Raises
    ------
    ConfigError
        If a value is invalid, or there are more ranks than tokens.
    """
    for name, values in (("ranks", ranks), ("contexts", contexts)):
        if not values or min(values) < 1:
            raise ConfigError(f"{name} = {list(values)}: expected at least one number; all must be above 0")
    work, _, costs = costs_on(model, hardware, link_gigabytes_per_s, is_offline)
    return forecast(work, costs, contexts, ranks)


def read_job(job: Job, settings: Sequence[str] = ()) -> JobSpec:
    """Read a job.

    Raises
    ------
    ConfigError
        If it is not a valid job, has settings that cannot be combined, or `settings` are given for a `JobSpec`.
    """
    if isinstance(job, JobSpec):
        if settings:
            raise ConfigError(
                f"settings = {list(settings)} only apply to a job file; this job has already been read: "
                f"pass its path, or change the object"
            )
        check_combinations(job)  # it may have been changed since it was read
        return job
    if isinstance(job, Mapping):
        raw = {name: dict(table) if isinstance(table, Mapping) else table for name, table in job.items()}
        return make_job(raw, Path(GIVEN), settings)[0]
    return load_job(Path(job), settings)[0]
