"""Steps of several processes: our own commands under mpirun, as a user starts them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

from gpu_machine import SHARES, gpu_count, make_model, model_of, nccl_rank_count, rank_count
from gpu_steps import Absent, Figures, Given, run_command

from kvr_mpi.errors import counted
from kvr_mpi.transport.mpi_query import describe_mpi

LENGTHS = ["--lengths", "64,512,2000"]
SMALL_LENGTHS = ["--lengths", "24,30"]


def launch(ranks: int, *words: str, timeout_s: float) -> str:
    """Run one of our commands on so many ranks.

    Raises
    ------
    Absent
        If there is no launcher.
    """
    program = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    if os.environ.get(SHARES) == "1":
        program = [sys.executable, str(Path(__file__).with_name("shared_gpu.py")), *program[words[0] == "python" :]]
    return run_command([*find_launcher(), "-n", str(ranks), *program], timeout_s)


def find_launcher() -> list[str]:
    """The command that starts ranks.

    Raises
    ------
    Absent
        If there is none.
    """
    beside = str(Path(sys.executable).parent)
    launcher = shutil.which("mpirun", path=beside) or shutil.which("mpirun") or shutil.which("srun")
    if launcher is None:
        raise Absent("there is no mpirun and no srun")
    return [launcher]


def _verify(ranks: int, transport: str, given: Given, timeout_s: float, model: str = "", dtype: str = "float32") -> str:
    """Exactness on a user's model, or another; returns what the last line says."""
    lengths = SMALL_LENGTHS if given.is_small else LENGTHS
    told = launch(
        ranks,
        *["kvr", "verify", *lengths, "--set", f"model.path={model or model_of(given)}"],
        *["--set", f"model.device={given.kind}", "--set", f"model.dtype={dtype}"],
        *["--set", f"parallel.transport={transport}"],
        timeout_s=timeout_s,
    )
    held = re.findall(r"(\d+ of \d+ checks passed on \d+ ranks?)", told)
    assert held, told[-2000:]
    return str(held[-1])


def staged_ranks_are_exact(given: Given) -> Figures:
    """More ranks than GPUs."""
    return {"3 ranks": _verify(3, "staged", given, 45)}


def doctor_is_content(given: Given) -> Figures:
    """Its lines, as they are."""
    told = launch(min(2, rank_count(given)), "kvr", "doctor", timeout_s=45)
    return {f"line {number}": line for number, line in enumerate(told.splitlines(), 1)}


def nccl_is_exact(given: Given, size: int) -> Figures:
    """One rank a GPU: in bfloat16 with heads of 128, which flash attention runs, by verify's rule; and in float32."""
    if size > nccl_rank_count(given):
        raise Absent(f"{counted(gpu_count(), 'GPU')}, and NCCL wants one for each of {size} ranks, or {SHARES}=1")
    way = "nccl" if given.kind == "cuda" else "mpi"
    wide = str(make_model(Path(given.output) / "wide-heads", head_dim=128))
    found = {"bfloat16, heads of 128": _verify(size, way, given, 50, wide, "bfloat16")}
    return found | {"float32": _verify(size, way, given, 50)}


nccl_is_exact_on_2 = partial(nccl_is_exact, size=2)


def nccl_is_exact_on_all(given: Given) -> Figures:
    """On all GPUs, of up to eight, by powers of two."""
    size = next((size for size in (8, 4) if size <= nccl_rank_count(given)), 4)
    return nccl_is_exact(given, size)


def cuda_aware_mpi_is_exact(given: Given) -> Figures:
    """If MPI says that it takes GPU memory."""
    if gpu_count() < 2:
        raise Absent(f"{gpu_count()} GPU, and this is tried between two")
    mpi = describe_mpi(os.environ)
    if mpi is None or not mpi.cuda:
        raise Absent(f"this MPI does not say that it takes GPU memory ({mpi.cuda_why if mpi else 'there is none'})")
    return {"2 ranks": _verify(2, "mpi", given, 45)}
