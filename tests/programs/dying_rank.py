"""Run under mpirun with 3 ranks: rank 1 ends in the middle of a prefill, and the others wait for its keys.

python dying_rank.py killed|raises TRANSPORT
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models import prompt, tiny
from open_ranks import open_ranks

from kvr_mpi.cli.launch import guarded
from kvr_mpi.errors import TransportError
from kvr_mpi.kv.layer import SliceLayer
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport import Transport
from kvr_mpi.transport.mpi import connect


def work(world: Transport, how: str) -> int:
    attend, seen = SliceLayer.attend, 0

    def dying(self: SliceLayer, *args: object) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if world.rank == 1 and seen == 2:  # the second layer: its keys are sent, those of the third never will be
            print("rank 1 ends", flush=True)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise TransportError("rank 1 has had enough")
        return attend(self, *args)  # type: ignore[arg-type]

    SliceLayer.attend = dying  # type: ignore[assignment]
    prefill_kvr(tiny("llama-gqa"), prompt(60), Partition((0, 20, 40, 60)), world)
    return 0


torch.set_num_threads(1)
prepare_model(tiny("llama-gqa").model, chain=True)
control = connect()
ranks = open_ranks(control, sys.argv[2])
sys.exit(guarded(control, lambda: work(ranks, sys.argv[1])))
