"""``kvr-run`` as it is, but impatient: shards are closed, and owners of a lock given up, after a fraction of a second.

With the ten seconds of a real job no shard would be finished when a run of two seconds is killed. SIGUSR1 makes a rank
tell where it is, which the harness asks of a job that hangs.
"""

from __future__ import annotations

import faulthandler
import signal

import kvr_mpi.store.lock as lock
import kvr_mpi.store.shards as shards
from kvr_mpi.cli import kvr_run

faulthandler.register(signal.SIGUSR1)
shards.FLUSH_S = 0.02
lock.WATCH_S = 2 * lock.BEAT_S
kvr_run()
