"""``kvr-run JOB`` disturbed as HOW says; every rank leaves the number of its process, or when it broke, in a folder.

slow: every prompt takes its time. raises, killed: rank 1 breaks at the second prompt.

python disturbed_rank.py HOW JOB FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kvr_mpi.cli import kvr_run
from kvr_mpi.runtime.chain_runner import ChainRunner

how, job, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
folder.mkdir(exist_ok=True)
(folder / str(os.getpid())).touch()
prefill, calls = ChainRunner.prefill, 0


def disturbed(runner: ChainRunner, *args: Any) -> Any:
    global calls
    calls += 1
    if how == "slow":
        time.sleep(0.3)
    elif calls == 2 and runner.chain.rank == 1:
        (folder / "broken").write_text(str(time.time()))
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("broken on purpose")
    return prefill(runner, *args)


ChainRunner.prefill = disturbed  # type: ignore[method-assign]
sys.argv = ["kvr-run", job]
kvr_run()
