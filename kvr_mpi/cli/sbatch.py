"""``kvr sbatch JOB.toml``: fills in the shipped job script from the plan, and prints or submits it."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvr_mpi.cli.options import (
    check_fresh_or_resumed,
    overwrite_option,
    resume_option,
    set_option,
)
from kvr_mpi.cli.plan import START_S, Allocation, allocation_of, node_options, plan_here
from kvr_mpi.duration import duration_text, parse_duration
from kvr_mpi.errors import counted

if TYPE_CHECKING:
    from kvr_mpi.job import JobSpec

OPTION = re.compile("[a-z][a-z0-9-]*")
SCRIPT, ARRAY_SCRIPT, GATHER_SCRIPT = "kvr_prefill.sh", "kvr_array.sh", "kvr_gather.sh"
# Options of sbatch that also apply to the job that merges an array's results.
GATHER_TOO = ("account", "partition", "qos", "reservation", "mail-type", "mail-user", "clusters")
# File of defaults, and options of `kvr sbatch` itself that it may set.
DEFAULTS = "sbatch.toml"
OWN_DEFAULTS = ("ntasks-per-node", "gpus-per-node", "cpus-per-task", "hardware", "environment-file")
ENVIRONMENT_FILES = (".sif", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.zst")
# Variables of sbatch that are not named like their option.
VARIABLES = {"time": "SBATCH_TIMELIMIT", "mem": "SBATCH_MEM_PER_NODE"}
# Values of --time for a job without a time limit, and a time that SLURM cannot read.
NO_LIMIT, WITH_UNITS = ("0", "-1", "INFINITE", "UNLIMITED"), re.compile("([0-9]+[dhms])+", re.IGNORECASE)
# Safety factor for the forecast. A job that reaches its limit anyway is requeued and resumes.
MARGIN = 1.5
# Parts of the names of sbatch's options that ask for GPUs.
GPU_OPTIONS = ("gpu", "gres")
PLANNED = "planned"  # as --mem: the memory that the plan needs
# Host memory that Python and its libraries take per rank, in addition to the planned memory.
LIBRARY_BYTES = 1.5 * (1 << 30)
# Minimum speedup for which twice as many ranks are recommended.
ENOUGH = 1.2


@click.command(context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True})
@click.argument("words", metavar="JOB [--SBATCH_OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@set_option
@click.option(
    "--ranks",
    type=click.IntRange(1),
    required=True,
    help="Number of ranks: one per GPU, or one per few cores.",
)
@node_options
@click.option("--hardware", metavar="NAME_OR_FILE", help="Speed of a rank, as for kvr plan.")
@click.option(
    "--environment-file",
    metavar="FILE",
    help="The Python environment in one file, for jobs on many nodes: a .sif image, or an archive of an environment "
    "(tar -C ~/kvr -cf kvr.tar .) that is unpacked on each node.",
)
@resume_option
@overwrite_option
@click.option(
    "--array",
    metavar="N[%K]",
    help="Split the corpus into N shares, at most K of which run at the same time. Each is a job of --ranks ranks with "
    "results in OUTPUT/share-I-of-N. A final job verifies and merges all results into OUTPUT/all.h5, even if some "
    "shares fail, and reports what is missing.",
)
@click.option("--print", "show", is_flag=True, help="Print the script and exit.")
def sbatch(
    words: tuple[str, ...],
    settings: tuple[str, ...],
    ranks: int,
    hardware: str | None,
    environment_file: str | None,
    resume: bool,
    overwrite: bool,
    array: str | None,
    show: bool,
    **node: int | None,
) -> int:
    """Submit JOB to SLURM: slurm/kvr_prefill.sh with nodes, ranks and time limit filled in from the plan.

    \b
    kvr sbatch jobs/summarize.toml --ranks 16 --hardware h200 --print
    kvr sbatch jobs/summarize.toml --ranks 16 --time=8:00:00 --partition=gpu
    kvr sbatch jobs/summarize.toml --ranks 4 --hardware h200 --array 100%20

    Any long option of sbatch can be given as --NAME=VALUE, such as --account, --partition, --mem or --dependency. The
    default of --time comes from the forecast; --mem=planned requests the memory that the plan needs. The expected cost
    in node, GPU and core hours is printed first.

    Defaults for all jobs can be set in ~/.config/kvr-mpi/sbatch.toml, such as account = "abc", or setup = ["module load
    openmpi"] for lines that run before the job. Options and variables such as SBATCH_ACCOUNT override them.
    """  # noqa: D301
    check_fresh_or_resumed(overwrite=overwrite, resume=resume)
    job, chosen = _read_words(words)
    shares, at_once = _read_array(array)
    from kvr_mpi.errors import ConfigError, KvrError
    from kvr_mpi.job import load_job

    if not show and shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch: command not found; run this on a login node of the cluster, or use --print to see the script"
        )
    own = {
        "hardware": hardware,
        "environment-file": environment_file,
        **{name.replace("_", "-"): count for name, count in node.items()},
    }
    defaults, setup = _read_defaults({*chosen, *(name for name, value in own.items() if value is not None)})
    hardware = defaults.pop("hardware", hardware)
    if (packed := defaults.pop("environment-file", environment_file)) is not None:
        setup = [*setup, f"export KVR_ENVIRONMENT_FILE={shlex.quote(_check_packed(packed))}"]
    for name in node:
        if (count := defaults.pop(name.replace("_", "-"), None)) is not None:
            node[name] = int(count)
    chosen = {**defaults, **chosen}
    if WITH_UNITS.fullmatch(chosen.get("time", "")):
        chosen["time"] = str(math.ceil(parse_duration(chosen["time"]) / 60))
    spec, _ = load_job(job, settings)
    if shares and (spec.documents.shard is not None or spec.questions is not None):
        what = "documents.shard" if spec.questions is None else "[questions]"
        raise ConfigError(f"--array splits the corpus into shares itself: remove {what} from the job")
    if (wished := chosen.get("nodes", "")).isdecimal() and node["ntasks_per_node"] is None:
        node["ntasks_per_node"] = max(1, ranks // max(1, int(wished)))
    nodes = allocation_of(spec, ranks, hardware, **node)
    if wished not in ("", str(nodes.nodes)):
        raise ConfigError(f"--nodes={wished}: {ranks} ranks, {nodes.ranks // nodes.nodes} per node, need {nodes.nodes}")
    name, here = re.sub("[^A-Za-z0-9._-]", "_", job.stem), str(Path.cwd())
    planned = {
        "nodes": nodes.nodes,
        "ntasks-per-node": nodes.ranks // nodes.nodes,
        "gpus-per-node": nodes.gpus // nodes.nodes,
        "cpus-per-task": node["cpus_per_task"],
    }
    wanted = {"job-name": f"kvr-{name}", "chdir": here, **{key: str(count) for key, count in planned.items() if count}}
    if shares:
        wanted |= {"array": f"0-{shares - 1}{at_once}", "output": "%x-%A_%a.out"}
    wanted |= chosen
    arguments = [str(job), *(word for setting in settings for word in ("--set", setting))]
    arguments += ["--resume"] * resume + ["--overwrite"] * overwrite
    template = ARRAY_SCRIPT if shares else SCRIPT
    fill_in(template, wanted, arguments, setup)  # refuses wrong options before the forecast, which takes seconds
    if not nodes.gpus and node["gpus_per_node"] is None and spec.model.device == "auto":
        _warn_without_gpus(chosen, node["cpus_per_task"])
    plans_memory = chosen.get("mem") == PLANNED
    try:
        minutes, memory = _forecast(spec, hardware, shares, nodes, requests="time" not in chosen)
        wanted.setdefault("time", minutes)
        if plans_memory and not memory:
            raise ConfigError(f"--mem={PLANNED}: the plan does not know the memory of this job; give --mem=NG")
        wanted |= {"mem": memory} if plans_memory else {}
    except KvrError as error:
        if "time" not in chosen or plans_memory:
            raise
        click.echo(f"no forecast of time, cost and memory: {str(error).splitlines()[0]}", err=True)
    script, gather, shared = fill_in(template, wanted, arguments, setup), "", dict[str, str]()
    if shares:
        shared = {key: value for key, value in chosen.items() if key in GATHER_TOO}
        of_gather = {"job-name": f"{wanted['job-name']}-gather", "chdir": here, **shared}
        gather = fill_in(GATHER_SCRIPT, of_gather, [spec.output.path, str(shares)], setup)
    if wanted["time"].strip().upper() not in NO_LIMIT:
        limit_s = parse_duration(wanted["time"])
        most = nodes.hours(limit_s * (shares or 1))
        click.echo(
            f"maximum cost: {most} for the time limit of {duration_text(limit_s)} on {counted(nodes.nodes, 'node')}"
            f"{f' for each of {shares} shares' if shares else ''}",
            err=True,
        )
    if show:
        click.echo(script, nl=False)
        if gather:
            click.echo(f"# Then, submitted with --dependency=afterany:JOB:\n{gather}", nl=False)
        return 0
    code, number = _submit(script, _words(wanted))
    if code or not gather:
        return code
    code, _ = _submit(gather, [f"--dependency=afterany:{number}", *_words(shared)], ", to merge the shares")
    if code:
        click.echo(
            f"kvr sbatch: the array {number} was submitted, but the job that merges its shares was not; when the "
            "array has finished, run: kvr merge OUTPUT -o all.h5",
            err=True,
        )
    return code


def _check_packed(file: str) -> str:
    """Return the absolute path of an environment in one file; raise `ConfigError` if it cannot be one."""
    from kvr_mpi.errors import ConfigError

    path = Path(file).expanduser().absolute()
    if not path.name.endswith(ENVIRONMENT_FILES):
        raise ConfigError(f"--environment-file={file}: expected a file named {', '.join(ENVIRONMENT_FILES)}")
    if not path.is_file():
        raise ConfigError(
            f"--environment-file={file}: not found; tar -C ENVIRONMENT -cf {path.name} . writes an archive"
        )
    return str(path)


def scripts_folder() -> Path:
    """Find the folder of the job scripts; raise `ConfigError` if they cannot be found."""
    from kvr_mpi.cli.files import find_shipped

    return find_shipped("slurm", SCRIPT).parent


def _own_options() -> list[str]:
    """Return the long options of `kvr sbatch` itself."""
    parameters = click.get_current_context().command.params
    return [option for parameter in parameters for option in parameter.opts if option.startswith("--")]


def _read_words(words: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """Separate the job from options of sbatch, which are all options that `kvr sbatch` itself does not have."""
    own = [option for option in _own_options() if "-per-" not in option]
    jobs, chosen = [], {}
    for word in words:
        if not word.startswith("-"):
            jobs.append(word)
            continue
        name, _, value = word.partition("=")
        if near := difflib.get_close_matches(name, own, cutoff=0.8):
            raise click.UsageError(f"{name}: no such option. Did you mean {near[0]}?")
        if not name.startswith("--"):
            raise click.UsageError(f"{word!r}: expected a long option of sbatch, such as --partition=gpu")
        chosen[name[2:]] = value
    if len(jobs) != 1:
        found = f"{len(jobs)}: {' '.join(map(repr, jobs))}" if jobs else "none"
        raise click.UsageError(f"expected one job file, found {found}; options of sbatch are written --NAME=VALUE")
    return Path(jobs[0]), chosen


def _read_defaults(given: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Read the defaults of the site and the user, and print those that are used.

    Parameters
    ----------
    given : collection of str
        Options on the command line, which override the files. So do variables such as SBATCH_ACCOUNT.

    Returns
    -------
    (dict of str to str, list of str)
        Options, and lines to run before a job.
    """
    import tomllib

    from kvr_mpi.cli.environment import config_files
    from kvr_mpi.errors import ConfigError

    found, setup, files = dict[str, str | int](), list[str](), list[str]()
    for path in filter(Path.is_file, config_files(DEFAULTS)):
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
        files.append(str(path))
        lines = table.pop("setup", [])
        setup += [lines] if isinstance(lines, str) else map(str, lines)
        for name, value in table.items():
            if f"--{name}" in _own_options() and name not in OWN_DEFAULTS:
                raise ConfigError(f"{path}: {name} = {value!r}: give --{name} on the command line")
            if not isinstance(value, str | int) or ("-per-" in name and not str(value).isdecimal()):
                expected = "a number" if "-per-" in name else "text, a number or true"
                raise ConfigError(f"{path}: {name} = {value!r}: expected {expected}")
            found[name] = value
    used = {
        name: "" if value is True else str(value)
        for name, value in found.items()
        if name not in given and value is not False and _variable(name) not in os.environ
    }
    if used or setup:
        more = [f"and {counted(len(setup), 'line')} to run first"] if setup else []
        click.echo(f"defaults from {', '.join(files)}: {' '.join([*_words(used), *more])}", err=True)
    if "time" not in given and (limit := os.environ.get(_variable("time"))):
        used["time"] = limit  # otherwise the time of the forecast would override the variable
    return used, setup


def _variable(name: str) -> str:
    """Return the variable from which sbatch takes the default of an option."""
    return VARIABLES.get(name, f"SBATCH_{name.upper().replace('-', '_')}")


def _read_array(array: str | None) -> tuple[int, str]:
    """Parse ``N%K``; return the number of shares (0 without an array), and ``%K`` or nothing."""
    if array is None:
        return 0, ""
    if not (found := re.fullmatch(r"([0-9]+)(%[1-9][0-9]*)?", array)) or int(found[1]) < 2:
        raise click.UsageError(
            f"--array {array!r}: expected a number of shares, at least 2, and how many may run at the same time: 100%20"
        )
    return int(found[1]), found[2] or ""


def _words(wanted: Mapping[str, str]) -> list[str]:
    """Write options for sbatch's command line, where they win over variables such as SBATCH_ACCOUNT."""
    return [f"--{key}={value}" if value else f"--{key}" for key, value in wanted.items()]


def fill_in(name: str, options: Mapping[str, str], arguments: Sequence[str], setup: Sequence[str] = ()) -> str:
    """Insert sbatch's options and the job's arguments into one of the shipped scripts.

    Parameters
    ----------
    options : mapping
        Long names without dashes, and values (empty: a flag); they replace the script's own.
    arguments : sequence of str
        Arguments of the script, as on sbatch's command line.
    setup : sequence of str
        Lines to run first.
    """
    folder = scripts_folder()
    first, *rest = (folder / name).read_text().splitlines()
    # Omit the comments that say how to submit and how to edit the shipped script.
    at = next(number for number, line in enumerate(rest) if line.startswith("#SBATCH"))
    lines, left = [first], dict(options)
    for line in (line for line in rest[at:] if not line.startswith("# ")):
        found = re.match(r"#SBATCH --([a-z][a-z0-9-]*)", line)
        lines.append(_directive(found[1], left.pop(found[1])) if found and found[1] in left else line)
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    lines[last + 1 : last + 1] = [
        *(_directive(key, value) for key, value in left.items()),
        "",
        *setup,
        f"export KVR_SLURM_DIR={shlex.quote(str(folder))}",  # folder of the other scripts: SLURM runs a copy
        f"set -- {shlex.join(arguments)}",
    ]
    return "\n".join(lines) + "\n"


def _directive(key: str, value: str) -> str:
    """Format an option as an #SBATCH line; refuse line breaks, since the text after them would be executed."""
    from kvr_mpi.errors import ConfigError

    if not OPTION.fullmatch(key):
        raise ConfigError(f"--{key!r}: expected a long option of sbatch, such as --partition=gpu")
    if not value.isprintable():
        hint = "start this from another folder" if key == "chdir" else "remove them"
        raise ConfigError(f"--{key}={value!r} contains control characters, which SLURM could run as a command: {hint}")
    return f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "")


def _warn_without_gpus(chosen: Mapping[str, str], cores: int | None) -> None:
    """Print that the script requests no GPUs, unless an option or the job has decided that."""
    if any(part in name for name in chosen for part in GPU_OPTIONS):
        return
    per_rank = counted(cores or 1, "core") + ("" if cores else " (--cpus-per-task)")
    click.echo(
        f"the script requests no GPUs, and {per_rank} per rank; for GPUs, add --gpus-per-node=N, or --hardware with a "
        f"profile; for CPUs, set model.device = 'cpu' to silence this message",
        err=True,
    )


def _forecast(
    spec: JobSpec, hardware: str | None, shares: int, nodes: Allocation, *, requests: bool
) -> tuple[str, str]:
    """Print the forecast of the job's time, cost, memory and disk space.

    Returns
    -------
    (str, str)
        The time of the job, or of the longest of its shares, plus a margin, in minutes; `requests` says that it will
        be the time limit. The host memory of a node as an option of sbatch has it, such as 64G; empty: not known.
    """
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.report.style import bytes_text
    from kvr_mpi.runtime.prediction import plan_shares
    from kvr_mpi.schedule.assignment import plan_documents, written_seconds

    made = plan_here(spec, nodes.ranks, hardware)
    plans = plan_shares(made, shares) if shares else [made]
    ranges = [one.expected for one in plans]
    times = [one.written_s if known is None else known.high_s for one, known in zip(plans, ranges, strict=True)]
    known = [seconds for seconds in times if seconds is not None]
    if len(known) < len(times):
        raise ConfigError(
            f"parallel.ranks_per_chain = {made.spec.ranks_per_chain!r} on {nodes.ranks} ranks: a "
            f"document does not fit, or the ranks cannot be divided into such chains; kvr plan shows why. 'auto' plans "
            f"a chain for each document"
        )
    minutes = math.ceil((MARGIN * max(known) + START_S) / 60)
    longest = f" for the longest of {shares} shares" if shares else ""
    what = "predicted time:" if None in ranges else "90% likely to finish within"
    click.echo(
        f"{what} {duration_text(max(known))}{longest}, based on {made.forecast.source}"
        + (f"; requesting {minutes} min" if requests else ""),
        err=True,
    )
    click.echo(f"predicted cost: {nodes.hours(sum(known))}, plus startup", err=True)
    memory = ""
    if (rank_bytes := made.rank_bytes) is not None:
        if nodes.gpus:
            needs = f"GPU memory: at least {bytes_text(rank_bytes)} per rank"
        else:
            memory = _node_memory(nodes, rank_bytes)
            needs = f"memory: at least {bytes_text(rank_bytes)} per rank, so about --mem={memory}"
        click.echo(
            f"{needs}, for the weights and the longest prompt; with more memory, ranks decode more documents at once",
            err=True,
        )
    if nodes.gpus and (host_bytes := made.host_bytes) is not None:
        memory = _node_memory(nodes, host_bytes)
        click.echo(
            f"host memory: at least {bytes_text(host_bytes)} per rank, so about --mem={memory}, since weights are "
            f"loaded through it (accelerate is not installed)",
            err=True,
        )
    if stored := made.describe_stored():
        click.echo(stored, err=True)
    half = nodes.ranks // 2
    if not shares and half and made.written_s is not None and made.tensor_parallel == 1:
        with_half_s = written_seconds(made.spec, plan_documents(made.spec, made.texts, half, made.forecast))
        if with_half_s is not None and with_half_s < ENOUGH * made.written_s:
            click.echo(
                f"warning: {nodes.ranks} ranks take {duration_text(made.written_s)}, and {counted(half, 'rank')} "
                f"{duration_text(with_half_s)}; request {half}",
                err=True,
            )
    return str(minutes), memory


def _node_memory(nodes: Allocation, rank_bytes: float) -> str:
    """Return the host memory of a node, as sbatch's --mem has it."""
    return f"{math.ceil(nodes.ranks / nodes.nodes * (rank_bytes + LIBRARY_BYTES) / (1 << 30))}G"


def _submit(script: str, options: Sequence[str], about: str = "") -> tuple[int, str]:
    """Pass a script to sbatch, whose errors the user sees; return the exit code, and the number of the job."""
    done = subprocess.run(
        ["sbatch", "--parsable", *options], input=script, text=True, check=False, stdout=subprocess.PIPE
    )
    job = done.stdout.strip().partition(";")[0]
    if done.returncode == 0 and job:
        click.echo(f"Submitted batch job {job}{about}")
    return done.returncode or int(not job), job
