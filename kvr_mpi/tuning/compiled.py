"""Code compiled by torch, once for a processor, and kept in ``KVR_CACHE``: norms and gates.

A process of its own compiles (`compile_program`), with a time limit; a rank only loads what is there,
which takes no compiler and milliseconds. Whatever goes wrong, the modules' own code goes on and a line says why; a
compiler that failed is not asked again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvr_mpi.disk import read_regular, replacing
from kvr_mpi.model.fused import GATES, is_same, rms_norm
from kvr_mpi.tuning.compile_program import NORM
from kvr_mpi.tuning.identity import processor_key

# A compiler takes half a minute, and several on a machine that is busy.
LIMIT_S = 300.0
MOST_BYTES = 64 << 20
FAILED, MOST_NOTE_BYTES = "failed.txt", 4096
DTYPES = (torch.float32, torch.bfloat16)
# Not every build of torch has it.
_LOADER: Any = getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)

Compiled = Callable[..., torch.Tensor]
# Contiguous tensors to tensors; neither their shapes nor their types are looked at.
Compute = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Order:
    """What a program is to compile.

    what : in words, for the log.
    folder : where it is kept.
    names : of the files that are made, without ``.pt2``.
    command : the program and its arguments, which writes them into the folder it is given.
    limit_s : for all of them.
    """

    what: str
    folder: Path
    names: Sequence[str]
    command: Callable[[Path, Sequence[str]], Sequence[str]]
    limit_s: float = LIMIT_S


def can_compile(dtype: torch.dtype) -> bool:
    """Whether this torch loads what is compiled, and the type is one that is compiled for."""
    return _LOADER is not None and dtype in DTYPES


def open_compiled(
    cache_dir: Path, dtype: torch.dtype, names: Sequence[str], say: Say, *, compiles: bool, limit_s: float = LIMIT_S
) -> dict[str, Compiled]:
    """Load fused kernels, compiled now if they never were.

    Parameters
    ----------
    cache_dir : Path
    dtype : torch.dtype
        Of the rows, and of what is made of them.
    names : sequence of str
        `NORM`, or of `GATES`.
    say : callable
        For a line of text, if some cannot be had.
    compiles : bool
        Whether this process is the one to compile.
    limit_s : float
        For all of them.

    Returns
    -------
    dict of str to callable
        Those that there are. They read contiguous tensors of their own type on the CPU, and check nothing.
    """
    if not can_compile(dtype):
        return {}
    folder = folder_of(cache_dir, f"{dtype}")
    order = Order("norms and gates", folder, names, partial(_kernels_command, dtype), limit_s)
    packages = open_packages(order, say, compiles=compiles)
    found = {}
    for name, compute in packages.items():
        kernel = _first_of(compute)
        if all(_is_right(kernel, name, dtype, rows) for rows in (1, 2, 37)):
            found[name] = kernel
        else:
            say(_not_used(folder, name, "it gives wrong results"))
    return found


def _kernels_command(dtype: torch.dtype, work: Path, names: Sequence[str]) -> list[str]:
    return [f"{__package__}.compile_program", str(work), str(dtype).removeprefix("torch."), *names]


def _first_of(compute: Compute) -> Compiled:
    return lambda *tensors: compute(list(tensors))[0]


def open_packages(order: Order, say: Say, *, compiles: bool) -> dict[str, Compute]:
    """Load compiled code, compiled now if it never was and this process is the one to compile.

    Returns
    -------
    dict of str to callable
        By names, those that there are. They read contiguous tensors, and check nothing.
    """
    folder = order.folder
    missing = [name for name in order.names if not (folder / f"{name}.pt2").exists()]
    if missing and compiles:
        try:
            _compile(order, missing, say)
        except OSError as error:
            say(f"{order.what} are not compiled: {folder} cannot be written ({error.strerror or error})")
    found = {}
    for name in order.names:
        try:
            found[name] = _load(folder / f"{name}.pt2")
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was never compiled
        except (OSError, ValueError, RuntimeError) as error:
            say(_not_used(folder, name, str(error).splitlines()[0]))
    return found


def _not_used(folder: Path, name: str, why: str) -> str:
    return f"{folder / name}.pt2 is not used: {why}; remove it to have it compiled again"


def folder_of(cache_dir: Path, holds_for: str) -> Path:
    """Name the folder of code that holds for something on this processor, by this version of torch."""
    known = f"{processor_key()} torch {torch.__version__} {holds_for}"
    return cache_dir / "kernels" / xxhash.xxh3_64_hexdigest(known.encode())


def _compile(order: Order, names: Sequence[str], say: Say) -> None:
    """Compile into the cache, or leave a note there why not."""

    def make(work: Path) -> str:
        say(f"compiling {order.what} for this processor, once only (at most {order.limit_s:.0f} s)")
        return _run_compiler(order, work, names)

    make_once(order.folder, f"{order.what} are not compiled", [f"{name}.pt2" for name in names], make, say)


def make_once(folder: Path, failing: str, files: Sequence[str], make: Callable[[Path], str], say: Say) -> None:
    """Make files of code in a folder of the cache; if that fails, leave a note there, so that it is not tried again.

    Parameters
    ----------
    folder : Path
    failing : str
        What is said if it fails, before the reason.
    files : sequence of str
    make : callable
        Makes them in another folder; says why it failed, nothing if it did not.
    say : callable
        For a line of text.
    """
    note = folder / FAILED
    if note.exists():
        why = read_regular(note, MOST_NOTE_BYTES).decode(errors="replace").strip()
        say(f"{failing}, since that failed before ({why}); remove {note} to try again")
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    work = Path(tempfile.mkdtemp(prefix=".compiling-", dir=folder))
    try:
        if why := make(work):
            say(f"{failing}: {why}")
            with replacing(note) as stream:
                stream.write(f"{why}\n".encode())
            return
        for name in files:
            keep_made(work / name, folder / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_compiler(order: Order, work: Path, names: Sequence[str]) -> str:
    """Run the program that compiles; say why it failed, nothing if it did not."""
    command = [sys.executable, "-m", *order.command(work, names)]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(work), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if why := run_compiler(command, environment, order.limit_s):
        return why
    absent = [name for name in names if not (work / f"{name}.pt2").is_file()]
    return f"the compiler did not create {', '.join(absent)}" if absent else ""


def run_compiler(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> str:
    """Run a compiler in a session of its own; say why it failed, nothing if it did not.

    Raises
    ------
    OSError
        If it cannot be run.
    """
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            env={**os.environ, **environment},
            start_new_session=True,  # so that a compiler that hangs ends with it
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"the compiler was stopped after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told.seek(0)
        lines = [line.strip() for line in told.read().decode(errors="replace").splitlines() if line.strip()]
    if code:
        reason = next(
            (line for line in reversed(lines) if "error" in line.lower()), "".join(lines[-1:]) or "without output"
        )
        return f"the compiler failed ({reason[:300]})"
    return ""


def keep_made(made: Path, file: Path) -> None:
    """Move what a compiler made to its place, with its checksum beside it."""
    made.chmod(0o600)
    with replacing(file.with_suffix(".xxh3")) as stream:
        stream.write(_digest(made).encode())
    made.replace(file)


def check_kept(file: Path) -> None:
    """Make sure that a file of code was kept by us and is whole.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it may be somebody else's, or is damaged.
    """
    for path in (file.parent, file):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError(f"{path} is a link, or others can write to it")
    if _digest(file) != read_regular(file.with_suffix(".xxh3"), 100).decode(errors="replace"):
        raise ValueError("it is damaged")


def _load(file: Path) -> Compute:
    """Load code that nobody else can have written.

    Raises
    ------
    OSError, RuntimeError
        If it cannot be read.
    ValueError
        If it may be somebody else's, or is damaged.
    """
    check_kept(file)
    package = _LOADER(str(file), "model", False, 1, -1)

    def compute(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        out: list[torch.Tensor] = package.boxed_run(tensors)
        return out

    return compute


def _digest(file: Path) -> str:
    return xxhash.xxh3_128_hexdigest(read_regular(file, MOST_BYTES))


def _is_right(compute: Compiled, name: str, dtype: torch.dtype, rows: int) -> bool:
    """Try a kernel on random numbers, beside the formula it was made of."""
    random = torch.randn(2, rows, 101, generator=torch.Generator().manual_seed(rows)).to(dtype)
    tensors: tuple[torch.Tensor, ...] = (random[0].flatten(), random[1].flatten())
    formulas: Mapping[str, Compiled] = {NORM: rms_norm, **GATES}
    if name == NORM:
        tensors = (random[0], random[1, 0].float(), torch.tensor([1e-6]))
    try:
        with torch.inference_mode():
            return is_same(formulas[name](*tensors), compute(*tensors))
    except RuntimeError:
        return False
