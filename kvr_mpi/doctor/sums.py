"""What stages of several ranks need: right sums over their ranks, in how long; of all stages at once, as in jobs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvr_mpi.doctor.deadlines import within
from kvr_mpi.doctor.findings import Finding, fail, number_ranges, some, warn
from kvr_mpi.doctor.links import SLOW_BANDWIDTH, SLOW_LATENCY, Effort
from kvr_mpi.topology import place_in_stage
from kvr_mpi.transport import Transport

# What is forecast is of a model like Llama 3.1 70B: layers, elements of a token's state, in float32 as they are summed.
LAYERS, HIDDEN, PROMPT_TOKENS = 80, 8192, 1024
STATE_BYTES = 4 * HIDDEN
# So many times as long as a message may take are meeting and summing given, and a rank's lateness.
LIMITS = 6
# Sums of whole numbers up to here are exact in float32, whatever their order.
MODULUS = 8191


def measure_sums(world: Transport, ranks_per_stage: int, device: torch.device, effort: Effort) -> dict[str, Any]:
    """Sum over this rank's stage; every rank calls this.

    Returns
    -------
    dict
        ``latency_us`` of the state of one token, ``gigabytes_per_s`` of a long tensor, ``intact``.

    Raises
    ------
    TimeoutError
        If some rank of the stage does not come.
    """
    stage_number, _ = place_in_stage(world.rank, ranks_per_stage)
    limit_s = effort.timeout_s * LIMITS / 3
    stage = within(limit_s, lambda: world.split(stage_number), "meeting the other ranks of the stage")
    return within(limit_s, lambda: _measure(stage, device, effort), "a sum over the ranks of the stage")


def _measure(stage: Transport, device: torch.device, effort: Effort) -> dict[str, Any]:
    """Time sums, and hold them against what they are to be."""
    short, long = (_of_rank(count, stage.rank).to(device) for count in (HIDDEN, effort.link_bytes // 4))
    stage.all_reduce(short.clone())  # the first one sets connections up
    means, ends = [], time.monotonic() + effort.latency_s
    for _ in range(effort.batches):
        took_s = 0.0
        for _ in range(effort.rounds):
            took_s += _timed(stage, short)[0]
        means.append(took_s / effort.rounds)
        # All have to leave at once: the first rank looks at the clock.
        over = torch.tensor([float(stage.rank == 0 and time.monotonic() > ends)], device=device)
        stage.all_reduce(over)
        if float(over) > 0:
            break
    timed = [_timed(stage, long) for _ in range(effort.repeats)]
    wanted = _sum_of_ranks(len(long), stage.size)
    return {
        "latency_us": round(min(means) * 1e6, 2),
        "gigabytes_per_s": round(long.nbytes / min(took_s for took_s, _ in timed) / 1e9, 3),
        "intact": all(torch.equal(found.cpu(), wanted) for _, found in timed),
    }


def _timed(stage: Transport, mine: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Sum a copy; return how long that took."""
    total = mine.clone()
    began = time.perf_counter()
    stage.all_reduce(total)
    if total.device.type == "cuda":
        torch.cuda.synchronize(total.device)
    return time.perf_counter() - began, total


def _of_rank(count: int, rank: int) -> torch.Tensor:
    """Make numbers (count,) in which a lost or doubled piece, or another rank's, shows in the sum."""
    steps = torch.arange(count, dtype=torch.int64) * (1 + rank)
    return steps.remainder(MODULUS).float()


def _sum_of_ranks(count: int, size: int) -> torch.Tensor:
    total = torch.zeros(count)
    for rank in range(size):
        total += _of_rank(count, rank)
    return total


def check_layout(ranks: int, ranks_per_stage: int) -> list[Finding]:
    """Refuse a number of ranks that stages do not divide."""
    if ranks % ranks_per_stage == 0:
        return []
    text = f"{ranks} rank(s) cannot be divided into stages of {ranks_per_stage}"
    return [fail("stages", text, f"start a multiple of {ranks_per_stage} ranks, or choose another number for a stage")]


def check_sums(found: Sequence[Mapping[str, Any]], hosts: Sequence[str], ranks_per_stage: int) -> list[Finding]:
    """Judge what every rank measured, or why it could not.

    Parameters
    ----------
    found : sequence of dict
        Of each rank: of `measure_sums`, or its ``error``.
    hosts : sequence of str
        Of each rank.
    """
    stages = [_of_stage(found, hosts, first, ranks_per_stage) for first in range(0, len(found), ranks_per_stage)]
    findings = [_wrong(one) for one in stages if one.get("error") or not one["intact"]]
    good = [one for one in stages if not one.get("error")]
    if good:
        slowest, latest = min(good, key=_speed), max(good, key=_latency)
        prompt_s = (2 * LAYERS + 1) * PROMPT_TOKENS * STATE_BYTES / _speed(slowest) / 1e9
        token_s = (2 * LAYERS + 1) * _latency(latest) / 1e6
        text = (
            f"{len(good)} stage(s) of {ranks_per_stage} ranks: sums of long tensors at "
            f"{statistics.median(map(_speed, good)):.2f} GB/s (slowest {_speed(slowest):.2f}, {_name(slowest)}), of "
            f"one token in {statistics.median(map(_latency, good)):.0f} us (longest {_latency(latest):.0f}, "
            f"{_name(latest)}); sums compared. Forecast for Llama 3.1 70B: {prompt_s:.2f} s for {PROMPT_TOKENS} prompt "
            f"tokens, {1e3 * token_s:.1f} ms per decoded token"
        )
        findings.insert(0, Finding("stages", "ok", text, measured=good))
    return [*findings, *_crossing(stages, ranks_per_stage), *(one for stage in good for one in _slow(stage, good))]


def _of_stage(found: Sequence[Mapping[str, Any]], hosts: Sequence[str], first: int, size: int) -> dict[str, Any]:
    """Put together what the ranks of a stage found: its slowest rank counts."""
    members = found[first : first + size]
    about: dict[str, Any] = {
        "stage": place_in_stage(first, size)[0],
        "ranks": list(range(first, first + size)),
        "hosts": list(dict.fromkeys(hosts[first : first + size])),
    }
    errors = [f"rank {first + at}: {one['error']}" for at, one in enumerate(members) if one.get("error")]
    if errors:
        return {**about, "error": some(errors, 2)}
    return about | {
        "latency_us": max(map(_latency, members)),
        "gigabytes_per_s": min(map(_speed, members)),
        "intact": all(one["intact"] for one in members),
    }


def _wrong(stage: Mapping[str, Any]) -> Finding:
    problem = stage.get("error") or "the sums of its ranks are wrong: data are corrupted on the way"
    remedy = "try another network for this MPI (UCX_TLS, FI_PROVIDER, OMPI_MCA_pml), or exclude one of the hosts"
    return fail("stages", f"{_name(stage)}: {problem}", remedy)


def _crossing(stages: Sequence[Mapping[str, Any]], size: int) -> list[Finding]:
    """Warn of stages whose sums go over the links between hosts."""
    across = [one for one in stages if len(one["hosts"]) > 1]
    if not across:
        return []
    text = f"{len(across)} stage(s) span several hosts, so sums go over the network: {some(list(map(_name, across)))}"
    return [warn("stages", text, f"start a multiple of {size} ranks on each host, numbered block-wise")]


def _slow(stage: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Compare a stage with the others of its kind: on one host, or on several."""
    others = [one for one in stages if one is not stage and (len(one["hosts"]) > 1) == (len(stage["hosts"]) > 1)]
    if not others:
        return []
    speed, latency = statistics.median(map(_speed, others)), statistics.median(map(_latency, others))
    if _speed(stage) >= SLOW_BANDWIDTH * speed and _latency(stage) <= SLOW_LATENCY * latency:
        return []
    text = (
        f"{_name(stage)} sums at {_speed(stage):.2f} GB/s and in {_latency(stage):.0f} us; the others have {speed:.2f} "
        f"and {latency:.0f}"
    )
    return [
        warn("stages", text, "check the cores that its ranks are bound to, and other users of the host; then try again")
    ]


def _speed(measured: Mapping[str, Any]) -> float:
    return float(measured["gigabytes_per_s"])


def _latency(measured: Mapping[str, Any]) -> float:
    return float(measured["latency_us"])


def _name(stage: Mapping[str, Any]) -> str:
    return f"stage {stage['stage']} (ranks {number_ranges(stage['ranks'])} on {some(stage['hosts'])})"
