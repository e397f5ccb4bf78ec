"""Reads all environment variables except ``KVR_SECTION__KEY`` (`job`), lists them, and sets some for libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvr_mpi.runtime.options import Environment

if TYPE_CHECKING:
    from kvr_mpi.store.lock import Owner


# Variables that users set, by reader, with their meanings; docs/reference.py makes a page of them. Variables in which
# launchers and SLURM describe a process are not included.
VARIABLES: dict[str, dict[str, str]] = {
    "commands": {
        "KVR_SECTION__KEY": "a setting of the job, such as `KVR_GENERATION__SEED=7`; overrides the job file, but not "
        "`--set`",
        "KVR_CACHE": "folder for converted models, compiled kernels and their measurements; default: `kvr-mpi` in "
        "`XDG_CACHE_HOME` or in `~/.cache`",
        "CXX": "the C++ compiler for the attention kernels of CPUs, with options if you like; default: "
        "`c++`, `g++` or `clang++`",
        "OMP_NUM_THREADS": "CPU threads per rank; default: its share of the cores",
        "HF_HUB_OFFLINE": "1: use models from local files only, which is the default under SLURM; 0: ask the hub",
        "SLURM_JOB_END_TIME": "time when the job has to end (Unix time), unless `--time-limit` is given; set by SLURM "
        "or the job script",
        "CUDA_MODULE_LOADING": "`EAGER` unless set otherwise, so that no kernel is loaded while a transfer waits",
        "TORCH_CPP_LOG_LEVEL": "`ERROR` unless set otherwise: torch warns about each pair of ranks that NCCL connects",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64 unless set otherwise: with 1024, memory use grows over prompts of many "
        "lengths",
    },
    "job scripts": {
        "KVR_SITE": "the site file; default: `site.sh` next to the scripts",
        "KVR_VENV": "the virtual environment to activate; default: the checkout's `.venv`, if there is no `kvr` yet",
        "KVR_CONTAINER": "prefix of every command, such as `apptainer exec --nv kvr.sif`",
        "KVR_MPI_TYPE": "value for `srun --mpi=`; default: the one that fits the MPI that mpi4py loads",
        "KVR_LAUNCHER": "launcher to use instead of `srun`, with its options, such as `mpirun`",
        "KVR_SHARES": "number of shares into which `kvr_array.sh` splits the corpus; default: one per task",
        "KVR_CTAS": "thread blocks per NCCL transfer that `kvr_gpu.sh` tries; default: `1 2 4 8 16`",
        "KVR_MAX_REQUEUES": "how often a job that was stopped early is requeued; default: 20",
        "KVR_LOCAL": "local folder on each node for what ranks compile and convert; default: `SLURM_TMPDIR`, `TMPDIR` "
        "or `/tmp`",
        "KVR_SLURM_DIR": "folder of the scripts; default: from SLURM",
    },
    "libraries": {
        "HF_HOME": "cache for models from the hub; download them on a login node",
        "CUDA_VISIBLE_DEVICES": "GPUs that a process can see; each rank uses one that the fewest ranks before it use",
        "MPICH_GPU_SUPPORT_ENABLED": "1: Cray MPICH accepts GPU memory",
        "NCCL_MAX_CTAS": "thread blocks on the GPU for an NCCL transfer; default here: 4",
    },
}


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Read cores, threads, cache folder and the batch system's deadline.

    ``KVR_CACHE`` (default: ``kvr-mpi`` in ``XDG_CACHE_HOME`` or ``~/.cache``) is the folder of converted models and
    kernels. `VARIABLES` describes the others.
    """
    from kvr_mpi.setup.job_setup import Machine

    caches = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    threads, deadline = environ.get("OMP_NUM_THREADS", ""), environ.get("SLURM_JOB_END_TIME", "")
    machine = Machine(
        cache_dir=Path(environ.get("KVR_CACHE") or Path(caches) / "kvr-mpi"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=int(threads) if threads.isdecimal() and int(threads) > 0 else None,
        offline=is_offline(environ),
    )
    return Environment(machine, read_owner(environ), float(deadline) if deadline.isdecimal() else None)


def read_owner(environ: Mapping[str, str] = os.environ) -> Owner:
    """Return how this process identifies itself in a lock; imports no torch."""
    from kvr_mpi.store.lock import this_process

    job, cluster = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_CLUSTER_NAME", "")
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    return this_process(f"{job}@{cluster}" if job and cluster else job, int(restarts) if restarts.isdecimal() else 0)


# As huggingface_hub reads its variables.
TRUE_VALUES = ("1", "ON", "YES", "TRUE")


def is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to avoid the hub: as set by ``HF_HUB_OFFLINE``, by default only under SLURM."""
    value = environ.get("HF_HUB_OFFLINE", "")
    return value.upper() in TRUE_VALUES if value else "SLURM_JOB_ID" in environ


def tell_libraries(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set defaults for CUDA, torch and oneDNN that the user has not set; call it before MPI starts: some open a GPU.

    CUDA loads all kernels when it starts. Loading a kernel at its first use, which is torch's default, waits for all
    work on the GPU, including NCCL transfers whose peer may be waiting for this rank.

    torch warns about each pair of ranks that NCCL connects, since it expects collectives; a chain sends to its
    neighbours only.

    oneDNN caches 64 kernels, not 1024. It makes one for each number of rows in a product, which differs between packed
    rows of prompts: the memory of a rank grew by 70 MB over 30,000 tiny documents.
    """
    environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
