"""``kvr doctor``, but rank 1 is lost: HOW (hangs, killed) in the step 'links'; the ranks wait PATIENCE_S for it.

Starts itself, with HOW and two more arguments, as the program that examines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from kvr_mpi.doctor.findings import to_json
from kvr_mpi.doctor.launch import DoctorOptions, diagnose
from kvr_mpi.plain import from_plain
from kvr_mpi.transport.links import Effort
from kvr_mpi.transport.mpi import launched_rank

how = sys.argv[1]


def lose_this_rank(*_: object) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


if len(sys.argv) == 4:
    from kvr_mpi.doctor import links, steps

    if launched_rank(os.environ) == 1:
        links.measure_chain = lose_this_rank
    steps.main(from_plain(DoctorOptions, json.loads(sys.argv[2])), None, os.environ)
else:
    patience_s = float(sys.argv[2])
    effort = Effort(rounds=5, max_bytes=1 << 16)
    sys.exit(
        diagnose(
            DoctorOptions(effort=effort, timeout_s=patience_s / 4, patience_s=patience_s),
            os.environ,
            lambda findings: print(json.dumps(to_json(findings)), flush=True),
            20 * patience_s,
            [sys.executable, __file__, how],
        )
    )
