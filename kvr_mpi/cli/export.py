"""``kvr export FILE --format jsonl|csv|parquet``: results for other tools."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--format", "kind", type=click.Choice(["jsonl", "csv", "parquet"]), default="jsonl", show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; default: standard output.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
def export(path: Path, kind: str, output: Path | None, overwrite: bool) -> None:
    """Write the answers in FILE (a result file or the output folder of a run), one row per document."""
    from kvr_mpi.errors import OutputError
    from kvr_mpi.store.export import write_export

    if output is None:
        if kind == "parquet":
            raise click.UsageError("Parquet is binary: name a file with -o FILE")
        write_export(path, kind, sys.stdout.buffer)
        return
    if output.exists() and not overwrite:
        raise OutputError(f"{output} exists; add --overwrite, or choose another file")
    if output.exists() and path.exists() and output.samefile(path):
        raise OutputError(f"{output} is what is to be exported; choose another file")
    part = output.with_name(output.name + ".part")
    try:
        with part.open("wb") as stream:
            write_export(path, kind, stream)
        os.replace(part, output)
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
