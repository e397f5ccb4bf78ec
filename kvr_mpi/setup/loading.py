"""A model loaded on all ranks, its files copied once to each node before that, if wished (``KVR_STAGE_MODEL=1``).

Many nodes that read one network file system at once get a share of its bandwidth each; their own disks are theirs
alone. It is the program that copies, and not the job script: it knows which model a job, its settings and the
environment name, it has ranks on each node whatever started them, and what fails on one of these ends all with the
reason.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.model import LoadedModel, find_model, load_model
from kvr_mpi.model.adapter import merge_adapter
from kvr_mpi.model.load_part import load_part
from kvr_mpi.model.stage import Stage, alone
from kvr_mpi.setup.host_memory import free_bytes, keep_heap, ranks_on_device
from kvr_mpi.transport import Transport, host_by_host, share_json, together
from kvr_mpi.tuning.kernels import choose_kernels

PIECE_BYTES = 16 << 20
# Of `load_model`, what `load_part` takes; jobs with the others are refused beside stages.
PART_ARGUMENTS = ("dtype", "device", "cache_dir", "device_index")
PREFIX = "kvr-model-"
# Weights that are never loaded, and may be as large as those that are.
UNUSED = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".msgpack", ".h5", ".ot", ".tflite"}
# Left free on the node's disk, as a share of what is copied.
SPARE = 0.05


def load_on_all(
    world: Transport,
    path: str,
    *,
    adapter: str | None = None,
    kernels: str = "measured",
    say: Callable[[str], None] | None = None,
    stage: Stage | None = None,
    **arguments: Any,
) -> LoadedModel:
    """Load a model on every rank, as fast as it runs there; every rank calls this.

    Parameters
    ----------
    adapter : str, optional
        Folder of a LoRA adapter that is merged into it.
    kernels : str
        What chains compute with, as `model.kernels` of a job.
    say : callable, optional
        For a line of text about that.
    stage : Stage, optional
        The ranks that hold the model among them: each loads its part.
    **arguments
        Of `load_model`.
    """
    if stage is None:
        loaded = host_by_host(world, lambda: merge_adapter(load_model(path, **arguments), adapter))
    else:
        some = {name: arguments[name] for name in PART_ARGUMENTS if name in arguments}
        loaded = host_by_host(world, lambda: load_part(path, stage, **some))
    keep_heap()
    if kernels != "plain":
        free = free_bytes(loaded.device, ranks_on_device(world, loaded.device))
        with alone(stage):  # a part's rows are tried without the sums over its stage
            choose_kernels(loaded, world, free, arguments["cache_dir"], say or _say_nothing)
    return loaded


def _say_nothing(text: str) -> None:
    """Stand in for a voice."""


@contextmanager
def staged_model(path: str, place: Path | None, world: Transport, say: Callable[[str], None]) -> Iterator[str]:
    """Copy a model's folder to this node, for as long as the block takes; every rank calls this.

    Parameters
    ----------
    path : str
        As in ``model.path``.
    place : Path or None
        A folder on a disk of the node's own; None: nothing is copied.
    say : callable
        For a line of text.

    Yields
    ------
    str
        Where to load from. Files that are in use when the block ends go with their last user, as POSIX has it.

    Raises
    ------
    FailedTogetherError
        On all ranks: `ModelError` if a copy is not what was read, or the model changes meanwhile; `ConfigError` if
        there is no room for it.
    """
    source = None if place is None else together(world, lambda: find_model(path))
    if place is None or source is None:
        yield path
        return
    if source.is_hub or source.gguf_file is not None:
        kept = "the hub's cache (HF_HOME)" if source.is_hub else "KVR_CACHE, with the converted model"
        say(f"KVR_STAGE_MODEL copies folders only: {path} is not a folder, and is read from {kept}")
        yield path
        return
    # The same name on every rank, and nobody else's.
    target = place / f"{PREFIX}{share_json(world, secrets.token_hex(8))}"
    try:
        began = time.monotonic()
        size = host_by_host(world, lambda: _stage(Path(source.location), target, first=world.local_rank == 0))
        took_s = time.monotonic() - began
        say(f"copied {path} to {target} on every node: {size / 1e9:.2f} GB in {took_s:.1f} s, verified")
        yield str(target)
    finally:
        if world.local_rank == 0:
            shutil.rmtree(target, ignore_errors=True)


def _stage(source: Path, target: Path, *, first: bool) -> int:
    """Copy, or make sure that the first rank of this node has copied; return the bytes that are there."""
    if not first:
        if not target.is_dir():
            raise ConfigError(
                f"{target} does not exist, although another rank of this node created it: TMPDIR, SLURM_TMPDIR or "
                f"KVR_LOCAL differ between the ranks, or {target.parent} is private to each rank; set KVR_LOCAL to a "
                f"folder that all ranks of the node share"
            )
        return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    files = _files(source)
    size = sum(file.stat().st_size for file in files)
    try:
        free = shutil.disk_usage(target.parent).free
        if size * (1 + SPARE) > free:
            raise ConfigError(
                f"KVR_STAGE_MODEL: {source} has {size / 1e9:.1f} GB, but {target.parent} on this node has only "
                f"{free / 1e9:.1f} GB free; set KVR_LOCAL to a larger disk of the node, or unset KVR_STAGE_MODEL"
            )
        target.mkdir(mode=0o700)
        for file in files:
            copy = target / file.relative_to(source)
            copy.parent.mkdir(mode=0o700, exist_ok=True)
            _copy(file, copy)
    except OSError as error:
        raise ConfigError(
            f"KVR_STAGE_MODEL: {source} cannot be copied to {target.parent}: {error.strerror or error}; set KVR_LOCAL "
            f"to another folder of the node, or unset KVR_STAGE_MODEL"
        ) from error
    return size


def _files(source: Path) -> list[Path]:
    """List what a model may be loaded from: the folder's files, and templates one folder below."""
    found = sorted(file for pattern in ("*", "*/*.jinja") for file in source.glob(pattern) if file.is_file())
    return [file for file in found if file.suffix not in UNUSED and not file.name.startswith(".")]


def _copy(file: Path, copy: Path) -> None:
    """Copy a file, and hold the copy, read again, against what was read.

    Raises
    ------
    ModelError
        If they differ, or the file changed meanwhile.
    """
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream, copy.open("xb", buffering=0) as written:
        before = os.fstat(stream.fileno())
        while piece := stream.read(PIECE_BYTES):
            digest.update(piece)
            written.write(piece)
        os.fsync(written.fileno())
        after = os.fstat(stream.fileno())
    if not stat.S_ISREG(after.st_mode) or _state(before) != _state(after) or copy.stat().st_size != after.st_size:
        raise ModelError(f"{file} changed while it was copied; start again when it is no longer written to")
    again = xxhash.xxh3_128()
    with copy.open("rb", buffering=0) as stream:
        while piece := stream.read(PIECE_BYTES):
            again.update(piece)
    if again.digest() != digest.digest():
        raise ModelError(
            f"{copy} differs from {file}: the disk or memory of this node is faulty; exclude the node from the job"
        )


def _state(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns
