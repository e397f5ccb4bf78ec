"""``kvr doctor``, but rank 1 is lost: HOW (hangs, killed) when links are measured; a step may take LIMIT_S."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from kvr_mpi.doctor import links
from kvr_mpi.doctor.findings import to_text
from kvr_mpi.doctor.steps import diagnose
from kvr_mpi.transport.mpi import launched_rank

how, limit_s = sys.argv[1], float(sys.argv[2])


def lose_this_rank(*_: object) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


if launched_rank(os.environ) == 1:
    links.measure_chain = lose_this_rank
sys.exit(diagnose(Path(), os.environ, lambda found: print(to_text(found), flush=True), limit_s=limit_s))
