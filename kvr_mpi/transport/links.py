"""Measurement of links between ranks, and of clock offsets.

A link connects a rank to the next; it has a latency and a bandwidth, and is intact if data arrive unchanged. Links from
even ranks are measured first, then those from odd ranks, so that a rank talks to one neighbor at a time.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvr_mpi.topology import sends_first
from kvr_mpi.transport.base import FixedTag, Request, Transport

if TYPE_CHECKING:
    import torch

PING, STOP = 0, -1
# Round trips per clock comparison.
ROUNDS = 10

# Waits for a request, given a description for errors; may raise a timeout.
Await = Callable[[Request, str], None]
Now = Callable[[], float]


def wait_on_host(request: Request, who: str) -> None:
    """Wait until a transfer is complete, even where `Request.wait` only makes a stream wait."""
    request.wait()
    while not request.test():
        time.sleep(0)


@dataclass(frozen=True, slots=True)
class Effort:
    """Messages that measure a link: `rounds` short ones and `repeats` of each long one; the fastest counts.

    Long messages grow from `first_bytes` to `max_bytes` until one takes `long_s`, so that slow links do not delay jobs.
    """

    rounds: int = 30
    repeats: int = 3
    first_bytes: int = 1 << 16
    max_bytes: int = 1 << 25
    long_s: float = 2e-3


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The measured link to the next rank; `intact` is True if all data arrived unchanged."""

    latency_s: float
    bytes_per_s: float
    intact: bool


def measure_links(
    transport: Transport,
    device: torch.device,
    effort: Effort = Effort(),
    wait: Await = wait_on_host,
) -> MeasuredLink | None:
    """Measure this rank's two links with tensors on `device`; every rank calls this.

    Returns the link to the next rank; None on the last rank.
    """
    link = None
    for even in (True, False):
        if sends_first(transport.rank) == even:
            link = _ask(transport, device, effort, wait) if transport.rank + 1 < transport.size else None
        elif transport.rank > 0:
            _answer(transport, device, wait)
    return link


def _ask(transport: Transport, device: torch.device, effort: Effort, wait: Await) -> MeasuredLink:
    import torch

    peer, who = transport.rank + 1, f"an answer of rank {transport.rank + 1}"
    word, echo = torch.zeros(2, 1, dtype=torch.int64, device=device)  # NCCL needs device memory

    def seconds(data: torch.Tensor) -> float:
        began = time.perf_counter()
        answer, sent = transport.irecv(echo, peer, FixedTag.LINK), transport.isend(data, peer, FixedTag.LINK)
        wait(answer, who)
        took_s = time.perf_counter() - began
        wait(sent, who)
        return took_s

    intact, size = True, effort.first_bytes

    def seconds_of(data: torch.Tensor) -> float:
        nonlocal intact
        times, sum_of_data = [], checksum(data)
        for _ in range(effort.repeats):
            seconds(word.fill_(len(data)))  # announces the size, so that the peer allocates its buffer
            times.append(seconds(data))
            wait(transport.irecv(echo, peer, FixedTag.LINK), who)
            intact &= int(echo) == sum_of_data
        return min(times)

    seconds(word.fill_(PING))  # the first message opens the connection
    latency_s = min(seconds(word) for _ in range(effort.rounds)) / 2
    while (taken_s := seconds_of(pattern(size, transport.rank).to(device))) < effort.long_s and size < effort.max_bytes:
        size = min(8 * size, effort.max_bytes)
    seconds(word.fill_(STOP))
    return MeasuredLink(latency_s, size / max(taken_s - 2 * latency_s, 1e-9), intact)


def _answer(transport: Transport, device: torch.device, wait: Await) -> None:
    """Respond to the measurements of the previous rank."""
    import torch

    peer, who = transport.rank - 1, f"a message of rank {transport.rank - 1}"
    word, echo = torch.zeros(2, 1, dtype=torch.int64, device=device)
    data = torch.empty(0, dtype=torch.uint8, device=device)
    while int(word) != STOP:
        wait(transport.irecv(word, peer, FixedTag.LINK), who)
        size = max(0, int(word))
        if size != len(data):
            data = torch.empty(size, dtype=torch.uint8, device=device)
        receive = transport.irecv(data.zero_(), peer, FixedTag.LINK) if size else None
        wait(transport.isend(echo, peer, FixedTag.LINK), who)
        if receive is not None:
            wait(receive, who)
            # This answer ends the other rank's timing; the checksum is sent after it.
            wait(transport.isend(echo, peer, FixedTag.LINK), who)
            wait(transport.isend(echo.fill_(checksum(data)), peer, FixedTag.LINK), who)


def pattern(size: int, seed: int) -> torch.Tensor:
    """Generate bytes in which lost or repeated parts are detectable."""
    import torch

    words = torch.arange(-(-size // 8), dtype=torch.int64) * 2_654_435_761 + seed
    return words.view(torch.uint8)[:size].contiguous()


def checksum(data: torch.Tensor) -> int:
    """Return the CRC-32 of a byte tensor on any device."""
    return zlib.crc32(data.cpu().numpy().tobytes())


@dataclass(frozen=True, slots=True)
class Skew:
    """Offset of a rank's clock from rank 0's.

    error_s : error bound in seconds, half of the shortest round trip.
    """

    ahead_s: float
    error_s: float


def measure_skews(transport: Transport, ranks: Sequence[int], wait: Await, clock: Now = time.time) -> dict[int, Skew]:
    """Estimate the clock offsets of some ranks on rank 0; every rank calls this.

    The shortest of several round trips counts; the answer is assumed to be in its middle. `clock` returns seconds.
    """
    import torch

    time_s, question = torch.zeros(2, 1, dtype=torch.float64)
    if transport.rank in ranks:
        for _ in range(ROUNDS):
            wait(transport.irecv(question, 0, FixedTag.CLOCK), "rank 0")
            wait(transport.isend(time_s.fill_(clock()), 0, FixedTag.CLOCK), "a message")
    found = {}
    for rank in ranks if transport.rank == 0 else ():
        best = Skew(0.0, float("inf"))
        for _ in range(ROUNDS):
            before_s = clock()
            answer = transport.irecv(time_s, rank, FixedTag.CLOCK)
            asked = transport.isend(question, rank, FixedTag.CLOCK)
            wait(answer, f"the time of rank {rank}")
            after_s = clock()
            wait(asked, "a message")
            if (after_s - before_s) / 2 < best.error_s:
                best = Skew(float(time_s) - (before_s + after_s) / 2, (after_s - before_s) / 2)
        found[rank] = best
    return found
