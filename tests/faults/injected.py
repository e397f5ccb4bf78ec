"""``kvr``, with one operation on one file that fails in one rank, as KVR_TEST_FAULT says (``injector.c``).

Volumes are closed, owners of a lock are given up, and files that fail are tried again, after and for a fraction of a
second. SIGUSR1 makes a rank tell where it is.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal

import kvr_mpi.disk as disk
import kvr_mpi.store.lock as lock
import kvr_mpi.store.writer as writer
from kvr_mpi.cli import kvr

faulthandler.register(signal.SIGUSR1)
writer.VOLUME_S = 0.02
lock.WATCH_S = 2 * lock.BEAT_S
disk.RETRY_S = 0.3
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
if told := os.environ.pop("KVR_TEST_FAULT", ""):
    fault = json.loads(told)
    if fault["rank"] != rank:
        fault["error"] = 0
    log = f"{fault['log']}-{rank}"
    words = [word.encode() for word in (fault["folder"], log, fault["operation"], fault["file"])]
    numbers = ctypes.c_long(fault["first"]), ctypes.c_long(fault["times"]), fault["error"]
    assert ctypes.CDLL(None).inject(*words, *numbers), fault
kvr()
