"""``kvr search JOB.toml --heads FILE``: how many tokens each KV head keeps for a sample of a job's documents."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import click

from kvr_mpi.cli.writing import writing

# Default number of documents; documents.limit overrides it.
SAMPLED = 8


def measure_heads(job: Path, settings: tuple[str, ...], output: Path, *, overwrite: bool) -> None:
    """Prefill a sample of a job's documents on one rank, and write how many tokens each KV head keeps.

    Parameters
    ----------
    job : Path
    settings : tuple of str
        ``section.key=value``, which override the job's.
    output : Path
        The profile, as JSON.
    overwrite : bool
        Replace the file if it exists.

    Raises
    ------
    KvrError
        If the job has no compression, cannot be run as written, or the file must not be written.
    """
    from kvr_mpi.cli.environment import is_offline, read_environment
    from kvr_mpi.disk import replacing
    from kvr_mpi.job import load_job
    from kvr_mpi.preflight.checks import check_job
    from kvr_mpi.runtime.head_sample import sample_heads
    from kvr_mpi.store.targets import check_file

    alone = ("parallel.ranks_per_chain=all", "parallel.tensor_parallel=1")  # whatever the job's own settings are
    spec, _ = load_job(job, (*settings, *alone))
    check_job(spec, 1, goes_on=True, offline=is_offline())
    check_file(output, overwrite=overwrite)
    found, left_out = sample_heads(
        spec, read_environment().machine, spec.documents.limit or SAMPLED, lambda text: click.echo(text, err=True)
    )
    for name, reason in left_out:
        click.echo(f"left out: {name}: {reason}", err=True)
    with writing(output), replacing(output) as stream:
        stream.write((json.dumps(found) + "\n").encode())
    layers = found["counts"]
    heads = [count for layer in layers for count in layer]
    click.echo(f"{found['source']}: {len(layers)} layers of {len(layers[0])} KV heads")
    click.echo(f"a head keeps {min(heads):.0f} to {max(heads):.0f} tokens, {statistics.mean(heads):.0f} on average")
    for what, cosines in found["similarity"].items():
        if cosines:
            click.echo(f"{what}: {statistics.mean(cosines):.3f} on average, minimum {min(cosines):.3f}")
    click.echo(f"written to {output}")
