"""``kvr merge DIR``: merges the results of a run into one self-contained file."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from kvr_mpi.cli.options import command, output_file_option, overwrite_file_option


@command()
@click.argument("folders", type=click.Path(path_type=Path), metavar="DIR...", nargs=-1, required=True)
@output_file_option("File to write, without changes to DIR.  [default: DIR/results.h5, which replaces the logs]")
@overwrite_file_option
@click.option(
    "--shares",
    type=click.IntRange(1),
    metavar="N",
    help="Expected number of folders; with fewer, the exit code is 65.",
)
def merge(folders: tuple[Path, ...], output: Path | None, overwrite: bool, shares: int | None) -> int:
    """Merge all documents in DIR, the output folder of a run, into one HDF5 file.

    All records, keys and values are read and verified. DIR cannot be merged while a job is writing to it. Several
    folders, or a folder of such folders (the shares of an array), require -o. If shares or documents are missing, the
    command lists them and exits with 65; without -o, nothing is merged.
    """
    from kvr_mpi.cli.environment import read_owner
    from kvr_mpi.cli.log_lines import show_log
    from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK, MissingError
    from kvr_mpi.logs import RankLogger
    from kvr_mpi.report.style import bytes_text
    from kvr_mpi.store.lock import Lock
    from kvr_mpi.store.parts import find_runs, tell_missing
    from kvr_mpi.store.rewrite import merge_run, merge_runs
    from kvr_mpi.store.targets import check_file

    for folder in folders:
        if not folder.is_dir():
            raise MissingError(f"{folder}: folder not found; expected the output folder of a run")
    if output is not None:
        check_file(output, overwrite=overwrite)
    runs, lost = find_runs(folders)
    if output is None and runs != folders[:1]:
        raise click.UsageError(f"{len(runs)} runs to merge: specify the output file with -o FILE")
    owner = read_owner()
    show_log()
    with ExitStack() as locks:
        for path in runs:
            locks.enter_context(Lock(path, owner, RankLogger()))
        if output is None:
            result, missing = merge_run(folders[0]), lost
        else:
            result, missing = output, merge_runs(folders, output)
    if shares is not None and len(runs) < shares and not lost:
        missing = (*missing, f"{shares - len(runs)} of {shares} shares")
    click.echo(f"{result}: {bytes_text(result.stat().st_size)}")
    if missing:
        click.echo(f"Warning: {tell_missing(missing)}", err=True)
    return EXIT_BAD_DATA if missing else EXIT_OK
