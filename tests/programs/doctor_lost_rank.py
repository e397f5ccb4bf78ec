"""``kvr doctor``, but rank 1 is lost: HOW (hangs, killed) in the step WHERE; the ranks wait PATIENCE_S for it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from kvr_mpi.doctor.findings import to_json
from kvr_mpi.doctor.launch import diagnose
from kvr_mpi.doctor.supervise import launcher_rank

if TYPE_CHECKING:
    from kvr_mpi.doctor.steps import Request

how, where, patience_s = sys.argv[1], sys.argv[2], float(sys.argv[3])


def lose_this_rank(*_: object) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def prepare() -> Request:
    """Make a short request, and on rank 1 break a step; runs in the child."""
    from kvr_mpi.doctor import clocks, links, steps

    if launcher_rank(os.environ) == 1:
        module, name = {"links": (links, "measure_links"), "clocks": (clocks, "measure_skews")}[where]
        setattr(module, name, lose_this_rank)
    effort = links.Effort(rounds=5, link_bytes=1 << 16, timeout_s=patience_s / 4)
    return steps.Request(effort=effort, patience_s=patience_s)


sys.exit(
    diagnose(prepare, os.environ, lambda findings: print(json.dumps(to_json(findings)), flush=True), 20 * patience_s)
)
