"""``kvr sbatch JOB.toml``: the shipped job script, filled in from the plan, printed, tried or submitted."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from kvr_mpi.cli.allocation import Allocation, allocation_of, node_options
from kvr_mpi.cli.batch_script import fill_in
from kvr_mpi.cli.options import (
    check_fresh_or_resumed,
    command,
    extend_option,
    job_argument,
    overwrite_option,
    resume_option,
    set_option,
)
from kvr_mpi.duration import duration_text, parse_duration
from kvr_mpi.errors import counted

SCRIPT, ARRAY_SCRIPT, GATHER_SCRIPT = "kvr_prefill.sh", "kvr_array.sh", "kvr_gather.sh"
# Options of sbatch that an array shares with the job that gathers its results.
GATHER_TOO = ("account", "partition", "qos", "reservation", "mail-type", "mail-user", "clusters")
# sbatch's words for a job without a time limit.
NO_LIMIT = ("0", "-1", "INFINITE", "UNLIMITED")
# A forecast is off by this much; starting, and loading a model from a network file system, take time, too. A job that
# runs into its limit all the same goes on where it was.
MARGIN, START_S = 1.5, 600.0


@command()
@job_argument
@set_option
@click.option(
    "--ranks",
    type=click.IntRange(1),
    required=True,
    help="Number of ranks: one per GPU, or one per few cores.",
)
@node_options
@click.option(
    "--time", "limit", metavar="TIME", help="Time limit, in a format that sbatch accepts.  [default: from the forecast]"
)
@click.option("--hardware", metavar="NAME_OR_FILE", help="Speed of a rank, as for kvr plan.")
@resume_option
@extend_option
@overwrite_option
@click.option(
    "--array",
    type=click.IntRange(2),
    metavar="N",
    help="Split the corpus into N shares, each a job of --ranks ranks with its results in OUTPUT/share-I-of-N.",
)
@click.option(
    "--at-once", type=click.IntRange(1), metavar="K", help="Maximum number of shares that run at the same time."
)
@click.option(
    "--gather/--no-gather",
    default=True,
    help="After an array, however its tasks ended (afterany), merge all shares into OUTPUT/all.h5, verifying every "
    "checksum, and report what is missing.  [default: gather]",
)
@click.option(
    "--sbatch",
    "options",
    multiple=True,
    metavar="--OPTION=VALUE",
    help="An option passed on to sbatch; may be repeated. Account: --sbatch=--account=PROJECT. Partition: "
    "--sbatch=--partition=gpu. Mail at the end: --sbatch=--mail-type=END,FAIL --sbatch=--mail-user=YOU@SITE. After "
    "another job, however that ended: --sbatch=--dependency=afterany:JOB (afterok: only if its exit code was 0).",
)
@click.option("--print", "show", is_flag=True, help="Print the script and exit.")
@click.option("--test-only", is_flag=True, help="Ask SLURM when the job would start; do not submit it.")
def sbatch(
    job: Path,
    settings: tuple[str, ...],
    ranks: int,
    ranks_per_node: int | None,
    gpus_per_node: int | None,
    cpus_per_rank: int | None,
    limit: str | None,
    hardware: str | None,
    resume: bool,
    extend: bool,
    overwrite: bool,
    array: int | None,
    at_once: int | None,
    gather: bool,
    options: tuple[str, ...],
    show: bool,
    test_only: bool,
) -> int:
    """Submit JOB to SLURM: slurm/kvr_prefill.sh with nodes, ranks and time limit filled in from the plan.

    \b
    kvr sbatch jobs/summarize.toml --ranks 16 --hardware h200 --print
    kvr sbatch jobs/summarize.toml --ranks 16 --time 8:00:00 --sbatch=--partition=gpu
    kvr sbatch jobs/summarize.toml --ranks 4 --hardware h200 --array 100 --at-once 20

    The expected cost in node, GPU and core hours is printed first.
    """  # noqa: D301
    if show and test_only:
        raise click.UsageError("--print and --test-only exclude each other: give only one")
    check_fresh_or_resumed(overwrite=overwrite, resume=resume or extend)
    if extend and array is not None:
        raise click.UsageError("--extend cannot be combined with --array: other documents would be in each share")
    if at_once is not None and array is None:
        raise click.UsageError("--at-once needs --array N")
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.job import load_job

    spec, _ = load_job(job, settings)
    if array is not None and (spec.documents.shard is not None or spec.questions is not None):
        what = "documents.shard" if spec.questions is None else "[questions]"
        raise ConfigError(f"--array splits the corpus into shares itself: remove {what} from the job")
    chosen = _chosen(options)
    nodes = allocation_of(spec, ranks, ranks_per_node, gpus_per_node, cpus_per_rank, hardware)
    wanted: dict[str, str | int | None] = {
        "job-name": f"kvr-{re.sub('[^A-Za-z0-9._-]', '_', job.stem)}",
        "chdir": str(Path.cwd()),
        "nodes": nodes.nodes,
        "ntasks-per-node": nodes.ranks // nodes.nodes,
        "gpus-per-node": nodes.gpus // nodes.nodes,
        "cpus-per-task": cpus_per_rank or spec.parallel.threads,
        "time": limit or _time_limit(job, settings, hardware, array, nodes),
        "array": _array(array, at_once),
        **chosen,
    }
    if array is not None and "output" not in chosen:
        wanted["output"] = "%x-%A_%a.out"
    arguments = [str(job), *(word for setting in settings for word in ("--set", setting))]
    arguments += ["--resume"] * resume + ["--extend"] * extend + ["--overwrite"] * overwrite
    script = _script(SCRIPT if array is None else ARRAY_SCRIPT, wanted, arguments)
    gather_script = None
    if array is not None and gather:
        own = {"job-name": f"{wanted['job-name']}-gather", "chdir": str(Path.cwd())}
        shared = {key: value for key, value in chosen.items() if key in GATHER_TOO}
        gather_script = _script(GATHER_SCRIPT, {**own, **shared}, [spec.output.path, str(array)])
    limit_text = str(wanted["time"]).strip()
    if limit_text.upper() not in NO_LIMIT:
        limit_s = parse_duration(limit_text)
        most = nodes.hours(limit_s * (array or 1))
        click.echo(
            f"at most {most}: the time limit of {duration_text(limit_s)} on {counted(nodes.nodes, 'node')}"
            f"{f' for each of {array} shares' if array else ''}",
            err=True,
        )
    if show:
        click.echo(script, nl=False)
        if gather_script is not None:
            click.echo(f"# Then, submitted with --dependency=afterany:JOB:\n{gather_script}", nl=False)
        return 0
    if array is None or test_only:
        return _submit(script, test_only)
    return _submit_array(script, gather_script)


def scripts_folder() -> Path:
    """Find the job scripts.

    Raises
    ------
    ConfigError
        If they are nowhere.
    """
    from kvr_mpi.cli.shipped import find_shipped

    return find_shipped("slurm", SCRIPT).parent


def _chosen(options: Sequence[str]) -> dict[str, str]:
    """Read what sbatch is to be told beside what is filled in."""
    from kvr_mpi.errors import ConfigError

    chosen = {}
    for option in options:
        key, _, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not key:
            raise ConfigError(
                f"--sbatch {option!r}: expected one of sbatch's long options, such as --sbatch=--partition=gpu"
            )
        if key == "array":
            raise ConfigError(
                f"--sbatch {option!r}: every task would process the whole corpus; use --array N to split it into shares"
            )
        chosen[key] = value
    return chosen


def _array(array: int | None, at_once: int | None) -> str | None:
    if array is None:
        return None
    return f"0-{array - 1}" + ("" if at_once is None else f"%{at_once}")


def _script(name: str, wanted: Mapping[str, str | int | None], arguments: Sequence[str]) -> str:
    """Fill in one of the shipped scripts; what is 0 or None is left as the script has it."""
    folder = scripts_folder()
    options = {key: str(value) for key, value in wanted.items() if value or value == ""}
    return fill_in((folder / name).read_text(), options, arguments, folder)


def _time_limit(
    job: Path, settings: tuple[str, ...], hardware: str | None, array: int | None, nodes: Allocation
) -> str:
    """Forecast the job as it is written, or the longest of its shares, and leave a margin."""
    from kvr_mpi.cli.plan import read_and_plan
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.setup.planning import plan_shares

    made = read_and_plan(job, settings, nodes.ranks, hardware)
    shares = [made] if array is None else plan_shares(made, array)
    times = [share.written_s for share in shares]
    known = [seconds for seconds in times if seconds is not None]
    if len(known) < len(times):
        raise ConfigError(
            f"parallel.ranks_per_chain = {made.spec.parallel.ranks_per_chain!r} on {nodes.ranks} ranks: a "
            f"document does not fit, or the ranks cannot be divided into such chains; kvr plan shows why. 'auto' plans "
            f"a chain for each document"
        )
    minutes = math.ceil((MARGIN * max(known) + START_S) / 60)
    longest = "" if array is None else f" for the longest of {array} shares"
    click.echo(
        f"predicted {duration_text(max(known))}{longest}, by {made.forecast.source}; requesting {minutes} min", err=True
    )
    click.echo(f"predicted cost: {nodes.hours(sum(known))}, plus the time to start", err=True)
    return str(minutes)


def _submit(script: str, test_only: bool) -> int:
    return _call(script, ["--test-only"] * test_only).returncode


def _submit_array(script: str, gather: str | None) -> int:
    """Submit an array, and what puts its shares together when it is over."""
    done = _call(script, ["--parsable"], captures=True)
    array = done.stdout.strip().partition(";")[0]
    if done.returncode or not array:
        return done.returncode or 1
    click.echo(f"Submitted batch job {array}")
    if gather is None:
        return 0
    after = [f"--dependency=afterany:{array}"]
    done = _call(gather, ["--parsable", *after], captures=True)
    if done.returncode:
        click.echo(
            f"kvr sbatch: the array {array} was submitted, but the job that gathers its shares was not; when the array "
            f"has finished, run: kvr merge OUTPUT -o all.h5",
            err=True,
        )
        return done.returncode
    click.echo(f"Submitted batch job {done.stdout.strip().partition(';')[0]}, to gather the shares")
    return 0


def _call(script: str, options: Sequence[str], *, captures: bool = False) -> subprocess.CompletedProcess[str]:
    """Hand a script to sbatch; its complaints go to the user."""
    from kvr_mpi.errors import ConfigError

    try:
        return subprocess.run(
            ["sbatch", *options], input=script, text=True, check=False, stdout=subprocess.PIPE if captures else None
        )
    except FileNotFoundError as error:
        raise ConfigError(
            "sbatch: command not found; run this on a login node of the cluster, or use --print to see the script"
        ) from error
