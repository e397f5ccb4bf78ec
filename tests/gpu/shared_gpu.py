"""Run a Python program whose ranks may share a GPU over NCCL: `python shared_gpu.py FILE ...` or `-m MODULE ...`."""

from __future__ import annotations

import dataclasses
import runpy
import sys
from typing import Any

from kvr_mpi.transport import choose

look = choose._look


def look_alone(world: Any, *given: Any) -> Any:
    """Report a GPU of its own for each rank."""
    return dataclasses.replace(look(world, *given), gpu=f"of rank {world.rank}")


choose._look = look_alone
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
