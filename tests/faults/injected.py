"""``kvr``, with one operation on one file that fails in one rank, as KVR_TEST_FAULT says (``injector.c``).

It is ``impatient``, and files that fail are tried again for a fraction of a second only.
"""

from __future__ import annotations

import ctypes
import json
import os

import impatient  # noqa: F401

import kvr_mpi.disk as disk
from kvr_mpi.cli import kvr

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
