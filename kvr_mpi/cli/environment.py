"""Reads all environment variables except ``KVR_SECTION__KEY`` (`job`), and sets some for libraries."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvr_mpi.cgroups import usable_cores
from kvr_mpi.scheduler import batch_job, end_time

if TYPE_CHECKING:
    from kvr_mpi.runtime.session import Machine
    from kvr_mpi.store.lock import Owner


def read_environment(environ: Mapping[str, str] = os.environ) -> Machine:
    """Read cores, threads, cache folder and the batch system's deadline; docs/reference.py lists all variables."""
    from kvr_mpi.runtime.session import Machine

    threads = environ.get("OMP_NUM_THREADS", "")
    return Machine(
        cache_dir=cache_folder(environ),
        cores=usable_cores(),
        threads=int(threads) if threads.isdecimal() and int(threads) > 0 else None,
        offline=is_offline(environ),
        owner=read_owner(environ),
        checks_memory=environ.get("KVR_CHECK", "").upper() in TRUE_VALUES,
        deadline_s=end_time(environ)[0],
    )


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for converted models, compiled kernels and what transformers consists of."""
    caches = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(environ.get("KVR_CACHE") or Path(caches) / "kvr-mpi")


def read_peer_timeout(environ: Mapping[str, str] = os.environ) -> float:
    """Return the seconds without a sign of life from a rank after which the job ends."""
    from kvr_mpi.transport.liveness import LIMIT_S

    value = environ.get("KVR_PEER_TIMEOUT", "")
    return float(value) if value.isdecimal() and int(value) > 0 else LIMIT_S


def read_owner(environ: Mapping[str, str] = os.environ) -> Owner:
    """Return how this process identifies itself in a lock; imports no torch."""
    from kvr_mpi.store.lock import this_process

    found = batch_job(environ)
    return this_process() if found is None else this_process(found.job, found.restarts)


def config_files(name: str, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """List where a site and a user may have a file of settings (XDG base directories); the user's comes last."""
    site = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    user = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return [Path(folder) / "kvr-mpi" / name for folder in (*reversed(site), user)]


# As huggingface_hub reads its variables.
TRUE_VALUES = ("1", "ON", "YES", "TRUE")


def is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to avoid the hub: as set by ``HF_HUB_OFFLINE``, by default only in a batch system's job."""
    value = environ.get("HF_HUB_OFFLINE", "")
    return value.upper() in TRUE_VALUES if value else batch_job(environ) is not None


def configure_libraries(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set defaults for CUDA, torch and oneDNN that the user has not set.

    Call it before MPI is initialized, since some MPIs open a GPU then.

    CUDA then loads all kernels when it starts. Loading a kernel at its first use, which is torch's default, waits for
    all work on the GPU, including NCCL transfers whose peer may be waiting for this rank.

    torch would warn about each pair of ranks that NCCL connects, since it expects collectives; a chain sends to its
    neighbors only.

    NCCL then does not register the buffers of recorded sums: with torch's expandable segments that can access memory
    that is no longer mapped.

    oneDNN then caches 64 kernels, not 1024. It makes one for each number of rows in a product, which differs between
    packed rows of prompts: with 1024, the memory of a rank grew by 70 MB over 30,000 tiny documents.

    In a batch system's job, compiled kernels and converted models are kept on the node (`_use_node`).
    """
    _use_node(environ)
    environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def _use_node(environ: MutableMapping[str, str]) -> None:
    """Keep compiled kernels on the node: ranks that compile into one network home directory delay each other.

    Models are converted there, too, if the site or SLURM names a place; ``/tmp`` may be small.
    """
    named = environ.get("KVR_LOCAL") or environ.get("SLURM_TMPDIR")
    wanted = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"} | (
        {"KVR_CACHE": "models"} if named else {}
    )
    missing = [name for name in wanted if not environ.get(name)]
    if missing and (named or batch_job(environ) is not None):
        with contextlib.suppress(OSError):
            folder = private_folder(Path(named or environ.get("TMPDIR") or "/tmp"))
            environ.update({name: str(folder / wanted[name]) for name in missing})


def private_folder(base: Path) -> Path:
    """Return a folder in which only this user can write, since programs load libraries from it.

    It is the same for all processes of the user, unless somebody else has made one of that name.
    """
    folder = base / f"kvr-{os.getuid()}"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="kvr-", dir=base))
