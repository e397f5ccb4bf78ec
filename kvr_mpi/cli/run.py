"""``kvr-run JOB.toml``: runs a job under mpirun, srun, or alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvr_mpi.cli.options import (
    check_fresh_or_resumed,
    command,
    grouped,
    job_argument,
    overwrite_option,
    resume_option,
    set_option,
)
from kvr_mpi.duration import duration_text, parse_duration
from kvr_mpi.errors import counted
from kvr_mpi.runtime.options import RunOptions

if TYPE_CHECKING:
    from kvr_mpi.job import JobSpec
    from kvr_mpi.transport import Transport


LoadJob = Callable[[Sequence[str]], "tuple[JobSpec, dict[str, str]]"]


# Options of all commands that run a job.
run_options = grouped(
    set_option,
    overwrite_option,
    resume_option,
    click.option("--retry-failed", is_flag=True, help="When resuming, retry documents with error records."),
    click.option(
        "--time-limit",
        metavar="TIME",
        help="Skip documents that cannot finish within this time: 90m, 2h30m, or as for sbatch.  [default: the end "
        "of the batch job, if its variables or KVR_END_TIME are set]",
    ),
    click.option("--show-config", is_flag=True, help="Print every setting and its origin, then exit."),
    click.option("--quiet", is_flag=True, help="Log only warnings, errors and the final line."),
    click.option("--verbose", is_flag=True, help="Also log kernels, rates and versions."),
)


@command()
@job_argument
@run_options
def run(**given: Any) -> int:
    """Run the job file JOB: process every document and store the answers.

    \b
    mpirun -n 8 kvr-run jobs/summarize.toml --set documents.path=corpus/
    srun --mpi=pmi2 kvr-run jobs/summarize.toml --resume
    mpirun -n 8 kvr-run requests.jsonl --set model.path=/models/mine

    JOB can also be a file of requests in OpenAI's batch format; its responses are in runs/NAME/responses.jsonl.

    Exit codes: 0 done; 65 done, but more documents have error records than output.max_failed allows (default: 0); 75
    stopped early: the same command with --resume continues; 69 the ranks cannot communicate; 78 invalid job or
    output folder; 2 wrong arguments; 1 a bug. The last log line explains the exit code.
    """  # noqa: D301
    from kvr_mpi.job import load_job

    job: Path = given.pop("job")
    return run_with_options(str(job), given, lambda settings: load_job(job, settings))


def run_with_options(name: str, given: dict[str, Any], load: LoadJob) -> int:
    """Run a job on all ranks that were started.

    Parameters
    ----------
    name : str
        Of the job, for a log line.
    given : dict
        Values of `run_options`, by name.
    load : callable
        Takes settings; returns the job and the origin of each of its settings. Called on one rank.
    """
    shows_config, settings = given.pop("show_config"), given.pop("settings")
    from kvr_mpi.cli.environment import configure_libraries
    from kvr_mpi.cli.launch import run_guarded
    from kvr_mpi.cli.log_lines import Level, quiet_libraries, show_log
    from kvr_mpi.errors import KvrError
    from kvr_mpi.logs import RankLogger
    from kvr_mpi.transport.mpi import connect

    quiet, verbose = given.pop("quiet"), given.pop("verbose")
    if quiet and verbose:
        raise click.UsageError("--quiet and --verbose cannot be combined: give only one")
    level: Level = "quiet" if quiet else "verbose" if verbose else "normal"
    options = RunOptions(**given, table=not quiet)
    check_fresh_or_resumed(overwrite=options.overwrite, resume=options.resume)
    configure_libraries()
    try:
        world = connect()
    except KvrError as error:
        show_log(level)
        RankLogger().error(str(error))
        RankLogger().end(error.exit_code)
        return error.exit_code

    def work() -> int:
        libraries = partial(quiet_libraries, world.rank)
        return run_on(world, name, options, lambda: load(settings), shows_config, libraries)

    return run_guarded(world, work, level)


def run_on(
    world: Transport,
    name: str,
    options: RunOptions,
    load: Callable[[], tuple[JobSpec, dict[str, str]]],
    shows_config: bool = False,
    on_import: Callable[[], None] = lambda: None,
) -> int:
    """Run a job on these ranks and return the exit code; all ranks call this.

    name, options, load, shows_config : as for `run_with_options`.
    on_import : called once torch and transformers are imported.
    """
    from kvr_mpi.cli.environment import is_offline, read_environment, read_owner
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.job import JobSpec, show_job
    from kvr_mpi.job.inputs import identity_of
    from kvr_mpi.logs import RankLogger
    from kvr_mpi.runtime.checks import check_job
    from kvr_mpi.scheduler import end_time
    from kvr_mpi.store.lock import check_unused
    from kvr_mpi.store.parts import shares_beside
    from kvr_mpi.store.run import check_settings, is_of_job, last_header
    from kvr_mpi.transport import on_root, share_json

    def load_here() -> str:
        spec, sources = load()
        if spec.questions is not None:
            from kvr_mpi.runtime.asking import complete_questions

            spec = complete_questions(spec)
        if (spec.documents.shard or "").startswith("task/"):
            raise ConfigError(
                f"documents.shard = {spec.documents.shard!r}, but this is not a task of an array: submit the job "
                "as an array, or give a number, such as '0/8'"
            )
        if shows_config:
            rows = show_job(spec, sources)
            width = max(len(key) for key, _, _ in rows)
            for key, value, source in rows:
                click.echo(f"{key:{width}} = {value}  # {source}")
        return spec.model_dump_json()

    # Only one rank reads the job, so that all ranks run the same job even if the file changes meanwhile.
    spec: JobSpec = JobSpec.model_validate_json(share_json(world, on_root(world, load_here)))
    if shows_config:
        return 0

    def is_requeued() -> bool:
        """Whether this is a requeued job that has already deleted the earlier results."""
        owner = read_owner()
        return owner.restart > 0 and is_of_job(Path(spec.output.path), owner.job)

    overwrite = bool(share_json(world, on_root(world, lambda: options.overwrite and not is_requeued())))

    def date_here() -> str:
        """Return the date for chat templates: the one with which the run began, or another share of it."""
        folder = Path(spec.output.path)
        runs = () if overwrite else (folder, *shares_beside(folder))
        header = next(filter(None, map(last_header, runs)), None)
        known = None if header is None else header.identity.get("date")
        return spec.prompt.date or known or datetime.now().date().isoformat()

    date = share_json(world, on_root(world, date_here))
    spec = spec.model_copy(update={"prompt": spec.prompt.model_copy(update={"date": date})})
    limit_s = None if options.time_limit is None else time.time() + parse_duration(options.time_limit)

    def check_here() -> None:
        """Check on one rank what would otherwise stop the job only after the model is loaded."""
        check_unused(Path(spec.output.path))
        check_job(spec, world.size, offline=is_offline())
        if not overwrite:
            check_settings(Path(spec.output.path), identity_of(spec))

    on_root(world, check_here)
    logger = RankLogger(world.rank)
    logger.root.info(f"{name} is valid; starting {counted(world.size, 'rank')}, importing torch, reading documents")
    from kvr_mpi.cli.launch import importing

    with importing():  # imported only now: it takes seconds
        from kvr_mpi.runtime.batch import run_job

        on_import()
    machine = read_environment()
    # Launchers other than srun may pass variables to the ranks of the first host only.
    deadline_s, end_from = share_json(world, end_time(os.environ))
    if limit_s is not None:
        deadline_s = limit_s
    elif end_from and (deadline_s or 0) <= time.time():  # wrong: this job is still running
        what = (
            "not a Unix time" if deadline_s is None else f"in the past ({duration_text(time.time() - deadline_s)} ago)"
        )
        logger.root.warning(f"{end_from} is {what}: ignoring it")
        deadline_s = None
    options = replace(options, overwrite=overwrite)
    return run_job(spec, options, replace(machine, deadline_s=deadline_s), world, logger)
