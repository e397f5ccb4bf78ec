"""Run under mpirun: GPU memory, pretended, to and from both neighbors at once, through rings of two pieces.

Messages are longer than the rings, and pieces longer than what MPI sends before its receiver asks for it.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "gpu"))

from pretended_cuda import OnDevices, pretended

from kvr_mpi.transport import mpi, staging

PIECE, MOST = 100_000, 900_000
gpus = pretended(pytest.MonkeyPatch())
gpus.watches = False
mpi.CHUNK_BYTES, staging.RING_BYTES, staging.SMALL_BYTES = PIECE, 2 * PIECE, 500
staging._pinned = lambda size: torch.empty(size, dtype=torch.uint8)
world = mpi.MpiTransport(mpi.connect().comm)  # type: ignore[attr-defined]
device = torch.device("cuda", world.rank)
torch.cuda.set_device(device)
links, draw = [(world.rank - 1) % world.size, (world.rank + 1) % world.size], random.Random(world.rank)
sizes = [random.Random(number).randrange(1, MOST) for number in range(9)]
requests, found = [], []


def message(sender: int, number: int) -> torch.Tensor:
    return (torch.arange(sizes[number]) % 251 + sender + number).to(torch.uint8)


with OnDevices(gpus):
    for number, size in enumerate(sizes):
        for peer in draw.sample(links, 2):
            requests.append(world.isend(message(world.rank, number).to(device), peer, 1))
        for peer in draw.sample(links, 2):
            came = torch.zeros(size, dtype=torch.uint8, device=device)
            requests.append(world.irecv(came, peer, 1))
            found.append((came, message(peer, number)))
draw.shuffle(requests)
for request in requests:
    request.wait()
assert all(torch.equal(came.cpu(), sent) for came, sent in found)
world.barrier()
