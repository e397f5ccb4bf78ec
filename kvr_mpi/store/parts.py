"""Several runs read as one: the shares of a corpus that the tasks of an array processed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvr_mpi.disk import LOCK_NAME, LOG_NAME, RUN_FILE, VOLUME_NAME, is_folder, names_in
from kvr_mpi.errors import DataError
from kvr_mpi.store.folder import read_run_header
from kvr_mpi.store.log import Header
from kvr_mpi.store.run import RunFile, differing_settings, read_run_file
from kvr_mpi.store.volumes import RESULTS

SHARE_NAME = re.compile(r"share-([0-9]+)-of-([0-9]+)", re.ASCII)
MAX_SHARES = 1_000_000  # larger numbers in folder names are ignored
NAMED = 8  # maximum number of missing items in a message


def find_runs(paths: Sequence[Path]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Find runs: files of results, run folders, and folders of run folders.

    A folder that contains a log, a volume or a ``run.json`` is a run. Any other folder stands for the runs in it, even
    if it also contains a merged result file or a stale lock. Also describes the shares of the same corpus that are not
    among the runs, unless the only path is itself a run.
    """
    found: list[Path] = []
    for path in paths:
        found += _runs_in(path) or [path]
    several = len(found) > 1 or list(paths) != found
    return tuple(dict.fromkeys(found)), tuple(_missing(found)) if several else ()


def shares_beside(folder: Path) -> list[Path]:
    """List the folders of the other shares of an array's corpus, by number; none if the folder is not named as one."""
    share = SHARE_NAME.fullmatch(folder.name)
    if share is None or not is_folder(folder.parent):
        return []
    found = ((name, SHARE_NAME.fullmatch(name)) for name in names_in(folder.parent) if name != folder.name)
    return sorted((folder.with_name(name) for name, one in found if one and one[2] == share[2]), key=_by_number)


def common_header(paths: Sequence[Path]) -> Header:
    """Read the header of runs; runs without results have none.

    Raises `DataError` if no run has results, or the runs belong to different jobs; the message says what differs.
    """
    found: tuple[Path, Header] | None = None
    for path in paths:
        header = read_run_header(path)
        if header is None:
            continue
        if found is not None:
            check_same_job(*found, path, header)
        found = found or (path, header)
    if found is None:
        raise DataError(f"no results in {', '.join(map(str, paths[:NAMED]))}; expected the output of a run")
    return found[1]


def check_same_job(one: Path, its: Header, other: Path, others: Header) -> None:
    """Refuse runs of different jobs; the message says what differs."""
    if differing := list(differing_settings(its.identity, others.identity)):
        told = "; ".join(f"{key}: {mine} and {theirs}" for key, mine, theirs in differing[:NAMED])
        raise DataError(f"{one} and {other} are of different jobs ({told}); expected shares of one job")


def check_corpus(path: Path, run: RunFile, first: dict[int, tuple[Path, str]]) -> None:
    """Refuse shares whose corpora were divided differently, since some documents would be in none of them."""
    if run.part.parts == 1:
        return
    other, known = first.setdefault(run.part.parts, (path, run.cut))
    if run.cut != known:
        raise DataError(
            f"{other} and {path} are shares of different documents: documents.limit, files or sizes of tables differed "
            f"when they began, so some documents may be missing. Run the array again without changing these meanwhile"
        )


def tell_missing(missing: Sequence[str]) -> str:
    """List what is missing, in one line."""
    more = f"; and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return f"missing: {'; '.join(missing[:NAMED])}{more}"


def is_run(folder: Path) -> bool:
    """Whether a folder is a run: it has a log, a volume or a ``run.json``."""
    names = names_in(folder)
    return any(LOG_NAME.fullmatch(name) or VOLUME_NAME.fullmatch(name) or name == RUN_FILE for name in names)


def _runs_in(path: Path) -> list[Path]:
    """List the runs in a folder that is not itself a run, by number."""
    if not is_folder(path) or is_run(path):
        return []
    found = []
    for inner in filter(is_folder, map(path.joinpath, names_in(path))):  # a run, one that begins, or the results of one
        if is_run(inner) or any(name == RESULTS or LOCK_NAME.fullmatch(name) for name in names_in(inner)):
            found.append(inner)
    return sorted(found, key=_by_number)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts share-2 before share-10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"([0-9]{1,18})", path.name)]


def _missing(paths: Iterable[Path]) -> Iterable[str]:
    """List the shares that are missing."""
    seen: dict[tuple[Path, int], set[int]] = {}
    for path in paths:
        share = find_part(path)
        if share is not None:
            seen.setdefault((path.absolute().parent, share[1]), set()).add(share[0])
    for (parent, count), numbers in seen.items():
        for number in sorted(set(range(count)) - numbers):
            yield f"share {number} of {count} in {os.path.relpath(parent)}"


def find_part(path: Path) -> tuple[int, int] | None:
    """Return a folder's share and the number of shares, from its name or, more slowly, its ``run.json``."""
    named = SHARE_NAME.fullmatch(path.name)
    if named is not None:
        number, count = int(named[1]), int(named[2])
    elif (run := read_run_file(path)) is not None:
        number, count = run.part
    else:
        return None
    return (number, count) if number < count <= MAX_SHARES and (named or count > 1) else None
