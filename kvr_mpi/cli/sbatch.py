"""``kvr sbatch JOB.toml``: the shipped job script, filled in from the plan, printed, tried or submitted."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvr_mpi.job import JobSpec

SCRIPT = "kvr_prefill.sh"
# A forecast is off by this much; starting, and loading a model from a network file system, take time, too. A job that
# runs into its limit all the same goes on where it was.
MARGIN, START_S = 1.5, 600.0
OPTION = re.compile("[a-z][a-z0-9-]*")
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class SbatchOptions:
    """What ``kvr sbatch`` was told; its help says more."""

    job: Path
    settings: tuple[str, ...]
    ranks: int
    ranks_per_node: int | None
    gpus_per_node: int | None
    cpus_per_rank: int | None
    limit: str | None
    hardware: str | None
    resume: bool
    overwrite: bool
    options: tuple[str, ...]
    show: bool
    test_only: bool


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a setting of the job.")
@click.option("--ranks", type=click.IntRange(1), required=True, help="Ranks of the job: one a GPU, or for a few cores.")
@click.option("--ranks-per-node", type=click.IntRange(1), help="Default: 4, or all if there are fewer.")
@click.option(
    "--gpus-per-node", type=click.IntRange(0), help="Default: one a rank, if the job or a profile asks for GPUs."
)
@click.option("--cpus-per-rank", type=click.IntRange(1), help="Default: parallel.threads, or what the site gives.")
@click.option("--time", "limit", metavar="TIME", help="Time limit as sbatch takes it; default: from the forecast.")
@click.option("--hardware", metavar="NAME_OR_FILE", help="How fast a rank is, as in kvr plan.")
@click.option("--resume", is_flag=True, help="Go on with the results that are in the output folder.")
@click.option("--overwrite", is_flag=True, help="Delete the results that are in the output folder.")
@click.option(
    "--sbatch", "options", multiple=True, metavar="--OPTION=VALUE", help="For sbatch: --sbatch=--partition=gpu"
)
@click.option("--print", "show", is_flag=True, help="Print the script and stop.")
@click.option("--test-only", is_flag=True, help="Ask SLURM when it would run; submit nothing.")
def sbatch(**given: Any) -> int:
    """Submit JOB with nodes, ranks and time filled into slurm/kvr_prefill.sh from the plan.

    \b
    kvr sbatch jobs/summarize.toml --ranks 16 --hardware h200 --print
    kvr sbatch jobs/summarize.toml --ranks 16 --time 8:00:00 --sbatch=--partition=gpu
    """  # noqa: D301
    options = SbatchOptions(**given)
    if options.show and options.test_only:
        raise click.UsageError("--print asks SLURM nothing, --test-only prints no script: choose one")
    if options.resume and options.overwrite:
        raise click.UsageError("--overwrite deletes what --resume would go on with: choose one")
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.job import load_job

    spec, _ = load_job(options.job, options.settings)
    per_node = options.ranks_per_node or min(4, options.ranks)
    if options.ranks % per_node:
        raise ConfigError(f"--ranks {options.ranks} --ranks-per-node {per_node}: expected as many ranks on every node")
    wanted: dict[str, str | int | None] = {
        "job-name": f"kvr-{re.sub('[^A-Za-z0-9._-]', '_', options.job.stem)}",
        "chdir": str(Path.cwd()),
        "nodes": options.ranks // per_node,
        "ntasks-per-node": per_node,
        "gpus-per-node": _gpus(spec, per_node, options.hardware)
        if options.gpus_per_node is None
        else options.gpus_per_node,
        "cpus-per-task": options.cpus_per_rank or spec.parallel.threads,
        "time": options.limit or _time_limit(options.job, options.settings, options.ranks, options.hardware),
    }
    for option in options.options:
        key, _, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not key:
            raise ConfigError(
                f"--sbatch {option!r}: expected one of sbatch's long options, such as --sbatch=--partition=gpu"
            )
        wanted[key] = value
    arguments = [str(options.job), *(word for setting in options.settings for word in ("--set", setting))]
    arguments += ["--resume"] * options.resume + ["--overwrite"] * options.overwrite
    folder = scripts_folder()
    script = fill_in(
        (folder / SCRIPT).read_text(), {key: str(of) for key, of in wanted.items() if of or of == ""}, arguments, folder
    )
    if options.show:
        click.echo(script, nl=False)
        return 0
    return _submit(script, options.test_only)


def scripts_folder() -> Path:
    """Find the job scripts.

    Raises
    ------
    ConfigError
        If they are nowhere.
    """
    from kvr_mpi.cli.shipped import find_shipped

    return find_shipped("slurm", SCRIPT).parent


def fill_in(script: str, options: Mapping[str, str], arguments: Sequence[str], folder: Path) -> str:
    """Put sbatch's options and the job's arguments into a job script.

    Parameters
    ----------
    options : mapping
        Long names without dashes, and values (empty: a flag); they replace the script's own.
    arguments : sequence of str
        What the script would be given on sbatch's command line.
    folder : Path
        Where the script's siblings are: SLURM runs a copy.
    """
    lines, left = [], dict(options)
    for line in script.splitlines():
        found = re.match(r"#SBATCH --([a-z][a-z0-9-]*)", line)
        lines.append(_directive(found[1], left.pop(found[1])) if found and found[1] in left else line)
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    lines[last + 1 : last + 1] = [
        *(_directive(key, value) for key, value in left.items()),
        "",
        f"export KVR_SLURM_DIR={shlex.quote(str(folder))}",
        f"set -- {shlex.join(arguments)}",
    ]
    return "\n".join(lines) + "\n"


def _directive(key: str, value: str) -> str:
    """Write an option as a line of the script's head; it must not end that line, since what follows would be run."""
    from kvr_mpi.errors import ConfigError

    if not OPTION.fullmatch(key):
        raise ConfigError(
            f"--sbatch --{key!r}: expected one of sbatch's long options, such as --sbatch=--partition=gpu"
        )
    if CONTROL.search(value):
        hint = "start this from another folder" if key == "chdir" else "leave them out"
        raise ConfigError(f"--{key}={value!r} holds control characters, which could be run as a command: {hint}")
    return f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "")


def _gpus(spec: JobSpec, per_node: int, hardware: str | None) -> int:
    """Count the GPUs of a node: the shipped profiles are GPUs, a table's hardware may be anything."""
    from kvr_mpi.costs.hardware import profiles

    return per_node if spec.model.device == "cuda" or (spec.model.device == "auto" and hardware in profiles()) else 0


def _time_limit(job: Path, settings: tuple[str, ...], ranks: int, hardware: str | None) -> str:
    """Forecast the job as it is written, and leave a margin."""
    from kvr_mpi.cli.plan import read_and_plan
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.schedule.plan import duration

    made = read_and_plan(job, settings, ranks, hardware)
    if made.written_s is None:
        raise ConfigError(
            f"parallel.ranks_per_chain = {made.spec.parallel.ranks_per_chain!r} on {ranks} ranks: some document does "
            f"not fit, or the ranks cannot be divided so; kvr plan says why. 'auto' plans a chain for each document"
        )
    minutes = math.ceil((MARGIN * made.written_s + START_S) / 60)
    click.echo(f"predicted {duration(made.written_s)}, by {made.forecast.source}; asking for {minutes} min", err=True)
    return str(minutes)


def _submit(script: str, test_only: bool) -> int:
    from kvr_mpi.errors import ConfigError

    try:
        return subprocess.run(["sbatch", *["--test-only"] * test_only], input=script, text=True, check=False).returncode
    except FileNotFoundError as error:
        raise ConfigError(
            "sbatch: no such command; run this on a login node of the cluster, or --print the script"
        ) from error
