"""``kvr-run JOB``, but every prompt takes its time; leaves the process's number in a folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from kvr_mpi.cli import kvr_run
from kvr_mpi.runtime.chain_runner import ChainRunner

job, folder = sys.argv[1:]
Path(folder).mkdir(exist_ok=True)
(Path(folder) / str(os.getpid())).touch()
prefill = ChainRunner.prefill


def slowly(*args: Any, **kwargs: Any) -> Any:
    time.sleep(0.3)
    return prefill(*args, **kwargs)


ChainRunner.prefill = slowly  # type: ignore[method-assign]
sys.argv = ["kvr-run", job]
kvr_run()
