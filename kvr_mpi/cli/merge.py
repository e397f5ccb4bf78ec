"""``kvr merge DIR``: the shards of a run as one file that needs no other."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; the shards stay.  [default: DIR/results.h5, which takes their place]",
)
@click.option("--keep-shards", is_flag=True, help="Leave the shards beside DIR/results.h5.")
@click.option("--overwrite", is_flag=True, help="Replace the file named by -o if it exists.")
def merge(folder: Path, output: Path | None, keep_shards: bool, overwrite: bool) -> None:
    """Put all documents in DIR, the output folder of a run, into one HDF5 file.

    Every shard is held against its checksum first. Refused while a job is at work in DIR.
    """
    from kvr_mpi.cli.environment import read_environment
    from kvr_mpi.errors import DataError, OutputError
    from kvr_mpi.store.lock import Lock
    from kvr_mpi.store.merge import merge_files

    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected the output folder of a run")
    if output is not None and output.exists() and not overwrite:
        raise OutputError(f"{output} exists; add --overwrite, or choose another file")
    lock = Lock(folder, read_environment().owner, lambda line: click.echo(line, err=True))
    try:
        result = merge_files(folder, output, keep_shards=keep_shards)
    finally:
        lock.release()
    click.echo(f"{result}: {result.stat().st_size / 1e6:.1f} MB")
