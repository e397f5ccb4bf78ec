"""One valid file of every kind that the program reads, how it is made wrong, and everything that reads it.

It is made wrong by bytes at random, and for each format by the lies that only somebody who knows it would tell.

A reader may refuse a file with an error of the program's own; what it hands out instead has to be what was written.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from made_runs import record, resume, take, write

import kvr_mpi.store.lock as lock
import kvr_mpi.store.status as status
from kvr_mpi.cli import group
from kvr_mpi.documents import Corpus, scan_corpus
from kvr_mpi.errors import KvrError
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.volumes import RESULTS

VOLUME = "kv-0001-0000-00000.h5"
ROWS = [
    {"id": f"row {n}", "text": f"Text {n} of the harbour, \u00e9 and \U0001f6a2. " * n, "more": [n]}
    for n in range(1, 9)
]
# No owner of these folders lives, and watching for one takes time.
lock.WATCH_S = status.BEAT_S = 0.1


@dataclass(frozen=True, slots=True)
class Kind:
    """Files of one format: the one that is changed, in a folder of `samples`, and what reads it, given its path."""

    sample: str
    file: str
    mutate: Callable[[bytes, random.Random], bytes]
    readers: tuple[Callable[[Path], None], ...]


def make_samples(folder: Path) -> None:
    """Write the valid files: a run in logs and volumes, a run merged, and one file each of everything else."""
    for name in ("run", "merged", "alone", "files"):
        (folder / name).mkdir(parents=True)
    run = take(folder / "run")
    write(folder / "run", 0, [record(name) for name in "abc"], kv=True)
    write(folder / "run", 1, [record("d"), record("e", "error"), record("dir/c", answer="\u00e9" * 50)])
    run.close()
    shutil.copytree(folder / "run", folder / "merged", dirs_exist_ok=True)
    merge_run(folder / "merged")
    shutil.copy(folder / "merged" / RESULTS, folder / "alone" / RESULTS)
    files = folder / "files"
    rows = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (files / "rows.jsonl.gz").write_bytes(gzip.compress(rows))


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


def exported(path: Path) -> dict[str, Any] | None:
    """Read all records as a user does; None if the program refuses."""
    code, text = run_kvr("export", path)
    return None if code else {row["id"]: row for row in map(json.loads, text.splitlines())}


def check_records(found: dict[str, Any] | None, folder: Path) -> None:
    """Fail if a record that came out is not as it was written."""
    wanted = json.loads((folder / "expected.json").read_text())
    for name, row in (found or {}).items():
        assert row == wanted.get(name), f"a damaged record came out: {row} instead of {wanted.get(name)}"


def read_alone(file: Path) -> None:
    """A file of results without its folder."""
    check_records(exported(file), file.parent)
    run_kvr("inspect", file, "--json")
    run_kvr("inspect", file)
    for name in ("a", "e"):
        code, text = run_kvr("inspect", file, name, "--json")
        if code == 0:
            row = json.loads(text)
            row.pop("kv", None)
            check_records({name: row}, file.parent)


def read_folder(file: Path) -> None:
    """The folder of a run, one file of which is damaged: looked at, exported, merged into another file."""
    folder = file.parent
    run_kvr("status", folder, "--json")
    run_kvr("status", folder)
    run_kvr("inspect", folder)
    check_records(exported(folder), folder)
    target = folder / "other.hdf5"
    if run_kvr("merge", folder, "-o", target)[0] == 0:
        found = exported(target)
        assert found is not None, "a file was merged that cannot be read"
        check_records(found, folder)


def resume_folder(file: Path) -> None:
    """Go on with a run: what counts as done can be read, and is right."""
    folder = file.parent
    done, failed, _ = resume(folder)
    found = {record.id: record.as_json() for record in open_results(folder)} if done or failed else {}
    check_records(found, folder)
    assert found.keys() >= done | failed, "what counts as done is not there"


def read_corpus(file: Path) -> None:
    """List a corpus, through JSON as the ranks are told it, and read each document."""
    corpus = Corpus.from_json(json.loads(json.dumps(scan_corpus([str(file)]).to_json())))
    ids = [entry.id for entry in corpus.entries]
    assert len(set(ids)) == len(ids), "ids that are not unique"
    for number, entry in enumerate(corpus.entries):
        document = corpus.read(number)
        document.text.encode()
        document.id.encode()
        assert document.id == entry.id and (document.error is None) == (entry.error is None), f"{document} {entry}"
        assert document.error is not None or document.text.strip(), "a document without text"


DEEP = 100_000
BOMB_ELEMENTS = 600_000_000
TEXTS = ("", "\0", "\x1b[2J", "\u202e", "\ud800", "../../x", "/etc/passwd", "nan", "x" * 100_000, "{text}", "é" * 300)
NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, float("nan"), float("inf"), -0.0, 1e-320)
OTHERS: tuple[Any, ...] = (None, True, [], {}, [[]], {"a": {}}, [1] * 1000)
WORDS = [n.to_bytes(8, "little", signed=n < 0) for n in (0, 1, -1, 2**31, 2**40, 2**62, -(2**63))]


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
    """Change, drop, repeat or bury a value, somewhere in one JSON document."""
    if chance.random() < 0.3:
        return mutate_bytes(data, chance)
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
            holder[key] = [holder[key]] * chance.choice([2, 300])
    deep = chance.choice(["[", '{"a":']) * DEEP
    text = json.dumps(root[0], ensure_ascii=chance.random() < 0.9)
    return text.replace('"@deep@"', deep).encode(errors="surrogatepass")


def mutate_sealed(data: bytes, chance: random.Random) -> bytes:
    """Change a line of JSON that ends with its checksum; of lines that are no records with the right checksum again."""
    if chance.random() < 0.4:
        return mutate_bytes(data, chance)
    lines = data.splitlines(keepends=True)
    at = chance.choice([number for number, line in enumerate(lines) if not line.startswith(b'{"id":')])
    value = json.loads(lines[at])
    value.pop("seal")
    body = mutate_json(json.dumps(value).encode(), chance).rstrip(b"}\n")
    return b"".join([*lines[:at], body + b', "seal": "%08x"}\n' % zlib.crc32(body), *lines[at + 1 :]])


def mutate_gzip(data: bytes, chance: random.Random) -> bytes:
    """Change the stream, or one row of many that are in it."""
    if chance.random() < 0.5:
        return mutate_bytes(data, chance)
    lines = gzip.decompress(data).splitlines()
    at = chance.randrange(len(lines))
    lines[at] = mutate_json(lines[at], chance)
    rows = chance.choice([b"\n", b"\n", b"\r\n", b"\n\n", b"\xe2\x80\xa8\n"]).join(lines)
    return gzip.compress(rows) + chance.choice([b"", b"", b"junk", data])


def mutate_hdf5(data: bytes, chance: random.Random) -> bytes:
    """Change bytes, or with h5py an attribute, or what is in some place."""
    if chance.random() < 0.6:
        return mutate_bytes(data, chance)
    stream = io.BytesIO(data)
    with h5py.File(stream, "r+") as file:
        found: list[Any] = [file]
        file.visititems(lambda name, item: found.append(item))
        item = chance.choice(found)
        if item.attrs and chance.random() < 0.5:
            values: list[Any] = [*TEXTS[2:4], *NUMBERS[:4], float("nan"), np.zeros(7000), h5py.Empty("f4"), ["a", "b"]]
            item.attrs[chance.choice(list(item.attrs))] = chance.choice([*values, np.bytes_(b"[" * 60_000)])
        elif item != file:
            _change_item(item, chance)
    return stream.getvalue()


def _change_item(item: Any, chance: random.Random) -> None:
    parent, name = item.parent, item.name.rsplit("/", 1)[-1]
    values: list[Any] = [
        *(h5py.SoftLink(path) for path in ("/", "..", "/nowhere", "/kv")),
        h5py.ExternalLink("/etc/passwd", "/"),
        parent,  # a group in itself
        np.full((4, 1, 4), np.nan),
        np.arange(5, dtype=chance.choice(["u1", "f8", ">i8", "i2"])),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    ]
    makers: list[Callable[[], Any]] = [
        *(partial(parent.__setitem__, name, value) for value in values),
        lambda: parent.create_group(name),
        lambda: parent.create_dataset(name, (BOMB_ELEMENTS,), "i8", chunks=(1 << 20,), compression="gzip"),
        lambda: parent.create_dataset(name, (BOMB_ELEMENTS,), "S1"),
        lambda: parent.create_dataset(name, (3,), "i8", external=[("/dev/zero", 0, 24)]),
        lambda: None,
    ]
    del parent[name]
    chance.choice(makers)()


def mutate_lock(data: bytes, chance: random.Random) -> bytes:
    """Change a lock's JSON, or its bytes."""
    return mutate_json(data.rstrip(), chance).ljust(1023) + b"\n"


def _places(holder: Any) -> Any:
    """Yield (container, key) of every value."""
    items = holder.items() if isinstance(holder, dict) else enumerate(holder)
    for key, value in list(items):
        yield holder, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


# Files that nobody writes by chance: each is meant to exhaust, mislead or stop whoever reads it.
MEBI = 1 << 20


def _spaces(before: bytes, after: bytes) -> bytes:
    """A gzip stream with 1.2 GB of spaces, in one line: the same member again and again."""
    return gzip.compress(before) + gzip.compress(b" " * (48 * MEBI)) * 25 + gzip.compress(after)


def _row(text: object, name: object = "a") -> bytes:
    return json.dumps({"id": name, "text": text}).encode() + b"\n"


def _rows(*lines: bytes) -> bytes:
    return gzip.compress(b"\n".join([_row("x"), *lines, _row("y", "b")]))


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "brackets": ("gzip", lambda: _rows(b"[" * DEEP)),
    "long number": ("gzip", lambda: _rows(b'{"id": 1' + b"0" * 100_000 + b', "text": "x"}')),
    "odd ids": ("gzip", lambda: _rows(*(_row("x", name) for name in ([], {}, True, "\u202e", "\x1b[2J", "..")))),
    "lone surrogate": ("gzip", lambda: _rows(b'{"id": "\\ud800", "text": "\\udfff"}')),
    "only newlines": ("gzip", lambda: _rows(b"\n" * MEBI)),
    "bomb of one line": ("gzip", lambda: _spaces(_row("x"), b"\n" + _row("y", "b"))),
    "bomb of a text": ("gzip", lambda: _spaces(b'{"id": "a", "text": "', b'"}\n')),
    "large lock": ("lock", lambda: b'{"owner": "' + b"x" * (64 * MEBI) + b'"}'),
    "one long log line": ("log", lambda: b"x" * (64 * MEBI)),
}


RUN_READERS = (read_folder, resume_folder)
KINDS: dict[str, Kind] = {
    "results": Kind("alone", RESULTS, mutate_hdf5, (read_alone,)),
    "merged": Kind("merged", RESULTS, mutate_hdf5, RUN_READERS),
    "volume": Kind("run", VOLUME, mutate_hdf5, RUN_READERS),
    "log": Kind("run", "log-0001-0000.jsonl", mutate_sealed, RUN_READERS),
    "run": Kind("run", "run.json", mutate_sealed, RUN_READERS),
    "lock": Kind("run", ".lock-000001", mutate_json, RUN_READERS),
    "gzip": Kind("files", "rows.jsonl.gz", mutate_gzip, (read_corpus,)),
}


def write_expected(folder: Path) -> None:
    """Note what the valid runs hold, beside them."""
    found = exported(folder / "run")
    assert found is not None and len(found) == 6
    for name in ("run", "merged", "alone"):
        (folder / name / "expected.json").write_text(json.dumps(found))
