"""What NCCL's connections take of a GPU: under mpirun, `python connections.py` prints one JSON line."""

from __future__ import annotations

import json
import time

import torch

from kvr_mpi.runtime.loading import own_device
from kvr_mpi.transport import gather_json
from kvr_mpi.transport.choose import open_transport, warm_up_sums
from kvr_mpi.transport.mpi import connect


def free(device: torch.device) -> int:
    """Bytes that are free on the GPU, by its driver."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def main() -> None:
    """Connect this rank to its neighbors, then to all."""
    control = connect()
    device = own_device(control, "auto")
    torch.zeros(1, device=device)  # its context
    before, began = free(device), time.monotonic()
    ranks, said = open_transport(control, "auto", device)
    links, links_s = before - free(device), time.monotonic() - began
    before, began = free(device), time.monotonic()
    warm_up_sums(ranks, device)
    found = gather_json(control, [links, links_s, before - free(device), time.monotonic() - began])
    if control.rank == 0:
        names = ("MiB of links", "seconds of links", "MiB of sums", "seconds of sums")
        figures = dict(zip(names, map(max, zip(*found, strict=True)), strict=True))
        scaled = {name: value / (1 << 20) if name.startswith("MiB") else value for name, value in figures.items()}
        print(json.dumps({"transport": said, **scaled}), flush=True)


if __name__ == "__main__":
    main()
