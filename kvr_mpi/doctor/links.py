"""Checks of the chain's links, measured between all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvr_mpi.doctor.deadlines import wait_for
from kvr_mpi.doctor.findings import Finding, fail, warn
from kvr_mpi.errors import counted
from kvr_mpi.transport import Transport
from kvr_mpi.transport.links import Effort, measure_links

# Time limit of a whole measurement, as a multiple of the limit of a message.
LIMITS = 6
# A link is slow if it has less than a third of the others' bandwidth, or ten times their latency.
SLOW_BANDWIDTH, SLOW_LATENCY = 1 / 3, 10.0

NETWORK_REMEDY = "try another network for this MPI (UCX_TLS, FI_PROVIDER, OMPI_MCA_pml), or exclude one of the hosts"
HOST_REMEDY = "check the cores that its ranks are bound to, their network card, and other users of the host; try again"


def measure_chain(
    transport: Transport, device: torch.device, effort: Effort, timeout_s: float
) -> dict[str, Any] | None:
    """Measure this rank's link to the next rank; every rank calls this.

    Returns ``latency_us``, ``gigabytes_per_s`` and ``intact``; None on the last rank. Raises `SilentError` if a
    neighbor does not respond in time.
    """
    # Twice as long, since the neighbor may be waiting for its other neighbor.
    link = measure_links(transport, device, effort, lambda request, who: wait_for(request, 2 * timeout_s, who))
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
