"""When does it pay to keep keys and values? Loading them, on this file system, against prefilling again.

Loading takes as long as its bytes, prefilling more than its tokens: from some length on loading is faster. How fast
files are read is measured where the results will be, with the digests that loading takes, from memory and from disk.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvr_mpi.disk import create, drop_pages
from kvr_mpi.errors import OutputError
from kvr_mpi.schedule.forecast import Forecast
from kvr_mpi.store.arrays import digest_of

PROBE_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
SHORTEST = 64


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """Bytes per second that are read and digested: of a file in memory (warm), and of one that is not (cold)."""

    warm: float
    cold: float


@dataclass(frozen=True, slots=True)
class StoredLength:
    """A prompt of so many tokens: bytes of its keys and values, seconds to load them, and to prefill it on one rank."""

    tokens: int
    bytes: int
    warm_s: float
    cold_s: float
    prefill_s: float


def measure_reading(folder: Path) -> ReadSpeed:
    """Write a file where results will be, read it back, and remove it.

    Parameters
    ----------
    folder : Path
        If it is not there yet, the nearest folder above it is taken.

    Raises
    ------
    OutputError
        If nothing can be written there.
    """
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    path = folder / f".probe-{secrets.token_hex(8)}"
    try:
        handle = create(path)
        try:
            with open(handle, "wb") as stream:
                stream.write(np.random.default_rng(0).bytes(PROBE_BYTES))
                stream.flush()
                os.fsync(stream.fileno())
            _read(path)
            warm = min(_read(path) for _ in range(3))
            drop_pages(path)
            return ReadSpeed(PROBE_BYTES / warm, PROBE_BYTES / _read(path))
        finally:
            path.unlink()
    except OSError as error:
        raise OutputError(f"output.path: {str(folder)!r} cannot be written: {error.strerror or error}") from error


def list_lengths(forecast: Forecast, bytes_per_token: int, speed: ReadSpeed, longest: int) -> list[StoredLength]:
    """Say what prompts of 64, 128, ... tokens take, up to the longest of a corpus."""
    found, tokens = [], SHORTEST
    while tokens < 2 * max(longest, SHORTEST):
        length = min(tokens, max(longest, SHORTEST))
        size = length * bytes_per_token
        prefill_s = forecast.ttft_s(length, 1)
        found.append(StoredLength(length, size, size / speed.warm, size / speed.cold, prefill_s))
        tokens *= 2
    return found


def describe_break_even(lengths: Sequence[StoredLength], speed: ReadSpeed) -> list[str]:
    """Say from which length on loading is faster than prefilling again."""
    lines = [
        f"asking again (kvr ask): keys and values can be read at {speed.warm / 1e9:.2f} GB/s from memory and "
        f"{speed.cold / 1e9:.2f} GB/s from disk (measured in the output folder)"
    ]
    for where, seconds in (("memory", "warm_s"), ("the disk", "cold_s")):
        slower = [one.tokens for one in lengths if getattr(one, seconds) >= one.prefill_s]
        faster = [one.tokens for one in lengths if one.tokens > max(slower, default=0)]
        if not faster:
            lines.append(f"  from {where}: prefilling again is faster at every length; do not store them")
        else:
            end = f"from {faster[0]} tokens on" if slower else "at every length"
            lines.append(f"  from {where}: loading is faster than prefilling again {end}")
    last = lengths[-1]
    lines.append(
        f"  {last.tokens} tokens: {last.bytes / 1e6:.0f} MB, loaded in {last.warm_s:.2g} to {last.cold_s:.2g} s, "
        f"prefilled on one rank in {last.prefill_s:.2g} s"
    )
    return lines


def _read(path: Path) -> float:
    """Seconds to read a file and digest it, block by block."""
    began = time.perf_counter()
    with path.open("rb", buffering=0) as stream:
        block = np.empty(BLOCK_BYTES, np.uint8)
        while stream.readinto(block.data):
            digest_of(block)
    return time.perf_counter() - began
