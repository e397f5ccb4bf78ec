"""What is tried between ranks: links, clocks, a folder that all share; changed data are noticed, and silence ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_facts import only, place, statuses

from kvr_mpi.doctor import folder, links, steps
from kvr_mpi.doctor.deadlines import SilentError, gather_tried, meet
from kvr_mpi.doctor.findings import Finding, exit_code
from kvr_mpi.doctor.launch import Request
from kvr_mpi.errors import counted
from kvr_mpi.transport.links import Effort
from kvr_mpi.transport.local import LocalTransport, run_local

SMALL = Effort(rounds=2, repeats=2, first_bytes=4096, max_bytes=4096)
LONG = Effort(rounds=2, repeats=2, max_bytes=1 << 18)
GOOD: dict[str, Any] = {"value": {"latency_us": 10.0, "gigabytes_per_s": 4.0, "intact": True}}


class Noisy(LocalTransport):
    """A rank that changes a bit of every large message, and if it is in the last group a number of every long sum."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        if tensor.nbytes > 8 and tensor.dtype == torch.uint8:
            tensor = tensor.clone()
            tensor[77] ^= 1
        return super().isend(tensor, dest, tag)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        super().all_reduce(tensor)
        if tensor.nbytes > 1 << 16:  # not what they agree by
            tensor[-1] += 1

    def split(self, color: int) -> LocalTransport:
        group = super().split(color)
        return Noisy(group._hub, group.rank) if self.rank == 3 else group


class Mute(LocalTransport):
    """A rank whose messages go nowhere."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        return super().isend(tensor, dest, tag + 1_000_000)


def test_links_are_measured_and_changed_data_noticed() -> None:
    def work(world: LocalTransport) -> Any:
        mine = Noisy(world._hub, world.rank) if noisy else world
        return gather_tried(world, lambda: links.measure_chain(mine, torch.device("cpu"), SMALL, 20.0), 20.0)

    noisy = False
    first, second, last = run_local(3, work)[0]
    for link in (first["value"], second["value"]):
        assert link["intact"] and link["latency_us"] > 0 and link["gigabytes_per_s"] > 0
    assert last == {"value": None}
    noisy = True
    findings = links.check_links(run_local(2, work)[0], ["a", "b"], False)
    assert findings[-1].status == "fail" and "rank 0 (a) -> 1 (b)" in findings[-1].found
    assert exit_code(findings) == 69


def test_silence_ends() -> None:
    def heard(world: LocalTransport) -> list[str]:
        mine = Mute(world._hub, 1) if world.rank == 1 else world
        said = []
        for call, rest in ((links.measure_chain, (torch.device("cpu"), SMALL, 0.2)), (meet, (0.3,))):
            try:
                call(mine, *rest)
            except SilentError as error:
                said.append(str(error))
        return said

    of_links, of_meeting = run_local(2, heard)[0]
    assert of_links.startswith("an answer of rank 1 did not arrive") and "rank 1 did not answer" in of_meeting


def test_links_are_compared_with_their_kind() -> None:
    def link(speed: float, latency_us: float = 1.0) -> dict[str, Any]:
        return {"value": {**GOOD["value"], "gigabytes_per_s": speed, "latency_us": latency_us}}

    usual, last = [link(12.0), link(2.0), link(11.0)], {"value": None}
    (found,) = links.check_links([*usual, last], "aabb", False)
    assert found.status == "ok", "a network is slower than memory"
    assert {"latency_us", "gigabytes_per_s", "source", "dest"} <= set(found.measured[0])
    assert "slowest 2.00, rank 1 (a) -> 2 (b)" in found.found
    slow = links.check_links([*usual, link(1.0), last], "aabbb", False)[1:]
    assert [(one.status, "rank 3" in one.found) for one in slow] == [("warn", True)]
    late = links.check_links([*usual, link(12.0, 50.0), last], "aabbb", False)[1:]
    assert "50.0 us" in only(late).found
    lost = links.check_links([usual[0], {"error": "SilentError: no answer"}, last], "aaa", False)
    assert statuses(lost) == ["ok", "fail"]
    silent = links.check_links([usual[0], {"error": "SilentError: no answer"}], "aa", False)
    assert statuses(silent) == ["fail"], "the last rank has no link of its own to tell it with"


def test_shared_folder(tmp_path: Path) -> None:
    facts = [place(rank, f"node{rank}") for rank in range(3)]

    def work(world: LocalTransport) -> list[Finding]:
        path = tmp_path / "elsewhere" if world.rank == 2 and apart else tmp_path / "runs"
        return folder.check_shared(world, path, facts)

    apart = False
    (tmp_path / "runs").mkdir()
    assert "the same on all 3 hosts" in only(run_local(3, work)[0]).found
    (tmp_path / "elsewhere").mkdir()
    apart = True
    found = only(run_local(3, work)[0])
    assert found.status == "fail" and "rank 2 on node2" in found.found and "rank 1" not in found.found
    assert not list((tmp_path / "runs").iterdir())


def test_clocks() -> None:
    hosts = ["node1", "node1", "node2", "node1", "node2"]
    assert links.first_on_each_host(hosts) == [2]
    assert only(links.check_clocks({}, hosts[:2])).status == "ok"
    assert only(links.check_clocks({2: 0.2}, hosts)).status == "ok"
    found = only(links.check_clocks({2: -3.5}, hosts))
    assert found.status == "warn" and "node2 is 3.500 s behind node1" in found.found
    skews_s = run_local(3, lambda world: links.measure_clocks(world, [1, 2]))[0]
    assert set(skews_s) == {1, 2} and all(abs(skew_s) < 30 for skew_s in skews_s.values())


# Sums over groups


def examine(world: LocalTransport, size: int, hosts: str) -> Any:
    facts = [place(rank, host) for rank, host in enumerate(hosts)] if world.rank == 0 else []
    gpus = [None] * world.size
    request = Request(effort=LONG, patience_s=20.0, tensor_parallel=size)
    (step,) = (step for step in steps.STEPS if step.check == "tensor-parallel")
    return step.work(steps.Scene(world, request, {}, facts, None, hosts, gpus))


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
        return {"value": links.measure_sums(Noisy(world._hub, world.rank), 2, torch.device("cpu"), LONG, 20.0)}

    findings = links.check_sums(run_local(4, work), ["a"] * 4, 2)
    assert [status for status in statuses(findings) if status != "warn"] == ["ok", "fail"]  # warn: slow just now
    assert any("group 1 (ranks 2-3 on a): data are corrupted" in finding.found for finding in findings)


@pytest.mark.parametrize(("ranks", "size"), [(3, 2), (1, 2)])
def test_ranks_that_groups_do_not_divide_fail(ranks: int, size: int) -> None:
    found = run_local(ranks, lambda world: examine(world, size, "a" * ranks))
    assert only(found[0]).status == "fail" and f"a multiple of {size} ranks" in found[0][0].remedy
    assert not any(run_local(ranks, lambda world: examine(world, 1, "a" * ranks))), "of no groups nothing is said"
