"""What is tried between ranks: links, clocks, a folder that all share; changed data are noticed, and silence ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from made_facts import only, place, statuses

from kvr_mpi.doctor import folder, links
from kvr_mpi.doctor.deadlines import SilentError, gather_tried, meet, within
from kvr_mpi.doctor.findings import Finding, exit_code
from kvr_mpi.transport.links import Effort
from kvr_mpi.transport.local import LocalTransport, run_local

SMALL = Effort(rounds=2, repeats=2, first_bytes=4096, max_bytes=4096)


class Noisy(LocalTransport):
    """A link that changes a bit of every large message."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        if tensor.nbytes > 8:
            tensor = tensor.clone()
            tensor[77] ^= 1
        return super().isend(tensor, dest, tag)


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
    findings = links.check_links(run_local(2, work)[0], ["a", "b"], "host")
    assert findings[-1].status == "fail" and "rank 0 (a) -> 1 (b)" in findings[-1].found
    assert exit_code(findings) == 69


def test_silence_ends() -> None:
    def heard(world: LocalTransport) -> list[str]:
        mine = Mute(world._hub, 1) if world.rank == 1 else world
        said = []
        for call in (
            lambda: links.measure_chain(mine, torch.device("cpu"), SMALL, 0.2),
            lambda: meet(mine, 0.3),
        ):
            try:
                call()
            except SilentError as error:
                said.append(str(error))
        return said

    of_links, of_meeting = run_local(2, heard)[0]
    assert of_links.startswith("an answer of rank 1 did not arrive") and "rank 1 did not answer" in of_meeting


def test_links_are_compared_with_their_kind() -> None:
    def link(speed: float, latency_us: float = 1.0) -> dict[str, Any]:
        return {"value": {"gigabytes_per_s": speed, "latency_us": latency_us, "intact": True}}

    usual, last = [link(12.0), link(2.0), link(11.0)], {"value": None}
    (found,) = links.check_links([*usual, last], "aabb", "host")
    assert found.status == "ok", "a network is slower than memory"
    assert {"latency_us", "gigabytes_per_s", "source", "dest"} <= set(found.measured[0])
    assert "slowest 2.00, rank 1 (a) -> 2 (b)" in found.found
    slow = links.check_links([*usual, link(1.0), last], "aabbb", "host")[1:]
    assert [(one.status, "rank 3" in one.found) for one in slow] == [("warn", True)]
    late = links.check_links([*usual, link(12.0, 50.0), last], "aabbb", "host")[1:]
    assert "50.0 us" in only(late).found
    lost = links.check_links([usual[0], {"error": "SilentError: no answer"}, last], "aaa", "host")
    assert statuses(lost) == ["ok", "fail"]
    silent = links.check_links([usual[0], {"error": "SilentError: no answer"}], "aa", "host")
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
    facts = [place(0), place(1), place(2, "node2")]
    assert links.first_on_each_host(facts) == [2]
    assert only(links.check_clocks({}, facts[:2])).status == "ok"
    assert only(links.check_clocks({2: 0.2}, facts)).status == "ok"
    found = only(links.check_clocks({2: -3.5}, facts))
    assert found.status == "warn" and "node2 is 3.500 s behind node1" in found.found
    skews_s = run_local(3, lambda world: links.measure_clocks(world, [1, 2]))[0]
    assert set(skews_s) == {1, 2} and all(abs(skew_s) < 30 for skew_s in skews_s.values())


def test_one_broken_rank_does_not_hold_the_others() -> None:
    def work(world: LocalTransport) -> list[dict[str, Any]]:
        return gather_tried(world, lambda: 1 // world.rank, 5.0)

    tried = run_local(3, work)[0]
    assert tried[1:] == [{"value": 1}, {"value": 0}]
    assert tried[0]["error"].startswith("ZeroDivisionError")


def test_within() -> None:
    assert within(5.0, lambda: 3, "three") == 3
    with pytest.raises(KeyError):
        within(5.0, lambda: {}["x"], "nothing")
    with pytest.raises(TimeoutError, match="a dead disk"):
        within(0.1, threading.Event().wait, "a dead disk")
