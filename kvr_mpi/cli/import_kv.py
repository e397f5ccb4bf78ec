"""``kvr import FOLDER RUN``: what ``kvr export --kv`` wrote, as a run again."""

from __future__ import annotations

from pathlib import Path

import click

from kvr_mpi.cli.options import command


@command("import")
@click.argument("source", type=click.Path(path_type=Path), metavar="FOLDER")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
def import_command(source: Path, run: Path) -> None:
    """Turn the safetensors files in FOLDER, as written by `kvr export --kv`, into RUN/results.h5, ready for kvr ask."""
    from kvr_mpi.cli.environment import read_owner
    from kvr_mpi.store.folder import check_fresh, check_writable
    from kvr_mpi.store.lock import Lock
    from kvr_mpi.store.tensors import import_kv

    check_writable(run)
    check_fresh(run)
    lock = Lock(run, read_owner(), lambda line: click.echo(line, err=True))
    try:
        done = import_kv(source, run)
    finally:
        lock.release()
    click.echo(f"{run}: {len(done)} document(s) with keys and values")
