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
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import transformers  # noqa: F401  loaded once, before processes are forked
from hostile import HOSTILE
from readers import KINDS, make_samples, write_expected

from kvr_mpi.errors import KvrError

CPU_S, LIMIT_S = 20, 150  # of computing; of waiting, on a machine with others on it
BLOW_UP_BYTES = 1 << 30
ADDRESS_BYTES = 4 << 30  # more than that ends in MemoryError, so that the machine lives
NO_MEMORY = ("Unable to allocate", "MemoryError", "malloc of size", "Cannot allocate")
FAULT = 99


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a file; `fault` is empty if all is well."""

    seed: str
    kind: str
    fault: str
    detail: str = ""


def judge(seed: str, kind: str, data: bytes, samples: Path, scratch: Path) -> Verdict:
    """Put a file in its place and read it, in a child."""
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
    grown = (usage.ru_maxrss << 10) - _rss_bytes()
    fault = ""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        fault = "hangs" if number in (signal.SIGALRM, signal.SIGXCPU) else f"killed by {signal.Signals(number).name}"
    elif grown > BLOW_UP_BYTES or any(word in detail for word in NO_MEMORY):
        fault = f"took {grown >> 20} MiB"
    elif os.WEXITSTATUS(status) != 0:
        fault = "exception"
    verdict = Verdict(seed, kind, fault, detail)
    if fault:
        _print(verdict)
    return verdict


def _read(kind: str, file: Path, told: Path) -> None:
    """Read a file with all its readers, and end this process."""
    code = FAULT
    with contextlib.suppress(BaseException):
        stream = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        limit = _size_bytes() + ADDRESS_BYTES
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


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _size_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def fuzz(files: int, first: int, kinds: list[str], samples: Path, scratch: Path) -> list[Verdict]:
    """Judge so many random files, and all hostile ones; return the faults."""
    verdicts = [judge(name, kind, make(), samples, scratch) for name, (kind, make) in HOSTILE.items() if kind in kinds]
    began, seen = time.monotonic(), Counter(verdict.kind for verdict in verdicts)
    for number in range(files):
        seed = first + number
        kind = kinds[seed % len(kinds)]
        chance = random.Random(seed)
        data = KINDS[kind].mutate((samples / KINDS[kind].sample / KINDS[kind].file).read_bytes(), chance)
        verdicts.append(judge(str(seed), kind, data, samples, scratch))
        seen[kind] += 1
        if (number + 1) % 500 == 0:
            faults = sum(bool(one.fault) for one in verdicts)
            print(f"{number + 1} files in {time.monotonic() - began:.0f} s, {faults} fault(s)", flush=True)
    print(f"{len(verdicts)} files: {', '.join(f'{count} {kind}' for kind, count in sorted(seen.items()))}")
    return [verdict for verdict in verdicts if verdict.fault]


def _print(verdict: Verdict) -> None:
    last = "\n    ".join(verdict.detail.strip()[-1500:].splitlines()[-12:])
    print(f"seed {verdict.seed}, {verdict.kind}: {verdict.fault}\n    {last}", flush=True)


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
            verdict = judge("none", name, (samples / kind.sample / kind.file).read_bytes(), samples, scratch)
            if verdict.fault:
                return 1
            _import_all((scratch / "modules").read_text().split())
        faults = fuzz(given.files, given.first, given.kind or list(KINDS), samples, scratch)
    print(f"{len(faults)} fault(s)" + (": " + ", ".join(f"{one.kind} {one.seed}" for one in faults) if faults else ""))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
