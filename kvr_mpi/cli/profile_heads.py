"""``kvr profile-heads JOB.toml``: how much each KV head keeps of a sample of a job's documents."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import click

from kvr_mpi.cli.options import command, job_argument, set_option
from kvr_mpi.cli.writing import writing


@command()
@job_argument
@set_option
@click.option(
    "--documents", default=8, show_default=True, type=click.IntRange(1), help="Maximum number of documents to sample."
)
@click.option(
    "--output",
    default="heads.json",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write the profile to.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
def profile_heads(job: Path, settings: tuple[str, ...], documents: int, output: Path, overwrite: bool) -> None:
    """Prefill a sample of JOB's documents on one rank, and record how many tokens each KV head keeps.

    \b
    kvr profile-heads jobs/summarize.toml --set compress.method=ada-snapkv --set compress.budget=512

    compress.method = "headkv" uses the mean over documents. The similarity of the documents is
    printed, too; look at the mean-centred cosines, since plain cosines are always close to 1.
    """  # noqa: D301
    from kvr_mpi.cli.environment import is_offline, read_environment
    from kvr_mpi.disk import replacing
    from kvr_mpi.job import load_job
    from kvr_mpi.preflight.checks import check_job
    from kvr_mpi.runtime.head_sample import sample_heads
    from kvr_mpi.store.targets import check_file

    alone = ("parallel.ranks_per_chain=all", "parallel.ranks_per_stage=1")  # whatever ranks the job itself runs on
    spec, _ = load_job(job, (*settings, *alone))
    check_job(spec, 1, goes_on=True, offline=is_offline())
    check_file(output, overwrite=overwrite)
    setup, sample = sample_heads(spec, read_environment().machine, documents, lambda text: click.echo(text, err=True))
    for name, reason in sample.left_out:
        click.echo(f"left out: {name}: {reason}", err=True)
    found = sample.as_json(setup, spec.documents.path)
    with writing(output), replacing(output) as stream:
        stream.write((json.dumps(found) + "\n").encode())
    mean = sample.counts.mean(0)
    click.echo(f"{found['source']}: {len(mean)} layers of {mean.shape[1]} KV heads")
    click.echo(f"a head keeps {mean.min():.0f} to {mean.max():.0f} tokens, {mean.mean():.0f} on average")
    for what, cosines in found["similarity"].items():
        if cosines:
            click.echo(f"{what}: {statistics.mean(cosines):.3f} on average, least {min(cosines):.3f}")
    click.echo(f"written to {output}")
