"""Read damaged files, thousands of them, each in a process of its own with limits of time and memory.

Usage: PYTHONPATH=tests python tests/fuzz/driver.py FILES [FIRST_SEED]

A seed decides on the kind of file and on what is done to it: bytes change at random, or what a line of JSON says. The
same seed again is the same file. (What only somebody who knows HDF5 would do is in ``store/test_damaged_files``.) What
counts as a fault: an exception that is none of the program's own, death by a signal, a process that does not end, one
that takes a gigabyte, and a record that came out other than it was written. Exit code 1 if there was one.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import transformers  # noqa: F401
from made_runs import record, resume, take, write

import kvr_mpi.store.lock as lock
import kvr_mpi.store.status as status
from kvr_mpi.cli import group
from kvr_mpi.documents import Corpus, scan_corpus
from kvr_mpi.errors import KvrError
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.volumes import RESULTS

CPU_S, LIMIT_S = 20, 150  # of computing; of waiting, on a machine with others on it
BLOW_UP_BYTES = 1 << 30
ADDRESS_BYTES = 4 << 30  # more than that ends in MemoryError, so that the machine lives
NO_MEMORY = ("Unable to allocate", "MemoryError", "malloc of size", "Cannot allocate")
DEEP = 100_000
TEXTS = ("", "\0", "\x1b[2J", "\u202e", "\ud800", "../../x", "/etc/passwd", "nan", "x" * 100_000, "{text}", "é" * 300)
NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, float("nan"), float("inf"), -0.0, 1e-320)
OTHERS: tuple[Any, ...] = (None, True, [], {}, [[]], {"a": {}}, [1] * 1000)
WORDS = [n.to_bytes(8, "little", signed=n < 0) for n in (0, 1, -1, 2**31, 2**40, 2**62, -(2**63))]
# No owner of these folders lives, and watching for one takes time.
lock.WATCH_S = status.BEAT_S = 0.1
for name in ("export", "inspect", "merge", "status"):  # loaded once, before processes are forked
    importlib.import_module(f"kvr_mpi.cli.{name}")


def make_samples(folder: Path) -> None:
    """Write valid files, what a run holds beside it: in logs and volumes, merged, its results alone, and a corpus."""
    for name in ("run", "merged", "alone", "files"):
        (folder / name).mkdir(parents=True)
    run = take(folder / "run")
    write(folder / "run", 0, [record(name) for name in "abc"], kv=True)
    write(folder / "run", 1, [record("d"), record("e", "error"), record("dir/c", answer="\u00e9" * 50)])
    run.lock.release()
    (folder / "run" / "expected.json").write_text(json.dumps(exported(folder / "run")))
    shutil.copytree(folder / "run", folder / "merged", dirs_exist_ok=True)
    merge_run(folder / "merged")
    for name in (RESULTS, "expected.json"):
        shutil.copy(folder / "merged" / name, folder / "alone")
    rows = [{"id": f"row {n}", "text": f"Text {n}, \u00e9 and \U0001f6a2. " * n, "more": [n]} for n in range(1, 9)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "files" / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


# Who reads: what comes out has to be what was written


def run_kvr(*arguments: str | Path) -> tuple[int, str]:
    """Run ``kvr``, and return its exit code and what it printed."""
    out = io.BytesIO()
    wrapper = sys.stdout = io.TextIOWrapper(out, encoding="utf-8", write_through=True)
    try:
        code = group.main([str(word) for word in arguments], prog_name="kvr", standalone_mode=False)
    except KvrError as error:
        assert all(char.isprintable() or char in "\n\t" for char in str(error)), f"unprintable: {error!r}"
        code = error.exit_code
    finally:
        sys.stdout = sys.__stdout__
        if not out.closed:  # else whoever exports closed it
            wrapper.detach()
    return int(code or 0), out.getvalue().decode()


def exported(path: Path) -> dict[str, Any]:
    """Read all records as a user does; none if the program refuses."""
    code, text = run_kvr("export", path)
    return {} if code else {row["id"]: row for row in map(json.loads, text.splitlines())}


def check_records(found: dict[str, Any], folder: Path) -> None:
    wanted = json.loads((folder / "expected.json").read_text())
    for name, row in found.items():
        assert row == wanted.get(name), f"a damaged record came out: {row} instead of {wanted.get(name)}"


def read_alone(file: Path) -> None:
    """A file of results without its folder."""
    check_records(exported(file), file.parent)
    run_kvr("inspect", file)
    code, text = run_kvr("inspect", file, "a", "--json")
    if code == 0:
        check_records({"a": {key: value for key, value in json.loads(text).items() if key != "kv"}}, file.parent)


def read_folder(file: Path) -> None:
    """The folder of a run, one file of which is damaged: looked at, exported, merged into another file."""
    folder = file.parent
    for words in (("status", folder, "--json"), ("status", folder), ("inspect", folder)):
        run_kvr(*words)
    check_records(exported(folder), folder)
    target = folder / "other.hdf5"
    if run_kvr("merge", folder, "-o", target)[0] == 0:
        found = exported(target)
        assert found, "a file was merged that cannot be read"
        check_records(found, folder)


def resume_folder(file: Path) -> None:
    """Go on with a run: what counts as done can be read, and is right."""
    done, failed, _ = resume(file.parent)
    found = {record.id: record.as_json() for record in open_results(file.parent)} if done or failed else {}
    check_records(found, file.parent)
    assert found.keys() >= done | failed, "what counts as done is not there"


def read_corpus(file: Path) -> None:
    """Index a corpus, through bytes as the ranks are sent it, and read each document."""
    corpus = Corpus.from_bytes(scan_corpus([str(file)]).to_bytes())
    assert len({*corpus.ids()}) == len(corpus), "ids that are not unique"
    for number, name in enumerate(corpus.ids()):
        document = corpus.read(number)
        (document.id + document.text).encode()
        assert document.id == name and (document.error is not None) >= corpus.is_bad(number), f"{document} {name}"
        assert document.error is not None or document.text.strip(), "a document without text"


# What is done to a file


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flip, overwrite, cut, repeat or insert, once or a few times."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 5, 30])):
        at, other = (chance.randrange(len(changed) + 1) for _ in range(2))
        size = chance.choice([1, 2, 4, 8, 64, 512])
        match chance.choice(["flip", "flip", "word", "noise", "cut", "tail", "repeat", "insert", "zero"]):
            case "flip" if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case "word":
                changed[at : at + 8] = chance.choice(WORDS)[: len(changed) - at]
            case "noise":
                changed[at : at + size] = chance.randbytes(len(changed[at : at + size]))
            case "cut":
                del changed[at : at + size]
            case "tail":
                del changed[max(at, other) :]
            case "repeat":
                changed[at:at] = changed[other : other + size]
            case "insert":
                changed[at:at] = chance.randbytes(size)
            case "zero":
                changed[at : at + size] = bytes(len(changed[at : at + size]))
    return bytes(changed)


def mutate_json(data: bytes, chance: random.Random) -> bytes:
    """Change, drop or bury a value, somewhere in one JSON document."""
    root = [json.loads(data)]
    holder, key = chance.choice(list(_places(root)))
    match chance.choice(["value", "value", "value", "drop", "add", "bury", "grow"]):
        case "value":
            holder[key] = chance.choice(chance.choice([TEXTS, NUMBERS, OTHERS]))
        case "drop" if len(holder) > 1:
            del holder[key]
        case "add" if isinstance(holder, dict):
            holder[chance.choice(TEXTS)] = chance.choice(OTHERS)
        case "bury":
            holder[key] = "@deep@"
        case "grow":
            holder[key] = [holder[key]] * 300
    text = json.dumps(root[0], ensure_ascii=chance.random() < 0.9)
    return text.replace('"@deep@"', chance.choice(["[", '{"a":']) * DEEP).encode(errors="surrogatepass")


def _places(holder: Any) -> Iterator[Any]:
    """Yield (container, key) of every value."""
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def mutate_sealed(data: bytes, chance: random.Random) -> bytes:
    """Change a line that is no record, and give it the right checksum again."""
    lines = data.splitlines(keepends=True)
    at = chance.choice([number for number, line in enumerate(lines) if not line.startswith(b'{"id":')])
    value = json.loads(lines[at])
    value.pop("seal")
    body = mutate_json(json.dumps(value).encode(), chance).rstrip(b"}\n")
    return b"".join([*lines[:at], body + b', "seal": "%08x"}\n' % zlib.crc32(body), *lines[at + 1 :]])


def mutate_lock(data: bytes, chance: random.Random) -> bytes:
    return mutate_json(data.rstrip(), chance).ljust(1023) + b"\n"


def mutate_rows(data: bytes, chance: random.Random) -> bytes:
    """Change one row of a gzip stream, or how rows end."""
    lines = gzip.decompress(data).splitlines()
    at = chance.randrange(len(lines))
    lines[at] = mutate_json(lines[at], chance)
    rows = chance.choice([b"\n", b"\n", b"\r\n", b"\n" * 100_000, b"\xe2\x80\xa8\n"]).join(lines)
    return gzip.compress(rows) + chance.choice([b"", b"", b"junk", data])


Mutate, Readers = Callable[[bytes, random.Random], bytes], tuple[Callable[[Path], None], ...]


class Kind(NamedTuple):
    """One file in a folder of the samples, what is done to it beside `mutate_bytes`, and what reads it."""

    sample: str
    file: str
    mutate: Mutate
    readers: Readers = (read_folder, resume_folder)


KINDS = [
    Kind("alone", RESULTS, mutate_bytes, (read_alone,)),
    Kind("merged", RESULTS, mutate_bytes),
    Kind("run", "kv-0001-0000-00000.h5", mutate_bytes),
    Kind("run", "log-0001-0000.jsonl", mutate_sealed),
    Kind("run", "run.json", mutate_sealed),
    Kind("run", ".lock-000001", mutate_lock),
    Kind("files", "rows.jsonl.gz", mutate_rows, (read_corpus,)),
]


def judge(kind: Kind, data: bytes, samples: Path, scratch: Path) -> str:
    """Put a file in its place and read it, in a child; return what is wrong."""
    folder, told = scratch / "case", scratch / "told"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(samples / kind.sample, folder)
    (folder / kind.file).write_bytes(data)
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _read(kind.readers, folder / kind.file, told)
    _, ended, usage = os.wait4(child, 0)
    detail = told.read_text(errors="replace") if told.exists() else ""
    grown = (usage.ru_maxrss << 10) - _memory_bytes(1)
    if os.WIFSIGNALED(ended):
        return f"hangs, or crashes: {signal.Signals(os.WTERMSIG(ended)).name} {detail}"
    if grown > BLOW_UP_BYTES or any(word in detail for word in NO_MEMORY):
        return f"took {grown >> 20} MiB {detail}"
    return f"exception {detail}" if os.WEXITSTATUS(ended) else ""


def _read(readers: Readers, file: Path, told: Path) -> None:
    """Read a file with all its readers, and end this process."""
    code = 99
    with contextlib.suppress(BaseException):
        os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        limit = _memory_bytes(0) + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
        signal.alarm(LIMIT_S)
        try:
            for reader in readers:
                with contextlib.suppress(KvrError):
                    reader(file)
            code = 0
        except BaseException:
            traceback.print_exc()
    os._exit(code)


def _memory_bytes(field: int) -> int:
    """Memory of this process: 0 for all addresses, 1 for what is in use."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def main(files: int, first: int = 0) -> int:
    """Judge each kind of file as it is, and so many that are damaged."""
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        samples, scratch = Path(folder) / "samples", Path(folder) / "scratch"
        scratch.mkdir()
        child = os.fork()  # writing takes threads, which a process that forks must not have
        if child == 0:
            make_samples(samples)
            os._exit(0)
        os.waitpid(child, 0)
        for seed in [*range(-len(KINDS), 0), *range(first, first + files)]:
            kind, chance = KINDS[seed % len(KINDS)], random.Random(seed)
            data = (samples / kind.sample / kind.file).read_bytes()
            if seed >= 0:
                data = (mutate_bytes if chance.random() < 0.4 else kind.mutate)(data, chance)
            if wrong := judge(kind, data, samples, scratch):
                print(f"seed {seed}, {kind.sample}/{kind.file}: {wrong.strip()[-1500:]}", flush=True)
                faults += 1
    print(f"{files} files, {faults} fault(s)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
