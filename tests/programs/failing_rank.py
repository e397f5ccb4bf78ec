"""``kvr-run JOB``, but rank 1 breaks at the second prompt: it raises, or (with a marker file) is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kvr_mpi.cli import kvr_run
from kvr_mpi.runtime.chain_runner import ChainRunner

prefill, calls = ChainRunner.prefill, 0


def breaking(runner: ChainRunner, *args: Any) -> Any:
    global calls
    calls += 1
    if calls == 2 and runner.chain.rank == 1:
        if marker:
            Path(marker[0]).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"failing at {time.time()}", flush=True)
        raise RuntimeError("broken on purpose")
    return prefill(runner, *args)


job, *marker = sys.argv[1:]
ChainRunner.prefill = breaking  # type: ignore[method-assign]
sys.argv = ["kvr-run", job]
kvr_run()
