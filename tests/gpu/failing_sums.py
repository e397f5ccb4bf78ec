"""What holds for sums of a tensor-parallel group on GPUs if a rank fails between them.

Under mpirun with 2 ranks: `python failing_sums.py`. Pretended GPUs keep the same promises (`test_tp_nccl`).
"""

from __future__ import annotations

import json
import time

import pytest
import torch

from kvr_mpi.decode.step_graph import record
from kvr_mpi.model.tp_group import TensorParallelGroup
from kvr_mpi.runtime.job_ranks import join_groups
from kvr_mpi.runtime.loading import own_device
from kvr_mpi.topology import Topology
from kvr_mpi.transport.base import Transport
from kvr_mpi.transport.choose import open_transport
from kvr_mpi.transport.mpi import connect

FEATURES = 4096


def sums_end(ranks: Transport, control: Transport, device: torch.device) -> dict[str, float]:
    """Each of two ranks fails while the other's GPU waits for it: both raise an error, and the next sums are right.

    With NCCL, one of them fails once more while the other replays a graph, which keeps the communicator alive.

    Returns the seconds that a rank waited for the other's failure, and the milliseconds of a sum.
    """
    tp_group = join_groups(ranks, control, Topology(2, 2, 2), device).tp_group
    assert tp_group is not None
    found: dict[str, float] = {}
    for failed in (1, 0, 1):
        is_here = ranks.rank == failed
        began = time.monotonic()
        with pytest.raises(MemoryError, match="no room" if is_here else f"out of memory on rank {failed}"):
            with tp_group.guarded():
                total = tp_group.all_reduce(torch.ones(FEATURES, device=device))
                if is_here:
                    raise MemoryError("no room")
                tp_group.all_reduce(total).tolist()
        found[f"seconds to the failure of rank {failed}"] = time.monotonic() - began
    if tp_group.can_record:
        found["seconds to the failure of rank 1, in a replay"] = replays_end(tp_group, device)
    began = time.monotonic()
    for dtype in (torch.float32, torch.bfloat16):
        for turn in range(50):
            with tp_group.guarded():
                total = tp_group.all_reduce(
                    torch.full((FEATURES,), turn + 1.0 + ranks.rank, device=device, dtype=dtype)
                )
                assert total.tolist() == [2 * turn + 3.0] * FEATURES, (dtype, turn)
    draw = torch.Generator().manual_seed(0)
    parts = torch.randn(2, FEATURES, generator=draw).to(torch.bfloat16)
    truth, size = parts.float().sum(0), parts.float().abs().sum(0)
    with tp_group.guarded():  # which may add in place
        total = tp_group.all_reduce(parts[ranks.rank].to(device)).float().cpu()
    assert bool(((total - truth).abs() <= 2 * torch.finfo(torch.bfloat16).eps * size).all())
    return found | {"ms, a sum with its wait": 10 * (time.monotonic() - began)}


def replays_end(tp_group: TensorParallelGroup, device: torch.device) -> float:
    """Rank 1 fails while the other's GPU replays a graph; return the seconds until it knows."""
    total = torch.zeros(FEATURES, device=device)
    with tp_group.guarded():
        with record(device, tp_group) as graph:
            tp_group.all_reduce(total)
        for turn in range(3):
            total.fill_(turn + 1.0)
            graph.replay()
            assert total.tolist() == [2 * turn + 2.0] * FEATURES, turn
    began = time.monotonic()
    with pytest.raises(MemoryError, match="no room|out of memory on rank 1"), tp_group.guarded():
        tp_group.raise_failures()
        if tp_group.rank == 1:
            raise MemoryError("no room")
        graph.replay()
        total.tolist()
    return time.monotonic() - began


def main() -> None:
    """Use this machine's GPUs."""
    control = connect()
    device = own_device(control, "auto")
    ranks, said = open_transport(control, "auto", device)
    found = sums_end(ranks, control, device)
    if control.rank == 0:
        print(json.dumps({"transport": said, **found}), flush=True)


if __name__ == "__main__":
    main()
