"""``kvr export FILE --format jsonl|csv|parquet|npy``: results for other programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvr_mpi.cli.options import command, output_file_option, overwrite_file_option
from kvr_mpi.errors import counted

if TYPE_CHECKING:
    from kvr_mpi.store.results import Results


@command()
@click.argument("paths", type=click.Path(path_type=Path), metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["jsonl", "csv", "parquet", "npy", "openai-batch"]),
    default="jsonl",
    show_default=True,
    help="Output format; csv: answers, errors, finish_reason, coverage and the fields that the job requested; npy: ids "
    "and embeddings; openai-batch: responses for jobs with documents.format = 'openai-batch'; other formats: all "
    "fields.",
)
@output_file_option("File to write.  [default: standard output]")
@click.option(
    "--kv",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write keys and values to this folder instead, one safetensors file per document.",
)
@click.option(
    "--fields",
    metavar="NAME,...",
    help="Write only these fields, in this order: --fields id,answer; columns.NAME is a field of the document's row.",
)
@overwrite_file_option
@click.option(
    "--status",
    type=click.Choice(["done", "error"]),
    help="Export only finished or only failed documents.",
)
def export(
    paths: tuple[Path, ...],
    kind: str,
    output: Path | None,
    kv: Path | None,
    fields: str | None,
    overwrite: bool,
    status: str | None,
) -> int:
    """Write the answers in FILE, one row per document, ordered by id.

    FILE is a result file, the output folder of a run, or a folder of such folders (the shares of an array); several of
    them are combined into one table. If shares are missing, the command lists them and exits with 65.
    """
    from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK
    from kvr_mpi.store.parts import tell_missing
    from kvr_mpi.store.results import open_results
    from kvr_mpi.store.targets import check_file

    if kv is not None and output is not None:
        raise click.UsageError("--kv FOLDER writes keys and values, -o FILE writes answers: choose one")
    if fields is not None and (kv is not None or kind in ("openai-batch", "npy")):
        raise click.UsageError("--fields applies to --format jsonl, csv and parquet")
    if output is None and kv is None and kind in ("parquet", "npy"):
        raise click.UsageError(f"{kind} is a binary format: specify a file with -o FILE")
    if output is not None:
        check_file(output, overwrite=overwrite, reads=paths)
    results = open_results(*paths, verify=False, partial=True)  # records are verified when they are read
    if kv is None:
        _write(results, kind, output, status, fields)
    else:
        from kvr_mpi.store.tensors import export_kv

        written = export_kv(results, kv, overwrite=overwrite)
        click.echo(f"{kv}: keys and values of {counted(written, 'document')}")
    if results.missing:
        click.echo(f"Warning: {tell_missing(results.missing)}", err=True)
    elif results.left:
        click.echo(
            f"Warning: the run is not finished: {counted(results.left, 'document')} left; see kvr status {paths[0]}",
            err=True,
        )
    return EXIT_BAD_DATA if results.missing else EXIT_OK


def _write(results: Results, kind: str, output: Path | None, status: str | None, fields: str | None) -> None:
    from contextlib import ExitStack

    from kvr_mpi.disk import replacing, writing
    from kvr_mpi.store.batch_responses import write_responses
    from kvr_mpi.store.export import asked_fields, choose_fields, write_embeddings, write_export

    records = results.records(status)
    if fields is not None:
        chosen = choose_fields([name.strip() for name in fields.split(",")], results.columns)
    else:
        chosen = asked_fields(results.records(status), results.columns) if kind == "csv" else ()
    with ExitStack() as files:
        if output is not None:  # not for standard output, whose reader may have closed the pipe
            files.enter_context(writing(output))
        stream = sys.stdout.buffer if output is None else files.enter_context(replacing(output))
        if kind == "npy":
            write_embeddings(results, stream)
        elif kind == "openai-batch":
            write_responses(records, stream, str(results.header.model["name"]))
        else:
            write_export(records, kind, stream, results.columns, chosen)
