"""The links of a chain, from every rank to the next: latency, bandwidth, and whether data arrive unchanged.

Links from even ranks come first, then those from odd ones, so that a rank has one neighbour at a time.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvr_mpi.topology import sends_first
from kvr_mpi.transport.base import FixedTag, Request, Transport
from kvr_mpi.transport.clocks import Wait

if TYPE_CHECKING:
    import torch

PING, STOP = 0, -1


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is sent over a link: of `rounds` short messages and `repeats` long ones, the fastest counts.

    Messages grow from `first_bytes` to `max_bytes`, until one takes `long_s`: a slow link is not to hold up the job.
    """

    rounds: int = 30
    repeats: int = 3
    first_bytes: int = 1 << 16
    max_bytes: int = 1 << 25
    long_s: float = 2e-3


@dataclass(frozen=True, slots=True)
class Link:
    """What the link to the next rank does; `intact`: whether all data arrived unchanged."""

    latency_s: float
    bytes_per_s: float
    intact: bool


def wait_without_limit(request: Request, who: str) -> None:
    """Wait for a transfer, however long it takes."""
    request.wait()


def measure_links(
    transport: Transport, device: torch.device, effort: Effort = Effort(), wait: Wait = wait_without_limit
) -> Link | None:
    """Measure this rank's two links, from the memory of `device`; every rank calls this.

    Returns
    -------
    Link or None
        That to the next rank; None on the last.
    """
    link = None
    for even in (True, False):
        if sends_first(transport.rank) == even:
            link = _ask(transport, device, effort, wait) if transport.rank + 1 < transport.size else None
        elif transport.rank > 0:
            _answer(transport, device, wait)
    return link


def _ask(transport: Transport, device: torch.device, effort: Effort, wait: Wait) -> Link:
    import torch

    peer, who = transport.rank + 1, f"an answer of rank {transport.rank + 1}"
    word, echo = torch.zeros(2, 1, dtype=torch.int64, device=device)  # NCCL takes no host memory

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
            seconds(word.fill_(len(data)))  # the other side has its buffer ready then
            times.append(seconds(data))
            wait(transport.irecv(echo, peer, FixedTag.LINK), who)
            intact &= int(echo) == sum_of_data
        return min(times)

    seconds(word.fill_(PING))  # the first message sets the connection up
    latency_s = min(seconds(word) for _ in range(effort.rounds)) / 2
    while (taken_s := seconds_of(pattern(size, transport.rank).to(device))) < effort.long_s and size < effort.max_bytes:
        size = min(8 * size, effort.max_bytes)
    seconds(word.fill_(STOP))
    return Link(latency_s, size / max(taken_s - 2 * latency_s, 1e-9), intact)


def _answer(transport: Transport, device: torch.device, wait: Wait) -> None:
    """Be the next rank."""
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
            wait(
                transport.isend(echo, peer, FixedTag.LINK), who
            )  # it is here; the clock stops, and only then sums are made
            wait(transport.isend(echo.fill_(checksum(data)), peer, FixedTag.LINK), who)


def pattern(size: int, seed: int) -> torch.Tensor:
    """Make bytes in which a lost or doubled piece shows."""
    import torch

    words = torch.arange(-(-size // 8), dtype=torch.int64) * 2_654_435_761 + seed
    return words.view(torch.uint8)[:size].contiguous()


def checksum(data: torch.Tensor) -> int:
    """CRC-32 of a byte tensor, wherever it lies."""
    return zlib.crc32(data.cpu().numpy().tobytes())
