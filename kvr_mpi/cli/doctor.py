"""``kvr doctor``: checks whether the machine is ready, under mpirun, srun, or alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from kvr_mpi.cli.options import command, optional_job_argument, set_option


@command()
@optional_job_argument
@set_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--share-gpu", is_flag=True, help="Accept several ranks on one GPU.")
def doctor(job: Path | None, settings: tuple[str, ...], as_json: bool, share_gpu: bool) -> int:
    """Check the launcher, MPI, GPUs, links, folder and batch system, and suggest fixes.

    \b
    mpirun -n 8 kvr doctor job.toml
    srun --mpi=pmi2 kvr doctor --json

    With JOB, the doctor tests its output folder; otherwise, the current folder.

    Exit codes: 0 no check failed; 69 the ranks cannot communicate; 78 another check failed.
    """  # noqa: D301
    from kvr_mpi.doctor.findings import Finding, to_json, to_lines
    from kvr_mpi.doctor.launch import DoctorOptions, diagnose

    request = DoctorOptions(share_gpu=share_gpu)
    if job is not None:
        from kvr_mpi.job import load_job

        spec, _ = load_job(job, settings)
        request = replace(request, output_dir=Path(spec.output.path))

    def show(findings: Sequence[Finding]) -> None:
        click.echo(json.dumps(to_json(findings), indent=2) if as_json else "\n".join(to_lines(findings)))

    return diagnose(request, os.environ, show)
