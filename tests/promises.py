"""What every transport promises to two ranks or more, and counters that they share."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from kvr_mpi.errors import ConfigError, TransportError
from kvr_mpi.transport import FailedTogetherError, Transport, gather_json, on_root, share_json, together
from kvr_mpi.transport.counters import open_counters


def keep_promises(world: Transport) -> None:
    """Raise unless this transport keeps them; every rank calls this."""
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        for elements in (1, 250, 10_001):
            mine = (torch.arange(elements) % 97 + world.rank).to(dtype)
            theirs = torch.empty(elements, dtype=dtype)
            receive, send = world.irecv(theirs, before, 5), world.isend(mine, after, 5)
            receive.wait(), send.wait()
            assert receive.test() and send.test()
            assert torch.equal(theirs, (torch.arange(elements) % 97 + before).to(dtype))
    _sums(world)
    _order(world, before, after)
    for size in (0, 1, 100_000):
        data = bytes([world.size - 1]) * size
        assert world.broadcast(data if world.rank == world.size - 1 else b"", world.size - 1) == data
    gathered = world.gather(bytes([world.rank]) * world.rank)
    assert gathered == ([bytes([rank]) * rank for rank in range(world.size)] if world.rank == 0 else [])
    assert share_json(world, {"text": "ü"} if world.rank == 0 else None) == {"text": "ü"}
    half = world.split(world.rank % 2)
    members = share_json(half, gather_json(half, world.rank))
    assert members == list(range(world.rank % 2, world.size, 2)) and half.rank == members.index(world.rank)
    count = torch.ones(3)
    half.all_reduce(count)
    assert count.tolist() == [len(members)] * 3
    assert 0 <= world.local_rank < world.local_size <= world.size and world.tag_ub >= 32_767

    def fail() -> None:
        if world.rank == 1:
            raise ConfigError("rank 1 has no wish to go on")

    with pytest.raises(FailedTogetherError) as caught:
        together(world, fail)
    assert caught.value.exit_code == 78 and (caught.value.cause is not None) == (world.rank == 1)
    assert on_root(world, lambda: world.rank) == (0 if world.rank == 0 else None)
    if world.rank == 0:
        world.isend(torch.zeros(5), 1, 77).wait()
    elif world.rank == 1:
        with pytest.raises(TransportError, match="expected 24 bytes from rank 0.*, but received 20"):
            world.irecv(torch.zeros(6), 0, 77).wait()
    world.barrier()


def _sums(world: Transport) -> None:
    """The same bits everywhere, whatever is rounded; nothing, at once, and round a ring."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for shape in ((1,), (2, 3), (30_001,), (0,)):
            every = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
            every = [(10 * each).to(dtype) for each in every]
            total = every[world.rank].clone()
            world.all_reduce(total)
            rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
            truth: Any = sum(each.double() for each in every)
            torch.testing.assert_close(total.double(), truth, rtol=rounding, atol=rounding)
            bits = share_json(world, gather_json(world, total.view(-1).view(torch.uint8).tolist()))
            assert all(one == bits[0] for one in bits)
    with pytest.raises(TransportError, match="not contiguous"):
        world.all_reduce(torch.zeros(4, 4).t())


def _order(world: Transport, before: int, after: int) -> None:
    """In order for one tag, apart for different tags."""
    first, second, other = (torch.empty(3) for _ in range(3))
    requests = [world.irecv(first, before, 1), world.irecv(second, before, 1), world.irecv(other, before, 2)]
    messages = [(1.0, 1), (2.0, 1), (9.0, 2)] if world.in_streams else [(9.0, 2), (1.0, 1), (2.0, 1)]
    sends = [world.isend(torch.full((3,), value), after, tag) for value, tag in messages]
    for request in [*requests, *sends]:
        request.wait()
    assert (first[0], second[0], other[0]) == (1, 2, 9)


def keep_counts(world: Transport) -> None:
    """Draw numbers until they are used up, each by one rank; rank 0 computes meanwhile and never answers."""
    numbers, counters = list(range(200)), open_counters(world, 3)
    drawn = [counters.add(1)]  # each has one, however late its processor runs it again
    world.barrier()
    while (number := counters.add(1)) < len(numbers):
        drawn.append(number)
        until_s = time.perf_counter() + 0.01 * (world.rank == 0)  # outside MPI for a while
        while time.perf_counter() < until_s:
            sum(range(1000))
    counters.add(2, sum(drawn))
    world.barrier()
    everything = share_json(world, gather_json(world, drawn))
    assert sorted(number for one in everything for number in one) == numbers
    assert counters.read() == [0, len(numbers) + world.size, sum(numbers)]
    counters.close()
