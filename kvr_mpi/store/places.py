"""Where the records of a run's documents are, as columns: about 65 bytes per document.

A done record takes precedence over an error, a later record over an earlier one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvr_mpi.documents.index import DIGEST_BYTES
from kvr_mpi.errors import NOT_NOW, ConfigError
from kvr_mpi.store.kv import Piece
from kvr_mpi.store.record import STATUSES

BLOCK = 1 << 16  # records that are processed together


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a document's record, and the fields read from its head.

    source : ``results.h5`` or a log.
    at, size : offset and bytes of its line there.
    reason : why it failed, shortened.
    finished_s : Unix time at which it was finished; 0 if unknown.
    digest : first `DIGEST_BYTES` of the hash of the document's contents, as hexadecimal digits.
    needs : ids of the pieces of its keys and values.
    pieces : locations of these pieces; empty until `Survey.locate`.
    """

    source: Path
    at: int
    size: int
    is_done: bool
    reason: str
    finished_s: float
    digest: str
    needs: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def is_transient(self) -> bool:
        """Whether the document could not be read for the moment, so that the next start of the job tries it again."""
        return self.reason.startswith(NOT_NOW)

    @property
    def kv_bytes(self) -> int:
        """Size of its keys and values."""
        return sum(piece.bytes for piece in self.pieces)


def short_digest(sha256: str) -> str:
    """Return what is compared of a hash, or of its beginning; empty if it is none."""
    try:
        return bytes.fromhex(sha256).hex()[: 2 * DIGEST_BYTES] if len(sha256) in (2 * DIGEST_BYTES, 64) else ""
    except ValueError:
        return ""


def seconds_of(finished_at: str) -> float:
    """Return the Unix time of a record's `finished_at`; 0 if it is no time."""
    try:
        return datetime.fromisoformat(finished_at).timestamp()
    except (ValueError, OverflowError):
        return 0.0


class Records:
    """All records in a run's logs, or those that count of several runs, in the order of writing.

    sources : files with records, one after the other; firsts : number of each one's first record.
    """

    def __init__(self) -> None:
        self.sources, self.firsts = list[Path](), list[int]()
        self.at, self.size, self.finished_s = array("q"), array("i"), array("d")
        self.is_done, self.digests, self.ids, self.ends = bytearray(), bytearray(), bytearray(), array("q")
        self.reasons: dict[int, str] = {}  # of errors
        self.needs: dict[int, tuple[str, ...]] = {}
        # Lines that invalidate records, or their keys and values: the number of records before, whether it is the
        # records, and hashes of the ids.
        self._invalidated: list[tuple[int, bool, npt.NDArray[np.uint64]]] = []

    def __len__(self) -> int:
        return len(self.at)

    def add(self, name: str, place: Place) -> None:
        """Append a record."""
        if not self.sources or self.sources[-1] != place.source:
            self.sources.append(place.source)
            self.firsts.append(len(self))
        if not place.is_done:
            self.reasons[len(self)] = place.reason
        elif place.needs:
            self.needs[len(self)] = place.needs
        self.at.append(place.at)
        self.size.append(place.size)
        self.finished_s.append(place.finished_s)
        self.is_done.append(place.is_done)
        self.digests += bytes.fromhex(place.digest).ljust(DIGEST_BYTES, b"\0")
        self.ids += name.encode("utf-8", "surrogatepass")
        self.ends.append(len(self.ids))

    def invalidate(self, names: Collection[str], *, only_kv: bool) -> None:
        """Invalidate the records so far of some documents, or only their keys and values."""
        hashes = np.fromiter((_hash(name.encode("utf-8", "surrogatepass"), 0) for name in names), np.uint64, len(names))
        self._invalidated.append((len(self), not only_kv, hashes))

    def name(self, number: int) -> str:
        """Return the id of the document of a record."""
        return self.encoded(number).decode("utf-8", "surrogatepass")

    def encoded(self, number: int) -> bytes:
        """Return this id in UTF-8."""
        return bytes(self.ids[self.ends[number - 1] if number else 0 : self.ends[number]])

    def place(self, number: int, pieces: tuple[Piece, ...] = ()) -> Place:
        """Return where a record is, with the locations of its keys and values."""
        digest = self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        return Place(
            self.sources[bisect_right(self.firsts, number) - 1],
            self.at[number],
            self.size[number],
            bool(self.is_done[number]),
            self.reasons.get(number, ""),
            self.finished_s[number],
            digest.hex() if any(digest) else "",
            tuple(piece.id for piece in pieces),
            pieces,
        )

    def hashes(self, seed: int = 0) -> npt.NDArray[np.uint64]:
        """Return a hash of the id of each record."""
        return np.fromiter((_hash(self.encoded(number), seed) for number in range(len(self))), np.uint64, len(self))

    def order(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the order of some records by their ids: eight bytes at a time, the last ones first."""
        ends = np.frombuffer(self.ends, np.int64) if len(self) else np.zeros(0, np.int64)
        data = np.frombuffer(self.ids, np.uint8)
        order = np.arange(len(numbers))
        longest = int(np.diff(ends, prepend=0)[numbers].max()) if len(numbers) else 0
        for first in reversed(range(0, longest, 8)):
            keys = np.zeros(len(numbers), np.uint64)
            for start in range(0, len(numbers), BLOCK):
                some = numbers[start : start + BLOCK]
                at = np.where(some > 0, ends[some - 1], 0) + first
                for byte in range(8):
                    value = np.where(at + byte < ends[some], data[np.minimum(at + byte, len(data) - 1)], 0)
                    keys[start : start + BLOCK] = keys[start : start + BLOCK] << np.uint64(8) | value.astype(np.uint64)
            order = order[np.argsort(keys[order], kind="stable")]
        return order

    def validity(self, hashes: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.bool_], dict[int, tuple[str, ...]]]:
        """Return which records are valid, and the keys and values that these need, by number."""
        is_valid, needs = np.ones(len(self), np.bool_), dict(self.needs)
        for before, drops, some in self._invalidated:
            meant = np.isin(hashes[:before], some)
            if drops:
                is_valid[:before] &= ~meant
            needs = {number: pieces for number, pieces in needs.items() if number >= before or not meant[number]}
        return is_valid, {number: pieces for number, pieces in needs.items() if is_valid[number]}

    @property
    def needed(self) -> set[str]:
        """Ids of all pieces of keys and values that valid records need."""
        if not self.needs:
            return set()
        return {piece for pieces in self.validity(self.hashes())[1].values() for piece in pieces}

    def choose(self, there: Mapping[str, Piece], *, first: bool = False) -> tuple[Places, dict[str, list[str]]]:
        """Choose the record that counts of each document.

        there : all pieces of keys and values that exist.
        first : the first one counts, whatever its status; else, the last done one or, without any, the last error.

        Returns the places, and by id the pieces that are missing of documents without a complete record.
        """
        hashes, seed = self.hashes(), 0
        is_valid, needs = self.validity(hashes)
        missing = {number: [one for one in pieces if one not in there] for number, pieces in needs.items()}
        missing = {number: pieces for number, pieces in missing.items() if pieces}
        # 2: complete, 1: an error, 0: its keys and values are gone.
        rank = np.where(np.frombuffer(self.is_done, np.bool_) | first, np.int8(2), np.int8(1))
        rank[list(missing)] = 0
        while True:
            order = np.argsort(hashes, kind="stable").astype(np.int32)
            if not (is_valid.all() and _are_last(hashes[order]).all()):
                order = np.flatnonzero(is_valid).astype(np.int32)[:: -1 if first else 1]
                order = order[np.lexsort((rank[order], hashes[order]))]
            hashes = hashes[order]
            is_last = _are_last(hashes)
            if all(self.encoded(order[at]) == self.encoded(order[at + 1]) for at in np.flatnonzero(~is_last).tolist()):
                break
            seed += 1  # two ids have the same hash
            hashes = self.hashes(seed)
        lost: dict[str, list[str]] = {}
        for number, some in missing.items():
            lost.setdefault(self.name(number), []).extend(some)
        chosen, hashes = (order, hashes) if is_last.all() else (order[is_last], hashes[is_last])
        found = {self.name(number): lost[self.name(number)] for number in chosen[rank[chosen] == 0].tolist()}
        if found:
            chosen, hashes = chosen[rank[chosen] > 0], hashes[rank[chosen] > 0]
        with_kv = chosen[np.isin(chosen, list(needs)) & (rank[chosen] == 2)].tolist() if needs else []
        pieces = {number: tuple(there[piece] for piece in needs[number]) for number in with_kv}
        return Places(self, chosen, hashes, seed, pieces), found


class Places(Mapping[str, Place]):
    """The record that counts of each document, by its id, in the order of writing.

    numbers : of the records, in the order of `hashes`.
    pieces : locations of keys and values, by number.
    """

    def __init__(
        self,
        records: Records,
        numbers: npt.NDArray[np.int32],
        hashes: npt.NDArray[np.uint64],
        seed: int,
        pieces: Mapping[int, tuple[Piece, ...]],
    ) -> None:
        self._records, self._numbers, self._hashes, self._seed = records, numbers, hashes, seed
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return map(self._records.name, _listed(np.sort(self._numbers)))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __getitem__(self, name: str) -> Place:
        number = self._find(name)
        if number is None:
            raise KeyError(name)
        return self._records.place(number, self._pieces.get(number, ()))

    def _find(self, name: str) -> int | None:
        encoded = name.encode("utf-8", "surrogatepass")
        wanted = np.uint64(_hash(encoded, self._seed))
        at = int(np.searchsorted(self._hashes, wanted))
        if at == len(self._hashes) or self._hashes[at] != wanted:
            return None
        number = int(self._numbers[at])
        return number if self._records.encoded(number) == encoded else None

    def with_kv(self) -> Iterator[tuple[str, Place]]:
        """Yield the ids and places of the documents that have keys and values."""
        records = self._records
        return ((records.name(number), records.place(number, some)) for number, some in self._pieces.items())

    def without(self, names: Collection[str]) -> Places:
        """Return all places but those of some documents."""
        numbers = [number for name in names if (number := self._find(name)) is not None]
        kept = np.isin(self._numbers, numbers, invert=True)
        return Places(self._records, self._numbers[kept], self._hashes[kept], self._seed, self._pieces)

    def superseded(self) -> Iterator[tuple[str, Place]]:
        """Yield the ids and places of the records that do not count, since a document has others."""
        records, numbers = self._records, np.setdiff1d(np.arange(len(self._records)), self._numbers)
        return ((records.name(number), records.place(number)) for number in _listed(numbers))

    def finished_s(self) -> npt.NDArray[np.float64]:
        """Return the Unix times at which done documents were finished."""
        times, is_done = np.frombuffer(self._records.finished_s), np.frombuffer(self._records.is_done, np.bool_)
        found: npt.NDArray[np.float64] = times[self._numbers[is_done[self._numbers]]]
        return found

    @property
    def record_bytes(self) -> int:
        """Size of all records."""
        return int(np.frombuffer(self._records.size, np.int32)[self._numbers].sum()) if len(self) else 0

    def matching(self, hashes: npt.NDArray[np.uint64], digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return which documents have done records, by hashes of their ids and those of their contents (n, bytes)."""
        if not len(self) or self._seed:
            return np.zeros(len(hashes), np.bool_)
        found, is_done = np.zeros(len(hashes), np.bool_), np.frombuffer(self._records.is_done, np.bool_)
        known = np.frombuffer(self._records.digests, np.uint8).reshape(-1, DIGEST_BYTES)
        for start in range(0, len(found), BLOCK):
            some = slice(start, start + BLOCK)
            at = np.minimum(np.searchsorted(self._hashes, hashes[some]), len(self) - 1)
            numbers = self._numbers[at]
            is_same = (known[numbers] == digests[some, :DIGEST_BYTES]).all(1)
            found[some] = is_same & is_done[numbers] & (self._hashes[at] == hashes[some])
        return found

    def ordered(self, status: str | None = None) -> Iterator[str]:
        """Yield the ids in sorted order, of all documents or of those with a status."""
        if status is not None and status not in STATUSES:
            raise ConfigError(f"status {status!r}: expected one of {', '.join(map(repr, STATUSES))}, or None for all")
        numbers = self._numbers
        if status is not None and len(self):
            numbers = numbers[np.frombuffer(self._records.is_done, np.bool_)[numbers] == (status == "done")]
        return map(self._records.name, _listed(numbers[self._records.order(numbers)]))


def _are_last(ordered: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return which of some sorted hashes are the last of their value."""
    return np.append(ordered[1:] != ordered[:-1], np.ones(min(1, len(ordered)), np.bool_))


def _listed(numbers: npt.NDArray[Any]) -> Iterator[int]:
    """Yield numbers as integers of Python."""
    return (number for start in range(0, len(numbers), BLOCK) for number in numbers[start : start + BLOCK].tolist())


def _hash(encoded: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(encoded, seed)
