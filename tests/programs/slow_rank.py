"""``kvr-run JOB``, but every prompt takes its time; leaves the process's number in a folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import kvr_mpi.engine
from kvr_mpi.cli import kvr_run

job, folder = sys.argv[1:]
Path(folder).mkdir(exist_ok=True)
(Path(folder) / str(os.getpid())).touch()
prefill = kvr_mpi.engine.prefill_kvr


def slowly(*args: Any, **kwargs: Any) -> Any:
    time.sleep(0.3)
    return prefill(*args, **kwargs)


kvr_mpi.engine.prefill_kvr = slowly
sys.argv = ["kvr-run", job]
kvr_run()
