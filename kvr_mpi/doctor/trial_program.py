"""What the two ranks of the disposable step do: ``python -m kvr_mpi.doctor.trial_program host|cuda``.

MPI is handed the buffers' own memory. Whatever it does then, crash or hang, happens here and nowhere else. Each rank
prints JSON lines: that it is ready, then the checksums of what it sent and received.
"""

from __future__ import annotations

import faulthandler
import json
import sys

# A message that MPI copies at once, and one that it hands over by reference.
SIZES = (4 << 10, 16 << 20)


def main(kind: str, timeout_s: float) -> None:
    """Swap buffers with the other rank."""
    # Ends this process even if it hangs in a driver call and the launcher is gone already.
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    import torch

    from kvr_mpi.doctor.links import checksum, pattern
    from kvr_mpi.topology import device_index
    from kvr_mpi.transport.mpi import connect
    from kvr_mpi.transport.mpi_query import swap_in_place

    world = connect()
    count = torch.cuda.device_count() if kind == "cuda" else 0
    device = torch.device("cuda", device_index(world.rank, count)) if count else torch.device("cpu")
    if count:
        torch.cuda.set_device(device)  # a GPU's memory is handed over while it is the current one only
    buffers = [
        (pattern(size, world.rank).to(device), torch.zeros(size, dtype=torch.uint8, device=device)) for size in SIZES
    ]
    print(json.dumps({"ready": world.rank, "size": world.size}), flush=True)
    for send, receive in buffers:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # MPI waits for no stream
        swap_in_place(send, receive, 1 - world.rank)
        sums = {"sent": checksum(send), "received": checksum(receive)}
        print(json.dumps({"rank": world.rank, "bytes": send.numel(), **sums}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
