"""``kvr-run`` as it is, but impatient: volumes are closed, and owners of a lock given up, after a fraction of a second.

With the minute of a real job no volume would be finished when a run of two seconds is killed. SIGUSR1 makes a rank
tell where it is, which the harness asks of a job that hangs. KVR_TEST_CLOCK makes the clock jump.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time

import kvr_mpi.setup.stored_size as stored_size
import kvr_mpi.store.lock as lock
import kvr_mpi.store.writer as writer
from kvr_mpi.cli import kvr_run

faulthandler.register(signal.SIGUSR1)
writer.VOLUME_S = 0.02
stored_size.DOUBT = float("inf")  # a disk that is too small is to become full
lock.WATCH_S = 2 * lock.BEAT_S
if os.environ.get("KVR_TEST_CLOCK"):  # as if somebody set it: "seconds from now, and how far"
    after_s, jump_s = map(float, os.environ.pop("KVR_TEST_CLOCK").split())
    began, real_time = time.monotonic(), time.time
    time.time = lambda: real_time() + (jump_s if time.monotonic() - began > after_s else 0.0)
kvr_run()
