"""``kvr doctor``: is this machine ready? Under mpirun, srun, or alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from kvr_mpi.cli.options import command


@command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path(),
    help="The folder that results will be written to.  [default: the current folder]",
)
@click.option("--share-gpu", is_flag=True, help="Accept several ranks on one GPU.")
@click.option(
    "--try-transfers",
    type=click.Choice(["auto", "host", "cuda", "no"]),
    default="auto",
    show_default=True,
    help="Kind of buffer to send through MPI, in a process that may crash; auto: GPU memory if MPI claims to support "
    "it.",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(min=1),
    help="Also test the sums over tensor-parallel groups of this many ranks.",
)
@click.option(
    "--job",
    type=click.Path(path_type=Path),
    metavar="JOB.toml",
    help="Take parallel.tensor_parallel from this job.",
)
def doctor(
    as_json: bool,
    output_dir: Path,
    share_gpu: bool,
    try_transfers: Literal["auto", "host", "cuda", "no"],
    tensor_parallel: int | None,
    job: Path | None,
) -> int:
    """Examine the launcher, cores, GPUs, MPI, links, HDF5, clocks and SLURM, and suggest remedies.

    \b
    mpirun -n 8 kvr doctor --output-dir runs/
    srun --mpi=pmi2 kvr doctor --json
    srun --ntasks-per-node=8 kvr doctor --tensor-parallel 4

    Exit codes: 0 no check failed; 69 the ranks cannot communicate; 78 another check failed.
    """  # noqa: D301
    from kvr_mpi.doctor.findings import Finding, to_json, to_lines
    from kvr_mpi.doctor.launch import Request, diagnose

    size = tensor_parallel or 1
    if tensor_parallel is None and job is not None:
        from kvr_mpi.job import load_job

        size = load_job(job)[0].parallel.tensor_parallel
    request = Request(output_dir, share_gpu, try_transfers, size)

    def show(findings: Sequence[Finding]) -> None:
        click.echo(json.dumps(to_json(findings), indent=2) if as_json else "\n".join(to_lines(findings)))

    return diagnose(request, os.environ, show)
