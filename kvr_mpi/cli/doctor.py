"""``kvr doctor``: checks whether the machine is ready, under mpirun, srun, or alone."""

from __future__ import annotations

import json
import os
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
    from kvr_mpi.doctor.findings import Finding, count_line, to_json, to_text
    from kvr_mpi.doctor.steps import diagnose

    folder, findings = Path(), list[Finding]()
    if job is not None:
        from kvr_mpi.job import load_job

        folder = Path(load_job(job, settings)[0].output.path)

    def show(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            click.echo(to_text(finding))

    code = diagnose(folder, os.environ, show, share_gpu=share_gpu)
    if findings:  # on the first rank
        click.echo(json.dumps(to_json(findings), indent=2) if as_json else count_line(findings))
    return code
