"""Several runs at once: the shares of a corpus that the tasks of an array did, each in a folder of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvr_mpi.errors import DataError
from kvr_mpi.store.folder import Index, index_run, join_indexes, run_files
from kvr_mpi.store.run import RUN_FILE, share_in
from kvr_mpi.store.survey import RESULTS, is_ours

SHARE_NAME = re.compile(r"share-([0-9]+)-of-([0-9]+)", re.ASCII)
MAX_SHARES = 1_000_000  # a folder's name may say anything
NAMED = 8  # missing ones in a message


@dataclass(frozen=True, slots=True)
class Runs:
    """Files and folders of runs, and what is not there.

    paths : in the order they were given; the shares in one folder by number.
    missing : shares of the same corpus that are in none of them, in words.
    """

    paths: tuple[Path, ...]
    missing: tuple[str, ...] = ()


def find_runs(paths: Sequence[Path]) -> Runs:
    """Look for runs in files, runs' folders, and folders of such folders.

    Returns
    -------
    Runs
        What is missing is only told if more than one run was asked for.
    """
    found: list[Path] = []
    for path in paths:
        inner = [] if _is_run(path) else _runs_in(path)
        found += inner or [path]
    several = len(found) > 1 or list(paths) != found
    return Runs(tuple(dict.fromkeys(found)), tuple(_missing(found)) if several else ())


def index_runs(runs: Runs, *, verify: bool = False) -> tuple[Index, tuple[str, ...]]:
    """Say where every document of all runs is; and what is missing: shares, and what runs have lost or not yet made.

    Raises
    ------
    DataError
        If there is nothing to read, something is damaged, or a document is in two runs.
    """
    missing, indexes = list(runs.missing), []
    for path in runs.paths:
        if len(runs.paths) > 1 and path.is_dir() and not run_files(path):
            missing.append(f"{path} has no results yet")
            continue
        index = index_run(path, verify=verify)
        if index.gone:
            missing.append(f"{path} has lost {index.gone} document(s) its ledger knows: needs --resume")
        indexes.append(index)
    if not indexes:
        raise DataError(f"no results: {'; '.join(missing)}")
    return join_indexes(indexes), tuple(missing)


def tell_missing(missing: Sequence[str]) -> str:
    """Name what is missing, in one line."""
    more = f"; and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return f"missing: {'; '.join(missing[:NAMED])}{more}"


def _is_run(path: Path) -> bool:
    if not path.is_dir():
        return True
    names = os.listdir(path)
    return any(is_ours(name) or name in (RUN_FILE, RESULTS) or name.startswith((".lock-", "ledger-")) for name in names)


def _runs_in(folder: Path) -> list[Path]:
    inner = [folder / name for name in os.listdir(folder)]
    return sorted((path for path in inner if path.is_dir() and _is_run(path)), key=_by_number)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Key that sorts share-2 before share-10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"([0-9]{1,18})", path.name)]


def _missing(paths: Iterable[Path]) -> Iterable[str]:
    """Name the shares that are not among these."""
    seen: dict[tuple[Path, int], set[int]] = {}
    for path in paths:
        share = _share(path)
        if share is not None:
            seen.setdefault((path.absolute().parent, share[1]), set()).add(share[0])
    for (parent, count), numbers in seen.items():
        for number in sorted(set(range(count)) - numbers):
            yield f"share {number} of {count} in {os.path.relpath(parent)}"


def _share(path: Path) -> tuple[int, int] | None:
    """Say which share a folder is, and of how many; told by its name, or else by its run, which takes longer."""
    named = SHARE_NAME.fullmatch(path.name)
    told = share_in(path) if named is None else (int(named[1]), int(named[2]))
    return told if told is not None and told[0] < told[1] <= MAX_SHARES else None
