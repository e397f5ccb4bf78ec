"""Links are measured and compared, changed data are noticed, and silence ends."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from made_facts import only, statuses

from kvr_mpi.doctor import links
from kvr_mpi.doctor.deadlines import SilentError, gather_tried, meet, within
from kvr_mpi.doctor.findings import exit_code
from kvr_mpi.transport.local import LocalTransport, run_local

SMALL = links.Effort(rounds=2, batches=1, link_bytes=4096, repeats=2, timeout_s=20.0)


def test_links_are_measured() -> None:
    cpu = torch.device("cpu")
    found = run_local(3, lambda world: links.measure_links(world, cpu, SMALL))
    assert found[2] is None
    for link in found[:2]:
        assert link is not None
        assert link["intact"] and link["latency_us"] > 0 and link["gigabytes_per_s"] > 0


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
        return links.measure_links(Noisy(world._hub, world.rank), torch.device("cpu"), SMALL)

    link = run_local(2, work)[0]
    assert not link["intact"]
    described = {**link, "source": 0, "dest": 1, "source_host": "a", "dest_host": "b"}
    findings = links.check_links([described], "host")
    assert findings[-1].status == "fail" and "rank 0 (a) -> 1 (b)" in findings[-1].found
    assert exit_code(findings) == 69


def test_silence_ends() -> None:
    def links_of(world: LocalTransport) -> str:
        effort = replace(SMALL, timeout_s=0.2)
        try:
            links.measure_links(Mute(world._hub, world.rank), torch.device("cpu"), effort)
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

    assert "rank(s) 1 did not answer" in run_local(3, meeting)[0]


def test_links_are_compared_with_their_kind() -> None:
    def link(at: int, hosts: str, speed: float, latency_us: float = 1.0) -> dict[str, Any]:
        ends = {"source": at, "dest": at + 1, "source_host": hosts[0], "dest_host": hosts[1]}
        return {**ends, "gigabytes_per_s": speed, "latency_us": latency_us, "intact": True}

    usual = [link(0, "aa", 12.0), link(1, "ab", 2.0), link(2, "bb", 11.0)]
    (found,) = links.check_links(usual, "host")
    assert found.status == "ok", "a network is slower than memory"
    assert {"latency_us", "gigabytes_per_s"} <= set(found.measured[0])
    assert "slowest 2.00, rank 1 (a) -> 2 (b)" in found.found
    slow = links.check_links([*usual, link(3, "bb", 1.0)], "host")[1:]
    assert [(one.status, "rank 3" in one.found) for one in slow] == [("warn", True)]
    late = links.check_links([*usual, link(3, "bb", 12.0, 50.0)], "host")[1:]
    assert "50.0 us" in only(late).found
    lost = links.check_links([usual[0], {**usual[1], "error": "SilentError: no answer"}], "host")
    assert statuses(lost) == ["ok", "fail"]


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
