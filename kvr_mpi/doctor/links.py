"""Checks of the chain's links, the groups' all-reduces, and the hosts' clocks, measured over a job's transport."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvr_mpi.doctor.deadlines import wait_for, within
from kvr_mpi.doctor.findings import Finding, fail, number_ranges, ok, some, warn
from kvr_mpi.errors import counted
from kvr_mpi.topology import place_in_group
from kvr_mpi.transport import Request, Transport
from kvr_mpi.transport.links import Effort, measure_links, measure_skews

# Time limit of a whole measurement, as a multiple of the limit of a message.
LIMITS = 6
# A link is slow if it has less than a third of the others' bandwidth, or ten times their latency.
SLOW_BANDWIDTH, SLOW_LATENCY = 1 / 3, 10.0
# The forecast is for a model like Llama 3.1 70B: layers, hidden size, with all-reduces in float32.
LAYERS, HIDDEN, PROMPT_TOKENS = 80, 8192, 1024
STATE_BYTES = 4 * HIDDEN
# Integers below this have exact float32 sums in any order.
MODULUS = 8191

NETWORK_REMEDY = "try another network for this MPI (UCX_TLS, FI_PROVIDER, OMPI_MCA_pml), or exclude one of the hosts"
HOST_REMEDY = "check the cores that its ranks are bound to, their network card, and other users of the host; try again"


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured link or group; `row` has its figures or ``error``, `crosses` tells whether it spans several hosts."""

    name: str
    crosses: bool
    row: Mapping[str, Any]

    @property
    def problem(self) -> str:
        """Why it cannot be used; empty if there is no problem."""
        corrupted = "" if self.row.get("intact", True) else "data are corrupted in transit: the checksum is wrong"
        return self.row.get("error") or corrupted

    @property
    def speed(self) -> float:
        """Gigabytes per second."""
        return float(self.row["gigabytes_per_s"])

    @property
    def latency(self) -> float:
        """Microseconds."""
        return float(self.row["latency_us"])


def measure_chain(
    transport: Transport, device: torch.device, effort: Effort, timeout_s: float
) -> dict[str, Any] | None:
    """Measure this rank's link to the next rank; every rank calls this.

    Returns
    -------
    dict or None
        ``latency_us``, ``gigabytes_per_s`` and ``intact``; None on the last rank.

    Raises
    ------
    SilentError
        If a neighbour does not respond in time.
    """
    limit_s = 2 * timeout_s  # for the first message: the neighbour may be waiting for its other neighbour

    def wait(request: Request, who: str) -> None:
        nonlocal limit_s
        wait_for(request, limit_s, who)
        limit_s = timeout_s

    link = measure_links(transport, device, effort, wait)
    return None if link is None else _row(link.latency_s, link.bytes_per_s, link.intact)


def measure_sums(
    world: Transport, tensor_parallel: int, device: torch.device, effort: Effort, timeout_s: float
) -> dict[str, Any]:
    """Measure all-reduces over this rank's group; every rank calls this.

    Returns
    -------
    dict
        ``latency_us`` for the hidden state of one token, ``gigabytes_per_s`` for a long tensor, ``intact``.

    Raises
    ------
    TimeoutError
        If a rank of the group does not respond.
    """
    group_number, _ = place_in_group(world.rank, tensor_parallel)
    limit_s = timeout_s * LIMITS / 3
    group = within(limit_s, lambda: world.split(group_number), "connecting the ranks of the group")
    return within(limit_s, lambda: _sums(group, device, effort), "an all-reduce over the ranks of the group")


def _sums(group: Transport, device: torch.device, effort: Effort) -> dict[str, Any]:
    """Time all-reduces, and compare the sums with the expected values."""

    def timed(mine: torch.Tensor) -> tuple[float, bool]:
        total = mine.clone()
        began = time.perf_counter()
        group.all_reduce(total)
        if total.device.type == "cuda":
            torch.cuda.synchronize(total.device)
        took_s = time.perf_counter() - began
        wanted = torch.zeros(len(mine))
        for rank in range(group.size):
            wanted += _of_rank(len(mine), rank)
        return took_s, torch.equal(total.cpu(), wanted)

    short, long = (_of_rank(count, group.rank).to(device) for count in (HIDDEN, effort.max_bytes // 4))
    timed(short)  # the first call sets up connections
    shorts = [timed(short) for _ in range(effort.rounds)]
    longs = [timed(long) for _ in range(effort.repeats)]
    return _row(min(shorts)[0], long.nbytes / min(longs)[0], all(intact for _, intact in [*shorts, *longs]))


def _row(latency_s: float, bytes_per_s: float, intact: bool) -> dict[str, Any]:
    return {"latency_us": round(latency_s * 1e6, 2), "gigabytes_per_s": round(bytes_per_s / 1e9, 3), "intact": intact}


def _of_rank(count: int, rank: int) -> torch.Tensor:
    """Generate numbers (count,) for which wrong sums are detectable."""
    return (torch.arange(count, dtype=torch.int64) * (1 + rank)).remainder(MODULUS).float()


def check_links(tried: Sequence[Mapping[str, Any]], hosts: Sequence[str], on_gpus: bool) -> list[Finding]:
    """Judge the links; for each rank `tried` has the ``value`` of `measure_chain`, or ``error``."""
    links = []
    for at, one in enumerate(tried[:-1]):
        ends = {"source": at, "dest": at + 1, "source_host": hosts[at], "dest_host": hosts[at + 1]}
        # The last rank has no link of its own, so its error is reported with the link to it.
        error = one.get("error") or (tried[-1].get("error") if at == len(tried) - 2 else None)
        name = f"rank {at} ({hosts[at]}) -> {at + 1} ({hosts[at + 1]})"
        row = ends | ({"error": error} if error else one["value"])
        links.append(Measured(name, hosts[at] != hosts[at + 1], row))

    return _judge("links", links, "link", f"from {'GPU' if on_gpus else 'host'} memory")


def check_sums(tried: Sequence[Mapping[str, Any]], hosts: Sequence[str], size: int) -> list[Finding]:
    """Judge the all-reduces measured by every rank (`measure_sums`); `hosts` has the host of each rank."""
    groups = [_group(tried, hosts, first, size) for first in range(0, len(tried), size)]

    findings = _judge("tensor-parallel", groups, "tensor-parallel group", f"of {size} ranks", _forecast_sums)
    if across := [one.name for one in groups if one.crosses]:
        text = f"{counted(len(across), 'group')} on several hosts, so all-reduces go over the network: {some(across)}"
        remedy = f"start a multiple of {size} ranks on each host, numbered block-wise"
        findings.append(warn("tensor-parallel", text, remedy))
    return findings


def _group(tried: Sequence[Mapping[str, Any]], hosts: Sequence[str], first: int, size: int) -> Measured:
    """Combine the measurements of a group's ranks, using the slowest rank."""
    members, number = tried[first : first + size], place_in_group(first, size)[0]
    ranks, places = list(range(first, first + size)), list(dict.fromkeys(hosts[first : first + size]))
    name = f"group {number} (ranks {number_ranges(ranks)} on {some(places)})"
    row: dict[str, Any] = {"group": number, "ranks": ranks, "hosts": places}
    errors = [f"rank {rank}: {one['error']}" for rank, one in zip(ranks, members, strict=True) if one.get("error")]
    if errors:
        return Measured(name, len(places) > 1, {**row, "error": some(errors, 2)})
    values = [one["value"] for one in members]
    row |= {
        "latency_us": max(one["latency_us"] for one in values),
        "gigabytes_per_s": min(one["gigabytes_per_s"] for one in values),
        "intact": all(one["intact"] for one in values),
    }
    return Measured(name, len(places) > 1, row)


def _forecast_sums(gigabytes_per_s: float, latency_us: float) -> str:
    """Forecast the all-reduces of a large model."""
    prompt_s = (2 * LAYERS + 1) * PROMPT_TOKENS * STATE_BYTES / gigabytes_per_s / 1e9
    token_ms = (2 * LAYERS + 1) * latency_us / 1e3
    return (
        f". All-reduces of Llama 3.1 70B would take {prompt_s:.2f} s for {PROMPT_TOKENS} prompt tokens, "
        f"{token_ms:.1f} ms per decoded token"
    )


def _judge(
    check: str,
    measured: Sequence[Measured],
    noun: str,
    about: str,
    forecast: Callable[[float, float], str] = lambda gigabytes_per_s, latency_us: "",
) -> list[Finding]:
    """Describe usable links or groups, and list those that fail or are much slower than others."""
    good, findings = [one for one in measured if not one.row.get("error")], list[Finding]()
    if good:
        slowest, latest = min(good, key=lambda one: one.speed), max(good, key=lambda one: one.latency)
        text = (
            f"{counted(len(good), noun)} {about}: {statistics.median(one.speed for one in good):.2f} "
            f"GB/s (slowest {slowest.speed:.2f}, {slowest.name}), {statistics.median(one.latency for one in good):.1f} "
            f"us (longest {latest.latency:.1f}, {latest.name}); data compared"
        )
        text += forecast(slowest.speed, latest.latency)
        findings.append(Finding(check, "ok", text, measured=[one.row for one in good]))
    findings += [fail(check, f"{one.name}: {one.problem}", NETWORK_REMEDY) for one in measured if one.problem]
    for one in good:
        others = [other for other in good if other is not one and other.crosses == one.crosses]
        if not others:
            continue
        speed = statistics.median(other.speed for other in others)
        latency = statistics.median(other.latency for other in others)
        if one.speed < SLOW_BANDWIDTH * speed or one.latency > SLOW_LATENCY * latency:
            text = (
                f"{one.name}: {one.speed:.2f} GB/s and {one.latency:.1f} us; the others have {speed:.2f} and "
                f"{latency:.1f}"
            )
            findings.append(warn(check, text, HOST_REMEDY))
    return findings


# Limits for clock offsets: log lines, deadlines and file times are compared across hosts.
TIMEOUT_S = 20.0
MAX_SKEW_S = 1.0


def first_on_each_host(hosts: Sequence[str]) -> list[int]:
    """Return the first rank of every host except rank 0's."""
    return [hosts.index(host) for host in list(dict.fromkeys(hosts))[1:]]


def measure_clocks(transport: Transport, ranks: Sequence[int]) -> dict[int, float]:
    """Estimate every rank's clock offset in seconds, on rank 0; every rank calls this. Raises `SilentError`."""
    has_begun = False

    def wait(request: Request, who: str) -> None:
        nonlocal has_begun
        is_first, has_begun = not has_begun and transport.rank != 0, True  # rank 0 may measure other ranks first
        wait_for(request, TIMEOUT_S * (1 + len(ranks) if who == "rank 0" else 1), who, asleep=is_first)

    return {rank: skew.ahead_s for rank, skew in measure_skews(transport, ranks, wait).items()}


def check_clocks(skews_s: Mapping[int, float], hosts: Sequence[str]) -> list[Finding]:
    """Judge the clock offsets."""
    if not skews_s:
        return [ok("clocks", "one host, one clock")]
    rank = max(skews_s, key=lambda rank: abs(skews_s[rank]))
    skew_s = skews_s[rank]
    text = f"{hosts[rank]} is {abs(skew_s):.3f} s {'ahead of' if skew_s > 0 else 'behind'} {hosts[0]}, the largest skew"
    if abs(skew_s) <= MAX_SKEW_S:
        return [ok("clocks", text)]
    remedy = "ask the administrators to check chrony or ntpd; until then, times of different hosts cannot be compared"
    return [warn("clocks", text, remedy)]
