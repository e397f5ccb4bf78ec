"""``kvr prune RUN``: frees the space of stored keys and values."""

from __future__ import annotations

import math
from pathlib import Path

import click

from kvr_mpi.cli.options import command
from kvr_mpi.errors import counted


@command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "--doc",
    "documents",
    multiple=True,
    metavar="ID",
    help="Remove the keys and values of this document; may be repeated.",
)
@click.option(
    "--older-than",
    metavar="TIME",
    help="Remove those of documents that finished before this time: 12h, 30d, or a number of days.",
)
@click.option("--keep", metavar="SIZE", help="Remove the oldest until at most this size remains: 500G, 1.5T, or bytes.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, then exit.")
def prune(folder: Path, documents: tuple[str, ...], older_than: str | None, keep: str | None, dry_run: bool) -> None:
    """Remove keys and values from RUN, the output folder of a run; records and answers are kept.

    Files are rewritten one at a time, which requires free space for the largest of them. RUN cannot be pruned while a
    job is writing to it.
    """
    from kvr_mpi.cli.environment import read_owner
    from kvr_mpi.cli.log_lines import show_log
    from kvr_mpi.duration import parse_duration
    from kvr_mpi.errors import ConfigError, MissingError
    from kvr_mpi.logs import RankLogger
    from kvr_mpi.plain import parse_size
    from kvr_mpi.report.style import bytes_text
    from kvr_mpi.store.lock import Lock
    from kvr_mpi.store.results import read_results
    from kvr_mpi.store.rewrite import choose_pruned, list_stored, prune_kv

    if not documents and older_than is None and keep is None:
        raise click.UsageError("nothing selected to remove: give --doc ID, --older-than TIME or --keep SIZE")
    if not folder.is_dir():
        raise MissingError(f"{folder}: folder not found; expected the output folder of a run")
    older_than_s = math.inf if older_than is None else parse_duration(older_than, plain="d")
    keep_bytes = math.inf if keep is None else parse_size(keep)
    if keep_bytes is None:
        raise click.UsageError(f"--keep {keep!r}: expected a size such as 500G, 1.5T, or bytes")
    show_log()
    with Lock(folder, read_owner(), RankLogger()) as lock:
        index = read_results([folder])
        stored = list_stored(index)
        if unknown := set(documents) - set(stored):
            raise ConfigError(
                f"--doc {min(unknown)!r}: {folder} has no keys and values of this document; kvr inspect lists the "
                "documents"
            )
        gone = choose_pruned(index, documents=documents, older_than_s=older_than_s, keep_bytes=keep_bytes)
        if gone and not dry_run:
            prune_kv(folder, lock.number, gone)
    size, whole = (sum(index.places[name].kv_bytes for name in names) for names in (gone, stored))
    verb = "would be removed" if dry_run else "removed"
    click.echo(
        f"{folder}: keys and values of {counted(len(gone), 'document')} {verb}, {bytes_text(size)}; "
        f"remaining: {counted(len(stored) - len(gone), 'document')}, {bytes_text(whole - size)}"
    )
