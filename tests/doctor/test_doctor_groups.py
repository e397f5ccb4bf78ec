"""Sums over groups are timed and compared, wrong ones and groups over several hosts are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_facts import only, place, statuses

from kvr_mpi.doctor import links, steps
from kvr_mpi.doctor.launch import Request
from kvr_mpi.errors import counted
from kvr_mpi.transport.links import Effort
from kvr_mpi.transport.local import LocalTransport, run_local

SMALL = Effort(rounds=2, repeats=2, max_bytes=1 << 18)
CPU = torch.device("cpu")
GOOD: dict[str, Any] = {"value": {"latency_us": 10.0, "gigabytes_per_s": 4.0, "intact": True}}


class Noisy(LocalTransport):
    """A rank that changes a number of every long sum."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        super().all_reduce(tensor)
        if tensor.nbytes > 1 << 16:  # not what they agree by
            tensor[-1] += 1

    def split(self, color: int) -> LocalTransport:
        group = super().split(color)
        return Noisy(group._hub, group.rank) if self.rank == 3 else group


def examine(world: LocalTransport, size: int, hosts: str) -> Any:
    facts = [place(rank, host) for rank, host in enumerate(hosts)] if world.rank == 0 else []
    request = Request(effort=SMALL, patience_s=20.0, tensor_parallel=size)
    (step,) = (step for step in steps.STEPS if step.check == "tensor-parallel")
    return step.work(steps.Scene(world, request, {}, facts, None))


@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (3, 3)])
def test_every_group_is_summed_and_timed(ranks: int, size: int) -> None:
    found = run_local(ranks, lambda world: examine(world, size, "a" * ranks))
    assert found[1:] == [[]] * (ranks - 1), "the first rank tells"
    finding = found[0][0]  # others, if any, say that a group is slow just now
    assert finding.status == "ok"
    assert f"{counted(ranks // size, 'tensor-parallel group')} of {size} ranks" in finding.found
    assert [one["ranks"] for one in finding.measured] == [[*range(at, at + size)] for at in range(0, ranks, size)]
    assert all(one["latency_us"] > 0 and one["gigabytes_per_s"] > 0 for one in finding.measured)


def test_a_wrong_sum_fails_and_names_the_group() -> None:
    def work(world: LocalTransport) -> Any:
        return {"value": links.measure_sums(Noisy(world._hub, world.rank), 2, CPU, SMALL, 20.0)}

    findings = links.check_sums(run_local(4, work), ["a"] * 4, 2)
    assert [status for status in statuses(findings) if status != "warn"] == ["ok", "fail"]  # warn: slow just now
    assert any("group 1 (ranks 2-3 on a): data are corrupted" in finding.found for finding in findings)


def test_groups_are_compared_with_their_kind() -> None:
    slow = {"value": {**GOOD["value"], "gigabytes_per_s": 0.5}}
    found = links.check_sums([GOOD, GOOD, GOOD, slow, slow, slow], [*"aaaabc"], 2)
    assert statuses(found) == ["ok", "warn", "warn"]
    assert "group 1 (ranks 2-3 on a): 0.50 GB/s" in found[1].found, "a network is slower than memory"
    assert "1 group on several hosts" in found[2].found and "group 2 (ranks 4-5 on b, c)" in found[2].found
    assert "a multiple of 2 ranks on each host" in found[2].remedy
    found = links.check_sums([GOOD, GOOD, {"error": "TimeoutError: no"}, GOOD], ["a"] * 4, 2)
    assert statuses(found) == ["ok", "fail"] and "group 1 (ranks 2-3 on a): rank 2: TimeoutError: no" in found[1].found


@pytest.mark.parametrize(("ranks", "size"), [(3, 2), (1, 2)])
def test_ranks_that_groups_do_not_divide_fail(ranks: int, size: int) -> None:
    found = run_local(ranks, lambda world: examine(world, size, "a" * ranks))
    assert only(found[0]).status == "fail" and f"a multiple of {size} ranks" in found[0][0].remedy
    assert not any(run_local(ranks, lambda world: examine(world, 1, "a" * ranks))), "of no groups nothing is said"
