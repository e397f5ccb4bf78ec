"""Read damaged files, thousands of them, each in a process of its own with limits of time and memory.

Usage: PYTHONPATH=tests python tests/fuzz/driver.py FILES [FIRST_SEED] [--kind KIND ...]

A seed decides on the kind of file and on what is done to it; the same seed again is the same file. What counts as a
fault: an exception that is none of the program's own, death by a signal, a process that does not end, one that takes
a gigabyte, and a record that came out other than it was written. Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import transformers  # noqa: F401  loaded once, before processes are forked
from kinds import HOSTILE, KINDS, make_samples, write_expected

from kvr_mpi.errors import KvrError

CPU_S, LIMIT_S = 20, 150  # of computing; of waiting, on a machine with others on it
BLOW_UP_BYTES = 1 << 30
ADDRESS_BYTES = 4 << 30  # more than that ends in MemoryError, so that the machine lives
NO_MEMORY = ("Unable to allocate", "MemoryError", "malloc of size", "Cannot allocate")
FAULT = 99


def judge(seed: str, kind: str, data: bytes, samples: Path, scratch: Path) -> bool:
    """Put a file in its place and read it, in a child; return whether all is well, and tell if it is not."""
    folder = scratch / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(samples / KINDS[kind].sample, folder)
    (folder / KINDS[kind].file).write_bytes(data)
    told = scratch / "told"
    told.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _read(kind, folder / KINDS[kind].file, told)
    _, status, usage = os.wait4(child, 0)
    detail = told.read_text(errors="replace") if told.exists() else ""
    grown = (usage.ru_maxrss << 10) - _memory_bytes(1)
    if os.WIFSIGNALED(status):
        fault = f"hangs, or crashes: {signal.Signals(os.WTERMSIG(status)).name}"
    elif grown > BLOW_UP_BYTES or any(word in detail for word in NO_MEMORY):
        fault = f"took {grown >> 20} MiB"
    elif os.WEXITSTATUS(status) != 0:
        fault = "exception"
    else:
        return True
    print(f"seed {seed}, {kind}: {fault}\n    {detail.strip()[-1500:]}", flush=True)
    return False


def _read(kind: str, file: Path, told: Path) -> None:
    """Read a file with all its readers, and end this process."""
    code = FAULT
    with contextlib.suppress(BaseException):
        stream = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        limit = _memory_bytes(0) + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
        signal.alarm(LIMIT_S)
        try:
            for reader in KINDS[kind].readers:
                with contextlib.suppress(KvrError):
                    print(f"--- {reader.__name__}", file=sys.stderr)
                    reader(file)
            code = 0
            told.with_name("modules").write_text("\n".join(sys.modules))
        except BaseException:
            traceback.print_exc()
    os._exit(code)


def _import_all(names: list[str]) -> None:
    """Import what a child had to import, so that the next one need not."""
    for name in names:
        if name not in sys.modules and "__main__" not in name:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _memory_bytes(field: int) -> int:
    """Memory of this process: 0 for all addresses, 1 for what is in use."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def fuzz(files: int, first: int, kinds: list[str], samples: Path, scratch: Path) -> list[str]:
    """Judge so many random files, and all hostile ones; return those at fault."""
    faults = [f"{kind} {name}" for name, (kind, make) in HOSTILE.items()
              if kind in kinds and not judge(name, kind, make(), samples, scratch)]  # fmt: skip
    for seed in range(first, first + files):
        kind = kinds[seed % len(kinds)]
        data = KINDS[kind].mutate((samples / KINDS[kind].sample / KINDS[kind].file).read_bytes(), random.Random(seed))
        if not judge(str(seed), kind, data, samples, scratch):
            faults.append(f"{kind} {seed}")
    return faults


def main() -> int:
    """Fuzz as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=int)
    parser.add_argument("first", type=int, nargs="?", default=1)
    parser.add_argument("--kind", action="append", choices=sorted(KINDS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples, scratch = Path(folder) / "samples", Path(folder) / "scratch"
        scratch.mkdir()
        child = os.fork()  # writing takes threads, which a process that forks must not have
        if child == 0:
            try:
                make_samples(samples)
                write_expected(samples)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            return 1
        for name, kind in KINDS.items():
            if not judge("none", name, (samples / kind.sample / kind.file).read_bytes(), samples, scratch):
                return 1
            _import_all((scratch / "modules").read_text().split())
        faults = fuzz(given.files, given.first, given.kind or list(KINDS), samples, scratch)
    print(f"{given.files} files, {len(faults)} fault(s)", *faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
