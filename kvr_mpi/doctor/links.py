"""The chain's links, measured one at a time through the transport that a job uses.

Rank i plays ping-pong with rank i+1; when they are done, rank i+1 begins with rank i+2. The others sleep.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.doctor.deadlines import wait_for
from kvr_mpi.doctor.findings import Finding, fail, warn
from kvr_mpi.transport import Transport

TAG = 7101
STOP = -1
# A link is far below the others at a third of their bandwidth, or ten times their latency.
SLOW_BANDWIDTH, SLOW_LATENCY = 1 / 3, 10.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is sent over each link, and how long one message may take."""

    rounds: int = 200
    batches: int = 4
    link_bytes: int = 16 << 20
    repeats: int = 3
    latency_s: float = 1.0
    timeout_s: float = 20.0


def measure_links(transport: Transport, device: torch.device, effort: Effort) -> dict[str, Any] | None:
    """Measure this rank's two links; every rank calls it.

    Returns
    -------
    dict or None
        ``latency_us``, ``gigabytes_per_s`` and ``intact`` of the link to the next rank; None on the last.

    Raises
    ------
    SilentError
        If a neighbour was not heard of in time.
    """
    if transport.rank > 0:
        # The predecessors' links come first, and each may take its time out.
        patience_s = effort.timeout_s * (transport.rank + 1)
        _answer(transport, device, effort, patience_s)
    return _ask(transport, device, effort) if transport.rank + 1 < transport.size else None


def _ask(transport: Transport, device: torch.device, effort: Effort) -> dict[str, Any]:
    peer, limit_s = transport.rank + 1, effort.timeout_s
    word, echo = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def ping(value: int) -> int:
        word[0] = value
        receive, send = transport.irecv(echo, peer, TAG), transport.isend(word, peer, TAG)
        wait_for(receive, limit_s, f"an answer of rank {peer}")
        wait_for(send, limit_s)
        return int(echo[0])

    ping(0)  # the first message sets the connection up
    means, ends = [], time.monotonic() + effort.latency_s
    for _ in range(effort.batches):
        began = time.perf_counter()
        for number in range(effort.rounds):
            ping(number)
        means.append((time.perf_counter() - began) / effort.rounds / 2)
        if time.monotonic() > ends:
            break
    ping(STOP)
    times, intact = [], True
    for repeat in range(effort.repeats):
        data = pattern(effort.link_bytes, repeat + transport.rank).to(device)
        ping(repeat)  # the other side has posted its receive
        began = time.perf_counter()
        receive, send = transport.irecv(echo, peer, TAG), transport.isend(data, peer, TAG)
        wait_for(receive, limit_s, f"an answer of rank {peer}")
        times.append(time.perf_counter() - began)
        wait_for(send, limit_s)
        intact &= ping(repeat) == checksum(data)
    return {
        "latency_us": round(min(means) * 1e6, 2),
        "gigabytes_per_s": round(effort.link_bytes / min(times) / 1e9, 3),
        "intact": intact,
    }


def _answer(transport: Transport, device: torch.device, effort: Effort, patience_s: float) -> None:
    peer, limit_s = transport.rank - 1, effort.timeout_s
    word = torch.zeros(1, dtype=torch.int64)

    def hear(patience_s: float, asleep: bool = False) -> int:
        wait_for(transport.irecv(word, peer, TAG), patience_s, f"a message of rank {peer}", asleep)
        return int(word[0])

    def say(value: int) -> None:
        wait_for(transport.isend(torch.tensor([value]), peer, TAG), limit_s)

    value = hear(patience_s, asleep=True)
    say(value)
    while value != STOP:
        value = hear(limit_s)
        say(value)
    data = torch.empty(effort.link_bytes, dtype=torch.uint8, device=device)
    for _ in range(effort.repeats):
        value = hear(limit_s)
        receive = transport.irecv(data.zero_(), peer, TAG)
        say(value)
        wait_for(receive, limit_s, f"data of rank {peer}")
        say(0)  # it is here; the clock stops, and only then the checksum is made
        sum_of_data = checksum(data)
        hear(limit_s)
        say(sum_of_data)


def pattern(size: int, seed: int) -> torch.Tensor:
    """Make bytes in which a lost or doubled piece shows."""
    words = torch.arange(-(-size // 8), dtype=torch.int64) * 2_654_435_761 + seed
    return words.view(torch.uint8)[:size].contiguous()


def checksum(data: torch.Tensor) -> int:
    """CRC-32 of a byte tensor, wherever it lies."""
    return zlib.crc32(data.cpu().numpy().tobytes())


def check_links(links: Sequence[Mapping[str, Any]], device: str) -> list[Finding]:
    """Judge the measured links, each with source, dest, hosts, and either an error or its figures."""
    findings = [_lost(link) for link in links if link.get("error") or not link["intact"]]
    good = [link for link in links if not link.get("error")]
    if good:
        slowest = min(good, key=lambda link: link["gigabytes_per_s"])
        latest = max(good, key=lambda link: link["latency_us"])
        text = (
            f"{len(good)} link(s) from {device} memory: {_median(good, 'gigabytes_per_s'):.2f} GB/s (slowest "
            f"{slowest['gigabytes_per_s']:.2f}, {_name(slowest)}), {_median(good, 'latency_us'):.1f} us (longest "
            f"{latest['latency_us']:.1f}, {_name(latest)}); checksums compared"
        )
        findings.insert(0, Finding("links", "ok", text, measured=good))
    return findings + [warning for link in good for warning in _slow(link, good)]


def _slow(link: Mapping[str, Any], links: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Compare a link with the others of its kind: within a host, or between hosts."""
    others = [one for one in links if one is not link and _between_hosts(one) == _between_hosts(link)]
    if not others:
        return []
    remedy = (
        "check the cores that the two ranks are bound to, their network card, and other users of the host; then try "
        "again"
    )
    found = []
    usual = _median(others, "gigabytes_per_s")
    if link["gigabytes_per_s"] < SLOW_BANDWIDTH * usual:
        found.append(f"{link['gigabytes_per_s']:.2f} GB/s, but the others have {usual:.2f}")
    usual = _median(others, "latency_us")
    if link["latency_us"] > SLOW_LATENCY * usual:
        found.append(f"{link['latency_us']:.1f} us, but the others have {usual:.1f}")
    return [warn("links", f"{_name(link)} has {', and '.join(found)}", remedy)] if found else []


def _lost(link: Mapping[str, Any]) -> Finding:
    problem = link.get("error") or "the checksum of 16 MiB is wrong: data are corrupted on the way"
    remedy = "try another network for this MPI (UCX_TLS, FI_PROVIDER, OMPI_MCA_pml), or exclude one of the hosts"
    return fail("links", f"{_name(link)}: {problem}", remedy)


def _median(links: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(link[key] for link in links))


def _between_hosts(link: Mapping[str, Any]) -> bool:
    return bool(link["source_host"] != link["dest_host"])


def _name(link: Mapping[str, Any]) -> str:
    return f"rank {link['source']} ({link['source_host']}) -> {link['dest']} ({link['dest_host']})"
