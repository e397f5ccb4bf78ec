"""Checks of the chain's links, measured between all ranks."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvr_mpi.doctor.findings import Finding, fail, warn
from kvr_mpi.errors import TransportError, counted
from kvr_mpi.transport import Request, Transport, gather_json
from kvr_mpi.transport.links import Effort, measure_links

# Limit for a message to arrive; the neighbor may be waiting for its other neighbor.
TIMEOUT_S = 40.0
# After this time, waiting sleeps between polls: microseconds no longer matter.
SPIN_S, NAP_S = 0.02, 0.001
EFFORT = Effort(rounds=200)
# A link is slow if it has less than a third of the others' bandwidth, or ten times their latency.
SLOW_BANDWIDTH, SLOW_LATENCY = 1 / 3, 10.0

NETWORK_REMEDY = "try another network for this MPI (UCX_TLS, FI_PROVIDER, OMPI_MCA_pml), or exclude one of the hosts"
HOST_REMEDY = "check the cores that its ranks are bound to, their network card, and other users of the host; try again"


def check_chain(transport: Transport, hosts: Sequence[str], gpus: Sequence[int | None]) -> list[Finding]:
    """Measure the links of all ranks, from the memory of their GPUs if they have some; every rank calls this."""
    gpu = gpus[transport.rank]
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    tried: dict[str, Any] = {}
    try:
        tried["value"] = measure_chain(transport, device)
    except Exception as error:  # the others must not wait for this rank
        tried["error"] = f"{type(error).__name__}: {error}"
        print(f"kvr doctor: rank {transport.rank}: {tried['error']}", file=sys.stderr, flush=True)
    found = gather_json(transport, tried)
    return [] if transport.rank else check_links(found, hosts, gpu is not None)


def measure_chain(
    transport: Transport, device: torch.device, effort: Effort | None = None, timeout_s: float = TIMEOUT_S
) -> dict[str, Any] | None:
    """Measure this rank's link to the next rank; every rank calls this.

    Returns ``latency_us``, ``gigabytes_per_s`` and ``intact``; None on the last rank. Raises `TransportError` if a
    neighbor does not respond in time.
    """

    def wait(request: Request, who: str) -> None:
        began = time.monotonic()
        while not request.test():
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                raise TransportError(f"{who} did not arrive within {timeout_s:.0f} s")
            if waited_s > SPIN_S:
                time.sleep(NAP_S)
            else:
                os.sched_yield()  # with more ranks than cores, the peer may need this core

    link = measure_links(transport, device, effort or EFFORT, wait)
    if link is None:
        return None
    latency_us, gigabytes_per_s = round(link.latency_s * 1e6, 2), round(link.bytes_per_s / 1e9, 3)
    return {"latency_us": latency_us, "gigabytes_per_s": gigabytes_per_s, "intact": link.intact}


def check_links(tried: Sequence[Mapping[str, Any]], hosts: Sequence[str], on_gpus: bool) -> list[Finding]:
    """Judge the links; for each rank `tried` has the ``value`` of `measure_chain`, or ``error``."""
    links, bad = list[dict[str, Any]](), list[Finding]()
    for at, one in enumerate(tried[:-1]):
        name = f"rank {at} ({hosts[at]}) -> {at + 1} ({hosts[at + 1]})"
        # The last rank has no link of its own, so its error is reported with the link to it.
        error = one.get("error") or (tried[-1].get("error") if at == len(tried) - 2 else None)
        if not error and not one["value"]["intact"]:
            error = "data are corrupted in transit: the checksum is wrong"
        if error:
            bad.append(fail("links", f"{name}: {error}", NETWORK_REMEDY))
        else:
            ends = {"source": at, "dest": at + 1, "source_host": hosts[at], "dest_host": hosts[at + 1]}
            links.append({"name": name, **ends, **one["value"]})
    if not links:
        return bad
    slowest = min(links, key=lambda link: link["gigabytes_per_s"])
    latest = max(links, key=lambda link: link["latency_us"])
    speed, latency = _medians(links)
    text = (
        f"{counted(len(links), 'link')} from {'GPU' if on_gpus else 'host'} memory: {speed:.2f} GB/s (slowest "
        f"{slowest['gigabytes_per_s']:.2f}, {slowest['name']}), {latency:.1f} us (longest {latest['latency_us']:.1f}, "
        f"{latest['name']}); data compared"
    )
    return [Finding("links", "ok", text, measured=links), *bad, *_slow_links(links)]


def _slow_links(links: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Warn of links that are much slower than the others, within hosts or between them."""
    found = []
    for one in links:
        crosses = one["source_host"] != one["dest_host"]
        alike = [each for each in links if (each["source_host"] != each["dest_host"]) == crosses and each is not one]
        if not alike:
            continue
        speed, latency = _medians(alike)
        if one["gigabytes_per_s"] < SLOW_BANDWIDTH * speed or one["latency_us"] > SLOW_LATENCY * latency:
            text = f"{one['name']}: {one['gigabytes_per_s']:.2f} GB/s and {one['latency_us']:.1f} us; the others have "
            found.append(warn("links", f"{text}{speed:.2f} and {latency:.1f}", HOST_REMEDY))
    return found


def _medians(links: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    speed, latency = (statistics.median(one[key] for one in links) for key in ("gigabytes_per_s", "latency_us"))
    return speed, latency
