"""``kvr-run JOB`` with heads shared out, but rank 1 breaks at the third step."""

from __future__ import annotations

import sys
import time
from typing import Any

from kvr_mpi.cli import kvr_run
from kvr_mpi.decode.batch import DecodeBatch

step, calls = DecodeBatch.step, 0


def breaking(batch: DecodeBatch[Any]) -> Any:
    global calls
    calls += 1
    if calls == 3 and batch.group.ranks is not None and batch.group.ranks.rank == 1:
        print(f"failing at {time.time()}", flush=True)
        raise RuntimeError("broken on purpose")
    return step(batch)


DecodeBatch.step = breaking  # type: ignore[method-assign]
sys.argv = ["kvr-run", sys.argv[1], "--set", "decode.mode=head-parallel"]
kvr_run()
