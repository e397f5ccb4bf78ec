"""Links are measured and compared, changed data are noticed, and silence ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from made_facts import only, statuses

from kvr_mpi.doctor import links
from kvr_mpi.doctor.deadlines import SilentError, gather_tried, meet, within
from kvr_mpi.doctor.findings import exit_code
from kvr_mpi.transport.links import Effort, measure_links
from kvr_mpi.transport.local import LocalTransport, run_local

SMALL = Effort(rounds=2, repeats=2, first_bytes=4096, max_bytes=4096)


def test_links_are_measured() -> None:
    found = run_local(3, lambda world: measure_links(world, torch.device("cpu"), SMALL))
    assert found[2] is None
    for link in found[:2]:
        assert link is not None
        assert link.intact and link.latency_s > 0 and link.bytes_per_s > 0


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


def test_changed_data_are_noticed() -> None:
    def work(world: LocalTransport) -> Any:
        noisy = Noisy(world._hub, world.rank)
        return gather_tried(world, lambda: links.measure_chain(noisy, torch.device("cpu"), SMALL, 20.0), 20.0)

    findings = links.check_links(run_local(2, work)[0], ["a", "b"], "host")
    assert findings[-1].status == "fail" and "rank 0 (a) -> 1 (b)" in findings[-1].found
    assert exit_code(findings) == 69


def test_silence_ends() -> None:
    def links_of(world: LocalTransport) -> str:
        try:
            links.measure_chain(Mute(world._hub, world.rank), torch.device("cpu"), SMALL, 0.2)
        except SilentError as error:
            return str(error)
        return ""

    assert run_local(2, links_of)[0].startswith("an answer of rank 1 did not arrive")

    def meeting(world: LocalTransport) -> str:
        try:
            meet(world if world.rank != 1 else Mute(world._hub, 1), 0.3)
        except SilentError as error:
            return str(error)
        return ""

    assert "rank 1 did not answer" in run_local(3, meeting)[0]


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
