"""What is in a run's folder, held against its ledger; looks, and changes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvr_mpi.store.ledger import Ledger, ShardLine, crc32_of, read_ledger

RESULTS = "results.h5"
# What a file that is damaged is called after its name, from then on.
DAMAGED = ".damaged"
SHARD_NAME = re.compile(r"shard-.*\.h5")
CHECK_THREADS = 4


@dataclass(slots=True)
class Survey:
    """The result files of a folder.

    sound : files as recorded; their size is, their checksum may not have been looked at.
    unrecorded : files the ledger does not know.
    damaged : files that are not as recorded, and in what.
    sizes_bytes : of all files.
    """

    folder: Path
    ledger: Ledger
    sizes_bytes: dict[str, int]
    sound: dict[str, ShardLine] = field(default_factory=dict)
    unrecorded: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)

    def documents(self) -> tuple[set[str], set[str]]:
        """Return the ids that are done, and those that are not, but have error records."""
        done = {name for line in self.sound.values() for name in line.done}
        return done, {name for line in self.sound.values() for name in line.failed} - done

    def missing(self) -> dict[str, ShardLine]:
        """Return what the ledger has of files that are not there, and of documents that are nowhere else."""
        done, failed = self.documents()
        known = done | failed
        return {
            name: lines[-1]
            for name, lines in self.ledger.shards.items()
            if name not in self.sizes_bytes and not known.issuperset([*lines[-1].done, *lines[-1].failed])
        }

    def reasons(self) -> dict[str, str]:
        """Why documents failed that are not done, as far as the ledgers say."""
        done, failed = self.documents()
        found = dict.fromkeys(failed, "")
        for name in sorted(self.sound, key=order):
            line = self.sound[name]
            found.update((each, why) for each, why in zip(line.failed, line.reasons, strict=True) if each in found)
        return found

    def restrict(self, names: set[str]) -> None:
        """Look at no other files than these."""
        self.sound = {name: line for name, line in self.sound.items() if name in names}
        self.damaged = {name: why for name, why in self.damaged.items() if name in names}

    def verify(self, limit_bytes: int | None = None) -> None:
        """Hold files against their checksums, the newest first, and no more than `limit_bytes`."""
        total, names = 0, []
        for name in sorted(self.sound, key=order, reverse=True):
            total += self.sizes_bytes[name]
            lines = self._candidates(name)
            if limit_bytes is None or total <= limit_bytes or len({line.crc32 for line in lines}) > 1:
                names.append(name)
        with ThreadPoolExecutor(CHECK_THREADS) as pool:
            found = list(pool.map(lambda name: crc32_of(self.folder / name), names))
        for name, crc32 in zip(names, found, strict=True):
            matching = [line for line in self._candidates(name) if line.crc32 == crc32]
            if matching:
                self.sound[name] = matching[-1]
            else:
                self.damaged[name] = f"its checksum is {crc32}, expected {self.sound.pop(name).crc32}"

    def _candidates(self, name: str) -> list[ShardLine]:
        return [line for line in self.ledger.shards[name] if line.size_bytes == self.sizes_bytes[name]]


def survey(folder: Path) -> Survey:
    """Look at a folder.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    ledger = read_ledger(folder)
    with os.scandir(folder) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries if is_ours(entry.name) and entry.is_file()}
    found = Survey(folder, ledger, sizes)
    for name, size in sorted(sizes.items()):
        lines = ledger.shards.get(name, [])
        matching = [line for line in lines if line.size_bytes == size]
        if matching:
            found.sound[name] = matching[-1]
        elif lines:
            found.damaged[name] = f"it has {size} bytes, expected {lines[-1].size_bytes}"
        else:
            found.unrecorded.append(name)
    return found


def is_ours(name: str) -> bool:
    """Whether this program gives such a name to a file of results."""
    return name == RESULTS or SHARD_NAME.fullmatch(name) is not None


def order(name: str) -> tuple[bool, str]:
    """Key to sort files of results by age, which their names tell without a clock: merged ones come first."""
    return name != RESULTS, name


def foreign(folder: Path, names: Iterable[str] | None = None) -> list[str]:
    """Names of HDF5 files in a folder that are none of this program's."""
    return sorted(name for name in (names or os.listdir(folder)) if name.endswith(".h5") and not is_ours(name))
