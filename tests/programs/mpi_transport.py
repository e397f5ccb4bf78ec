"""Run under mpirun with 2 ranks or more: what every transport promises. Prints one JSON line, or fails.

python mpi_transport.py auto|mpi|staged|gloo
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from open_ranks import open_ranks

from kvr_mpi.errors import ConfigError, TransportError
from kvr_mpi.transport import FailedTogetherError, gather_json, mpi, on_root, share_json, together
from kvr_mpi.transport.mpi import connect

WORK_S = 0.4
mpi.CHUNK_BYTES = 1000  # so that small messages travel in pieces, as large ones do
world = open_ranks(connect(), sys.argv[1])
before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
    for elements in (1, 250, 10_001):
        mine = (torch.arange(elements) % 97 + world.rank).to(dtype)
        theirs = torch.empty(elements, dtype=dtype)
        receive, send = world.irecv(theirs, before, 5), world.isend(mine, after, 5)
        receive.wait(), send.wait()
        assert receive.test() and send.test()
        assert torch.equal(theirs, (torch.arange(elements) % 97 + before).to(dtype))
# The same bits everywhere, whatever is rounded; parts of a tensor that are empty; sums of a split.
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
    for shape in ((1,), (2, 3), (10_001,), (0,)):
        every = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
        every = [(10 * each).to(dtype) for each in every]
        total = every[world.rank].clone()
        world.all_reduce(total)
        torch.testing.assert_close(total.double(), sum(each.double() for each in every), rtol=1e-2, atol=1e-4)
        bits = share_json(world, gather_json(world, total.view(-1).view(torch.uint8).tolist()))
        assert all(one == bits[0] for one in bits)
try:
    world.all_reduce(torch.zeros(4, 4).t())
    raise AssertionError("a strided tensor was summed")
except TransportError as error:
    assert "not contiguous" in str(error)
# In order for one tag, apart for different tags.
first, second, other = (torch.empty(3) for _ in range(3))
requests = [world.irecv(first, before, 1), world.irecv(second, before, 1), world.irecv(other, before, 2)]
messages = [(9.0, 2), (1.0, 1), (2.0, 1)] if world.has_tags else [(1.0, 1), (2.0, 1), (9.0, 2)]
sends = [world.isend(torch.full((3,), value), after, tag) for value, tag in messages]
for request in [*requests, *sends]:
    request.wait()
assert (first[0], second[0], other[0]) == (1, 2, 9)

for size in (0, 1, 100_000):
    data = bytes([world.size - 1]) * size
    assert world.broadcast(data if world.rank == world.size - 1 else b"", world.size - 1) == data
gathered = world.gather(bytes([world.rank]) * world.rank)
assert gathered == ([bytes([rank]) * rank for rank in range(world.size)] if world.rank == 0 else [])
assert share_json(world, {"text": "ü"} if world.rank == 0 else None) == {"text": "ü"}

half = world.split(world.rank % 2)
members = share_json(half, gather_json(half, world.rank))
assert members == list(range(world.rank % 2, world.size, 2))
assert half.rank == members.index(world.rank)
count = torch.ones(3)
half.all_reduce(count)
assert count.tolist() == [len(members)] * 3
assert 0 <= world.local_rank < world.local_size <= world.size


def fail() -> None:
    if world.rank == 1:
        raise ConfigError("rank 1 has no wish to go on")


try:
    together(world, fail)
    raise AssertionError("nobody failed")
except FailedTogetherError as error:
    assert error.exit_code == 78
    assert (error.cause is not None) == (world.rank == 1)
assert on_root(world, lambda: world.rank) == (0 if world.rank == 0 else None)
# Those that wait leave their cores to the one that works: an engine beside them may have it (`bench.rivals`).
began_s = time.process_time()
on_root(world, lambda: time.sleep(WORK_S))
assert time.process_time() - began_s < WORK_S / 4, "a rank that waits spins"
try:
    world.isend(torch.zeros(4, 4).t(), after, 0)
    raise AssertionError("a strided tensor was sent")
except TransportError:
    pass
if world.rank == 0:
    world.isend(torch.zeros(5), 1, 77).wait()
elif world.rank == 1:
    try:
        world.irecv(torch.zeros(6), 0, 77).wait()
        raise AssertionError("a message shorter than announced passed")
    except TransportError as error:
        assert "expected 24 bytes from rank 0 (tag 77), but received 20" in str(error), error
world.barrier()
if world.rank == 0:
    print(json.dumps({"size": world.size}))
