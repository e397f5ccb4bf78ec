"""Fused kernels compiled by torch, once for a processor, and kept in ``KVR_CACHE``.

A process of its own compiles them (`compile_program`), with a time limit; a rank only loads what is there, which takes
no compiler and milliseconds. Whatever goes wrong, the modules' own code goes on and a line says why; a compiler that
failed is not asked again.
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
FAILED = "failed.txt"
DTYPES = (torch.float32, torch.bfloat16)
# Not every build of torch has it.
_LOADER: Any = getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)

Compiled = Callable[..., torch.Tensor]
Say = Callable[[str], None]


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
    if _LOADER is None or dtype not in DTYPES:
        return {}
    folder = _folder(cache_dir, dtype)
    missing = [name for name in names if not (folder / f"{name}.pt2").exists()]
    if missing and compiles:
        try:
            _compile(folder, dtype, missing, say, limit_s)
        except OSError as error:
            say(f"norms and gates are not compiled: {folder} cannot be written ({error.strerror or error})")
    found = {}
    for name in names:
        try:
            found[name] = _load(folder / f"{name}.pt2", name, dtype)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was never compiled
        except (OSError, ValueError, RuntimeError) as error:
            say(f"{folder / name}.pt2 is not used: {str(error).splitlines()[0]}; remove it to compile it again")
    return found


def _folder(cache_dir: Path, dtype: torch.dtype) -> Path:
    known = f"{processor_key()} torch {torch.__version__} {dtype}"
    return cache_dir / "kernels" / xxhash.xxh3_64_hexdigest(known.encode())


def _compile(folder: Path, dtype: torch.dtype, names: Sequence[str], say: Say, limit_s: float) -> None:
    """Compile kernels into the cache, or leave a note there why not."""
    note = folder / FAILED
    if note.exists():
        say(f"norms and gates are not compiled, since that failed before (see {note}); remove this file to try again")
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    work = Path(tempfile.mkdtemp(prefix=".compiling-", dir=folder))
    try:
        say(f"compiling norms and gates for this processor, once only (at most {limit_s:.0f} s)")
        why = _run_compiler(work, dtype, names, limit_s)
        if why:
            say(f"norms and gates are not compiled: {why}")
            with replacing(note) as stream:
                stream.write(f"{why}\n".encode())
            return
        for name in names:
            keep_made(work / f"{name}.pt2", folder / f"{name}.pt2")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_compiler(work: Path, dtype: torch.dtype, names: Sequence[str], limit_s: float) -> str:
    """Run the program that compiles; say why it failed, nothing if it did not."""
    command = [sys.executable, "-m", compile_program_name(), str(work), str(dtype).removeprefix("torch."), *names]
    why = run_compiler(command, {"TORCHINDUCTOR_CACHE_DIR": str(work), "TORCHINDUCTOR_COMPILE_THREADS": "1"}, limit_s)
    if why:
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


def compile_program_name() -> str:
    """Name the module that is run to compile."""
    return f"{__package__}.compile_program"


def _load(file: Path, name: str, dtype: torch.dtype) -> Compiled:
    """Load a kernel that nobody else can have written, and try it.

    Raises
    ------
    OSError, RuntimeError
        If it cannot be read.
    ValueError
        If it may be somebody else's, is damaged, or computes something else.
    """
    check_kept(file)
    package = _LOADER(str(file), "model", False, 1, -1)

    def compute(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = package.boxed_run(list(tensors))[0]
        return out

    if not all(_is_right(compute, name, dtype, rows) for rows in (1, 2, 37)):
        raise ValueError("it gives wrong results")
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
    with torch.inference_mode():
        return is_same(formulas[name](*tensors), compute(*tensors))
