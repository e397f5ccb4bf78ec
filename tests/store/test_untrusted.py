"""Result files come from anywhere: whatever is wrong with one, reading it ends in DataError, or is right.

Never in a traceback, in another file's data, in code that runs, in a process that hangs, or in a wrong answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import resume

from kvr_mpi.cli import kvr as kvr_main
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK, DataError, ForeignError
from kvr_mpi.store.folder import read_run
from kvr_mpi.store.kv import read_array
from kvr_mpi.store.merge import merge_run
from kvr_mpi.store.outputs import (
    ARRAYS,
    Header,
    Record,
    document_groups,
    kv_layers,
    open_file,
    read_header,
    read_software,
)
from kvr_mpi.store.shards import ShardWriter

IDENTITY: dict[str, Any] = {"model": "0123abcd", "kv": True}
HEADER = Header(IDENTITY, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "float32"})
SECRET = "top-secret-words"
ATTRIBUTES = [spec for spec in fields(Record) if spec.name not in (*ARRAYS, "answer")]
Damage = Callable[[h5py.File, Path], None]


def write_good(folder: Path) -> Path:
    """Write the file that everything here is a damaged copy of."""
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, "0000", HEADER)
    layer = torch.arange(16.0).reshape(4, 1, 4)
    for name in ("a", "b"):
        record = Record(
            name, "done", answer=f"about {name}", token_ids=(5, 6), slices=(0, 2, 4), prompt_tokens=4, ttft_s=0.5
        )
        writer.write(record, [(layer, -layer), (layer.half(), layer.half())])
    writer.flush()
    return next(folder.glob("*.h5"))


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_good(tmp_path_factory.mktemp("good")).read_bytes()


@pytest.fixture
def good(tmp_path: Path, good_bytes: bytes) -> Path:
    path = tmp_path / "results.h5"
    path.write_bytes(good_bytes)
    return path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Hold files that no result file may lead to."""
    folder = tmp_path / "outside"
    other = write_good(folder)
    with h5py.File(other, "a") as file:
        file["secret"] = SECRET
        file["words"] = np.array([SECRET.encode()])
        file["numbers"] = np.array([0, 2, 4], dtype=np.int64)
        file["floats"] = np.ones((4, 1, 4), dtype=np.float32)
    other.rename(folder / "other.h5")
    (folder / "secret.txt").write_bytes(SECRET.encode().ljust(256, b"."))
    return folder


def read_everything(path: Path) -> list[Record]:
    """Read all that the package can read of a file."""
    records = list(read_run(path))
    with open_file(path) as file:
        read_header(file)
        read_software(file)
        for group, _, _ in document_groups(file):
            for _, keys, values in kv_layers(group):
                read_array(keys)
                read_array(values)
    return records


Kvr = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_kvr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvr:
    """Run the entry point of ``kvr`` in this process: code, standard output, standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvr", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            kvr_main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


def assert_bad_data(outcome: tuple[int, str, str], path: Path) -> None:
    code, out, err = outcome
    assert code == EXIT_BAD_DATA
    assert "Traceback" not in err and SECRET not in out + err
    assert len(err.splitlines()) == 1 and err.startswith("kvr: ") and path.name in err


# The undamaged file, so that all the refusals below mean something


def test_the_undamaged_file_is_read(good: Path, run_kvr: Kvr) -> None:
    assert [record.id for record in read_everything(good)] == ["a", "b"]
    for command in (["inspect", good], ["inspect", good, "a"], ["export", good], ["export", good, "--format", "csv"]):
        code, out, err = run_kvr(*command)
        assert code == EXIT_OK and out and not err


# Files that are no HDF5, or not all of one

NO_HDF5 = {
    "empty": b"",
    "text": b"id,answer\na,b\n",
    "json": b'{"schema": "kvr-mpi", "schema_version": 1}\n',
    "zeros": bytes(4096),
    "signature": b"\x89HDF\r\n\x1a\n",
    "signature-zeros": b"\x89HDF\r\n\x1a\n" + bytes(4096),
    "signature-ones": b"\x89HDF\r\n\x1a\n" + b"\xff" * 4096,
    "zip": b"PK\x03\x04" + bytes(100),
    "pickle": b"cos\nsystem\n(S'touch owned'\ntR.",
}


@pytest.mark.parametrize("content", NO_HDF5.values(), ids=NO_HDF5)
def test_what_is_no_hdf5_file_is_refused(tmp_path: Path, content: bytes, run_kvr: Kvr) -> None:
    path = tmp_path / "results.h5"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"results\.h5"):
        read_everything(path)
    for command in (["inspect", path], ["inspect", path, "a"], ["export", path], ["inspect", tmp_path]):
        assert_bad_data(run_kvr(*command), path)


@settings(max_examples=40, deadline=None)
@given(content=st.binary(max_size=600), signed=st.booleans())
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes, signed: bool) -> None:
    path = tmp_path_factory.mktemp("random") / "results.h5"
    path.write_bytes((b"\x89HDF\r\n\x1a\n" if signed else b"") + content)
    with pytest.raises(DataError):
        read_everything(path)


def test_a_folder_named_like_a_file_is_refused(tmp_path: Path, run_kvr: Kvr) -> None:
    (tmp_path / "results.h5").mkdir()
    assert_bad_data(run_kvr("inspect", tmp_path), tmp_path)
    assert_bad_data(run_kvr("export", tmp_path / "results.h5"), tmp_path / "results.h5")


def outcome(path: Path) -> str | list[Record]:
    try:
        return read_everything(path)
    except DataError:
        return "refused"


def test_a_truncated_file_is_refused_or_read_right(tmp_path: Path, good_bytes: bytes) -> None:
    path = tmp_path / "results.h5"
    path.write_bytes(good_bytes)
    whole = read_everything(path)
    size = len(good_bytes)
    cuts = [*range(0, 200, 4), size // 2, *range(200, size - 100, 97), *range(size - 100, size, 3), size - 1]
    got = {}
    for cut in cuts:
        path.write_bytes(good_bytes[:cut])
        got[cut] = outcome(path)
    assert [cut for cut, result in got.items() if result not in ("refused", whole)] == []
    assert all(got[cut] == "refused" for cut in (0, 8, size // 2))


def test_a_longer_file_is_refused_or_read_right(tmp_path: Path, good_bytes: bytes) -> None:
    path = tmp_path / "results.h5"
    path.write_bytes(good_bytes)
    whole = read_everything(path)
    for tail in (b"\n", bytes(4096), good_bytes):
        path.write_bytes(good_bytes + tail)
        assert outcome(path) in ("refused", whole)


# Each damaged copy is read in its own process, since libhdf5 may loop or crash.
FLIPS = """
import json, os, signal, sys
from pathlib import Path
from kvr_mpi.errors import DataError
from kvr_mpi.store.folder import read_run
from kvr_mpi.store.outputs import open_file, read_header, read_software

def read(path):
    with open_file(path) as file:
        return repr((list(read_run(path)), read_header(file), read_software(file)))

path = Path(sys.argv[1])
content = path.read_bytes()
whole = read(path)
outcomes = {}
for offset in range(*map(int, sys.argv[2:])):
    damaged = bytearray(content)
    damaged[offset] ^= 1 << offset * 5 % 8
    path.write_bytes(damaged)
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(1)
        try:
            said = "right" if read(path) == whole else "other"
        except DataError:
            said = "refused"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(sink, said.encode(errors="replace")[:300])
        os._exit(0)
    os.close(sink)
    status = os.waitpid(child, 0)[1]
    said = os.read(source, 300).decode(errors="replace") if status == 0 else f"ended by signal {status & 127}"
    os.close(source)
    outcomes[offset] = said
print(json.dumps(outcomes))
"""


def flip(path: Path, start: int, stop: int, step: int) -> dict[str, str]:
    """Read copies with one bit flipped: what came of each, by offset."""
    done = subprocess.run(
        [sys.executable, "-c", FLIPS, path, str(start), str(stop), str(step)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    outcomes: dict[str, str] = json.loads(done.stdout)
    assert len(outcomes) == len(range(start, stop, step))
    return outcomes


def test_a_flipped_bit_in_the_superblock_is_refused(good: Path) -> None:
    outcomes = flip(good, 0, 48, 1)
    assert {offset: said for offset, said in outcomes.items() if said not in ("right", "refused")} == {}
    assert list(outcomes.values()).count("refused") > 40


def test_a_flipped_bit_in_the_root_group_is_refused_or_read_right(good: Path) -> None:
    outcomes = flip(good, 48, 900, 11)
    assert {offset: said for offset, said in outcomes.items() if said not in ("right", "refused")} == {}


def test_a_flipped_bit_anywhere_is_refused_or_read_right(good: Path) -> None:
    # All that is read is under a checksum, HDF5's or our own.
    outcomes = flip(good, 900, good.stat().st_size, 31)
    assert {offset: said for offset, said in outcomes.items() if said not in ("right", "refused")} == {}
    assert "refused" in outcomes.values()


@pytest.mark.parametrize(("at", "value"), [(24, 0), (24, 2**63)], ids=["size-zero", "size-huge"])
def test_a_damaged_string_heap_does_not_hang(good: Path, kvr: Path, at: int, value: int) -> None:
    # libhdf5 2.0 loops for ever over such a heap of variable-length strings; the schema may not lead there.
    with h5py.File(good, "a") as file:
        file.attrs["schema"] = "kvr-mpi"
    content = bytearray(good.read_bytes())
    heap = content.find(b"GCOL")
    assert heap > 0
    while heap > 0:
        content[heap + at : heap + at + 8] = value.to_bytes(8, "little")
        heap = content.find(b"GCOL", heap + 1)
    good.write_bytes(content)
    done = subprocess.run([kvr, "inspect", good], capture_output=True, text=True, timeout=4, check=False)
    assert_bad_data((done.returncode, done.stdout, done.stderr), good)


# HDF5 files that are not what they should be


def replace(name: str, value: Any) -> Damage:
    """Put something else under a name of document a; None: nothing."""

    def damage(file: h5py.File, outside: Path) -> None:
        group = file["documents/a"]
        del group[name]
        if value is not None:
            group[name] = value

    return damage


def replace_in(place: str, value: Callable[[Path], Any]) -> Damage:
    """Put a link, which may need to know where the other files are, in the place of something."""

    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        file[place] = value(outside)

    return damage


def to_group(place: str) -> Damage:
    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        file.create_group(place)

    return damage


def external(name: str) -> Callable[[Path], Any]:
    return lambda outside: h5py.ExternalLink(str(outside / "other.h5"), name)


def virtual(place: str, source: str) -> Damage:
    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        with h5py.File(outside / "other.h5") as other:
            found = other[source]
            layout = h5py.VirtualLayout(shape=found.shape, dtype=found.dtype)
            layout[...] = h5py.VirtualSource(found)
        file.create_virtual_dataset(place, layout)

    return damage


def stored_outside(place: str, shape: tuple[int, ...], dtype: str) -> Damage:
    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        raw = [(str(outside / "secret.txt"), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset(place, shape, dtype, external=raw)

    return damage


def unwritten(place: str, shape: tuple[int, ...], dtype: str, **options: Any) -> Damage:
    """Put a dataset without data in the place: its values read as zeros, as many as it claims."""

    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        file.create_dataset(place, shape, dtype, **options)

    return damage


def of_time(place: str) -> Damage:
    """Put a dataset of a type that numpy has no word for in the place."""

    def damage(file: h5py.File, outside: Path) -> None:
        parent, name = place.rsplit("/", 1)
        del file[place]
        space = h5py.h5s.create_simple((4, 1, 4))
        h5py.h5d.create(file[parent].id, name.encode(), h5py.h5t.UNIX_D32LE, space)

    return damage


def attribute(place: str, name: str, value: Any) -> Damage:
    """Give an attribute another value; None: take it away."""

    def damage(file: h5py.File, outside: Path) -> None:
        del file[place].attrs[name]
        if value is not None:
            file[place].attrs[name] = value

    return damage


def attribute_of_time(place: str, name: str) -> Damage:
    def damage(file: h5py.File, outside: Path) -> None:
        del file[place].attrs[name]
        h5py.h5a.create(file[place].id, name.encode(), h5py.h5t.UNIX_D32LE, h5py.h5s.create(h5py.h5s.SCALAR))

    return damage


def attribute_bytes(place: str, name: str, value: bytes) -> Damage:
    """Write an attribute that claims to be UTF-8 and is not."""
    return attribute(place, name, np.array(value, dtype=h5py.string_dtype("utf-8", len(value))))


def dataset_with_attributes(file: h5py.File, outside: Path) -> None:
    attributes = dict(file["documents/a"].attrs)
    del file["documents/a"]
    file["documents/a"] = np.arange(3)
    file["documents/a"].attrs.update(attributes)


def named_type_with_attributes(file: h5py.File, outside: Path) -> None:
    attributes = dict(file["documents/a"].attrs)
    del file["documents/a"]
    file["documents/a"] = np.dtype("f8")
    file["documents/a"].attrs.update(attributes)


def move(source: str, target: str) -> Damage:
    def damage(file: h5py.File, outside: Path) -> None:
        file.move(source, target)

    return damage


def two_names(file: h5py.File, outside: Path) -> None:
    file["documents/c"] = file["documents/a"]


PICKLE = np.void(b"cos\nsystem\n(S'touch owned'\ntR.")
COMPOUND = np.zeros(3, dtype=[("a", "i8"), ("b", "f4")])

# In a document, or on the way to it: no command may go on.
RECORD_DAMAGE: dict[str, Damage] = {
    "answer-missing": replace("answer", None),
    "answer-group": to_group("documents/a/answer"),
    "answer-number": replace("answer", 5),
    "answer-numbers": replace("answer", np.arange(3)),
    "answer-several": replace("answer", ["one", "two"]),
    "answer-one-in-a-list": replace("answer", ["one"]),
    "answer-null": replace("answer", h5py.Empty("S5")),
    "answer-pickle": replace("answer", PICKLE),
    "answer-pickles": replace("answer", np.array([PICKLE, PICKLE])),
    "answer-compound": replace("answer", COMPOUND),
    "answer-not-utf8": replace("answer", np.array(b"\xff\xfe\xfd", dtype=h5py.string_dtype("utf-8", 3))),
    "answer-bytes": replace("answer", [np.arange(3, dtype=np.uint8)]),
    "answer-time": of_time("documents/a/answer"),
    "answer-external-link": replace_in("documents/a/answer", external("/secret")),
    "answer-dangling-external-link": replace_in("documents/a/answer", lambda _: h5py.ExternalLink("no.h5", "/x")),
    "answer-soft-link": replace_in("documents/a/answer", lambda _: h5py.SoftLink("/documents/b/answer")),
    "answer-dangling-soft-link": replace_in("documents/a/answer", lambda _: h5py.SoftLink("/nowhere")),
    "answer-looping-soft-link": replace_in("documents/a/answer", lambda _: h5py.SoftLink("/documents/a/answer")),
    "answer-virtual": virtual("documents/a/answer", "words"),
    "answer-stored-outside": stored_outside("documents/a/answer", (1,), "S16"),
    "answer-unwritten": unwritten("documents/a/answer", (), "S16"),
    **{
        f"{name}-{what}": damage
        for name in ARRAYS
        for what, damage in {
            "missing": replace(name, None),
            "group": to_group(f"documents/a/{name}"),
            "scalar": replace(name, 5),
            "text": replace(name, "5 6 7"),
            "digits": replace(name, [b"5", b"6"]),
            "floats": replace(name, [0.5, 1.5]),
            "whole-floats": replace(name, [0.0, 2.0]),
            "column": replace(name, np.zeros((3, 1), dtype=np.int64)),
            "beyond-int64": replace(name, np.array([2**64 - 1], dtype=np.uint64)),
            "null": replace(name, h5py.Empty("i8")),
            "pickle": replace(name, PICKLE),
            "pickles": replace(name, np.array([PICKLE, PICKLE])),
            "compound": replace(name, COMPOUND),
            "time": of_time(f"documents/a/{name}"),
            "external-link": replace_in(f"documents/a/{name}", external("/numbers")),
            "soft-link": replace_in(f"documents/a/{name}", lambda _: h5py.SoftLink("/documents/b/slices")),
            "virtual": virtual(f"documents/a/{name}", "numbers"),
            "stored-outside": stored_outside(f"documents/a/{name}", (3,), "i8"),
            "unwritten": unwritten(f"documents/a/{name}", (3,), "i8"),
            "unwritten-chunks": unwritten(f"documents/a/{name}", (3,), "i8", chunks=(3,)),
            "unwritten-compressed": unwritten(f"documents/a/{name}", (3,), "i8", chunks=(3,), compression="gzip"),
            "huge": unwritten(f"documents/a/{name}", (2**50,), "i8", chunks=(8,), compression="gzip"),
        }.items()
    },
    **{f"{spec.name}-missing": attribute("documents/a", spec.name, None) for spec in ATTRIBUTES},
    **{
        f"{spec.name}-wrong-type": attribute("documents/a", spec.name, 5 if spec.type == "str" else "5")
        for spec in ATTRIBUTES
    },
    **{f"{spec.name}-array": attribute("documents/a", spec.name, np.arange(3)) for spec in ATTRIBUTES},
    **{f"{spec.name}-null": attribute("documents/a", spec.name, h5py.Empty("f8")) for spec in ATTRIBUTES},
    **{f"{spec.name}-pickle": attribute("documents/a", spec.name, PICKLE) for spec in ATTRIBUTES},
    **{f"{spec.name}-time": attribute_of_time("documents/a", spec.name) for spec in ATTRIBUTES},
    **{
        f"{spec.name}-not-utf8": attribute_bytes("documents/a", spec.name, b"\xffdone\xfe")
        for spec in ATTRIBUTES
        if spec.type == "str"
    },
    **{f"{spec.name}-fraction": attribute("documents/a", spec.name, 1.5) for spec in ATTRIBUTES if spec.type == "int"},
    "status-unknown": attribute("documents/a", "status", "maybe"),
    "id-of-another": attribute("documents/a", "id", "b"),
    "id-of-nobody": attribute("documents/a", "id", "../../x"),
    "key-of-another": move("documents/a", "documents/c"),
    "key-not-encoded": move("documents/a", "documents/é"),
    "two-names": two_names,
    "document-dataset": dataset_with_attributes,
    "document-named-type": named_type_with_attributes,
    "document-external-link": replace_in("documents/a", external("/documents/a")),
    "document-soft-link": replace_in("documents/a", lambda _: h5py.SoftLink("/documents/b")),
    "document-dangling-link": replace_in("documents/a", lambda _: h5py.SoftLink("/nowhere")),
    "documents-missing": move("documents", "papers"),
    "documents-scalar": replace_in("documents", lambda _: 5),
    "documents-names": replace_in("documents", lambda _: ["a", "b"]),
    "documents-no-names": replace_in("documents", lambda _: np.zeros(0)),
    "documents-named-type": replace_in("documents", lambda _: np.dtype("f8")),
    "documents-external-link": replace_in("documents", external("/documents")),
    "documents-soft-link": replace_in("documents", lambda _: h5py.SoftLink("/")),
    "schema-missing": attribute("/", "schema", None),
    "schema-other": attribute("/", "schema", "anndata"),
    "schema-number": attribute("/", "schema", 1),
    "schema-list": attribute("/", "schema", ["kvr-mpi", "kvr-mpi"]),
    "schema-null": attribute("/", "schema", h5py.Empty("S5")),
    "schema-pickle": attribute("/", "schema", PICKLE),
    "schema-time": attribute_of_time("/", "schema"),
    "schema-not-utf8": attribute_bytes("/", "schema", b"\xff\xfe"),
    "version-missing": attribute("/", "schema_version", None),
    "version-newer": attribute("/", "schema_version", 3),
    "version-far": attribute("/", "schema_version", 2**62),
    "version-text": attribute("/", "schema_version", "1"),
    "version-fraction": attribute("/", "schema_version", 1.5),
    "version-list": attribute("/", "schema_version", [1, 1]),
    "version-time": attribute_of_time("/", "schema_version"),
}

# In what a file says of itself: nothing that shows it may go on.
HEADER_DAMAGE: dict[str, Damage] = {
    f"{name}-{what}": damage
    for name in ("identity", "model", "software")
    for what, damage in {
        "missing": attribute("/", name, None),
        "no-json": attribute("/", name, "{'a': 1}"),
        "half": attribute("/", name, '{"a": '),
        "list": attribute("/", name, "[1, 2]"),
        "text": attribute("/", name, '"name"'),
        "json-null": attribute("/", name, "null"),
        "number": attribute("/", name, 5),
        "array": attribute("/", name, np.arange(3)),
        "null": attribute("/", name, h5py.Empty("S5")),
        "pickle": attribute("/", name, PICKLE),
        "time": attribute_of_time("/", name),
        "not-utf8": attribute_bytes("/", name, b'{"\xff": 1}'),
        "deep": attribute("/", name, "[" * 100_000),
    }.items()
} | {
    f"model-without-{name}": attribute("/", "model", json.dumps({k: v for k, v in HEADER.model.items() if k != name}))
    for name in HEADER.model
}

# In keys and values: nothing that shows the document may go on.
KEYS = "documents/a/kv/layer_000/keys"
KV_DAMAGE: dict[str, Damage] = {
    "kv-dataset": replace("kv", np.arange(3)),
    "kv-scalar": replace("kv", 5),
    "kv-named-type": replace("kv", np.dtype("f8")),
    "kv-external-link": replace_in("documents/a/kv", external("/documents/a/kv")),
    "kv-soft-link": replace_in("documents/a/kv", lambda _: h5py.SoftLink("/documents/b/kv")),
    "kv-dangling-link": replace_in("documents/a/kv", lambda _: h5py.SoftLink("/nowhere")),
    **{
        f"layer-named-{name or 'nothing'}": move("documents/a/kv/layer_000", f"documents/a/kv/layer_{name}")
        for name in ("", "x", "0x1", "1e3", "-1", "0 0", "000 ", "٣", "../..".replace("/", "%2F"))
    },
    "layer-unnamed": move("documents/a/kv/layer_000", "documents/a/kv/strange"),
    "layer-dataset": replace_in("documents/a/kv/layer_000", lambda _: np.arange(3)),
    "layer-scalar": replace_in("documents/a/kv/layer_000", lambda _: 5),
    "layer-external-link": replace_in("documents/a/kv/layer_000", external("/documents/a/kv/layer_000")),
    "layer-soft-link": replace_in("documents/a/kv/layer_000", lambda _: h5py.SoftLink("/documents/b/kv/layer_000")),
    "keys-missing": move(KEYS, "documents/a/kv/layer_000/k"),
    "keys-group": to_group(KEYS),
    "keys-named-type": replace_in(KEYS, lambda _: np.dtype("f4")),
    "keys-external-link": replace_in(KEYS, external("/floats")),
    "keys-soft-link": replace_in(KEYS, lambda _: h5py.SoftLink("/documents/b/kv/layer_000/keys")),
    "keys-virtual": virtual(KEYS, "floats"),
    "keys-stored-outside": stored_outside(KEYS, (4, 1, 4), "f4"),
    "keys-unwritten": unwritten(KEYS, (4, 1, 4), "f4"),
    "keys-unwritten-chunks": unwritten(KEYS, (4, 1, 4), "f4", chunks=(4, 1, 4)),
    "keys-null": replace_in(KEYS, lambda _: h5py.Empty("f4")),
    "keys-text": replace_in(KEYS, lambda _: "keys"),
    "keys-pickle": replace_in(KEYS, lambda _: PICKLE),
    "keys-compound": replace_in(KEYS, lambda _: COMPOUND),
    "keys-integers": replace_in(KEYS, lambda _: np.zeros((4, 1, 4), dtype=np.int32)),
    "keys-time": of_time(KEYS),
}
# The type of keys is not looked at to show their shape.
KV_READ_DAMAGE: dict[str, Damage] = {
    "keys-huge": unwritten(KEYS, (2**40, 2**5, 2**5), "f4", chunks=(8, 8, 8), compression="gzip"),
}


def damaged(path: Path, outside: Path, damage: Damage) -> Path:
    with h5py.File(path, "a") as file:
        damage(file, outside)
    return path


def cases(*tables: dict[str, Damage]) -> list[Any]:
    return [pytest.param(damage, id=name) for table in tables for name, damage in table.items()]


@pytest.mark.parametrize("damage", cases(RECORD_DAMAGE, HEADER_DAMAGE, KV_DAMAGE, KV_READ_DAMAGE))
def test_reading_a_damaged_file_is_bad_data(good: Path, outside: Path, damage: Damage) -> None:
    path = damaged(good, outside, damage)
    with pytest.raises(DataError) as caught:
        read_everything(path)
    assert path.name in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize("damage", cases(RECORD_DAMAGE))
def test_no_command_goes_on_with_a_damaged_document(good: Path, outside: Path, damage: Damage, run_kvr: Kvr) -> None:
    path = damaged(good, outside, damage)
    for command in (["inspect", path], ["inspect", path, "--json"], ["inspect", path, "a"], ["export", path]):
        assert_bad_data(run_kvr(*command), path)


@pytest.mark.parametrize("damage", cases(HEADER_DAMAGE))
def test_no_damaged_header_is_shown(good: Path, outside: Path, damage: Damage, run_kvr: Kvr) -> None:
    path = damaged(good, outside, damage)
    for command in (["inspect", path], ["inspect", path, "--json"]):
        assert_bad_data(run_kvr(*command), path)


@pytest.mark.parametrize("damage", cases(KV_DAMAGE))
def test_no_damaged_keys_and_values_are_shown(good: Path, outside: Path, damage: Damage, run_kvr: Kvr) -> None:
    path = damaged(good, outside, damage)
    for command in (["inspect", path, "a"], ["inspect", path, "a", "--json"]):
        assert_bad_data(run_kvr(*command), path)


@pytest.mark.parametrize(
    "name",
    [
        "id-missing", "id-array", "id-time", "id-not-utf8", "status-missing", "status-array", "status-time",
        "status-unknown", "id-of-nobody", "document-dataset", "document-soft-link", "documents-scalar",
        "documents-no-names", "schema-list", "version-newer", "identity-list", "identity-json-null", "identity-deep",
    ],
)  # fmt: skip
def test_no_damaged_file_is_resumed_or_merged(good: Path, outside: Path, name: str) -> None:
    damaged(good, outside, {**RECORD_DAMAGE, **HEADER_DAMAGE}[name])
    shard = good.rename(good.with_name("shard-0000-00000.h5"))
    content = shard.read_bytes()
    if not name.startswith("identity"):
        with pytest.raises(DataError):
            merge_run(good.parent)
    if name == "version-newer":
        with pytest.raises(ForeignError):
            resume(good.parent, header=HEADER)
        assert shard.read_bytes() == content
    else:  # set aside, whole, and nothing in it counts
        done, failed, said = resume(good.parent, header=HEADER)
        assert not done and not failed and any("is damaged" in line for line in said)
        assert shard.with_name(f"{shard.name}.damaged-1").read_bytes() == content and not shard.exists()


@pytest.mark.parametrize("command", [["inspect"], ["export"], ["export", "--format", "csv"]], ids=" ".join)
def test_the_installed_command_says_it_in_one_line(good: Path, outside: Path, kvr: Path, command: list[str]) -> None:
    damaged(good, outside, RECORD_DAMAGE["answer-external-link"])
    done = subprocess.run([kvr, *command, good], capture_output=True, text=True, timeout=60, check=False)
    assert_bad_data((done.returncode, done.stdout, done.stderr), good)
    assert len(done.stdout.splitlines()) <= 1  # of CSV, the names of the columns are out already


@pytest.mark.parametrize("kind", ["external-link", "virtual", "stored-outside"])
def test_no_other_file_is_even_opened(good: Path, outside: Path, kvr: Path, kind: str) -> None:
    # Opening a pipe that nobody writes to waits for ever, so a reader that follows the link runs out of time.
    damage = {
        "external-link": replace_in("documents/a/answer", external("/secret")),
        "virtual": virtual("documents/a/slices", "numbers"),
        "stored-outside": stored_outside("documents/a/slices", (3,), "i8"),
    }[kind]
    damaged(good, outside, damage)
    for name in ("other.h5", "secret.txt"):
        (outside / name).unlink()
        os.mkfifo(outside / name)
    done = subprocess.run([kvr, "inspect", good], capture_output=True, text=True, timeout=5, check=False)
    assert_bad_data((done.returncode, done.stdout, done.stderr), good)


def test_a_failed_export_leaves_no_file_and_keeps_the_old_one(good: Path, outside: Path, run_kvr: Kvr) -> None:
    damaged(good, outside, replace("answer", PICKLE))
    fresh, old = good.parent / "fresh.jsonl", good.parent / "old.jsonl"
    old.write_text("precious")
    assert_bad_data(run_kvr("export", good, "-o", fresh), good)
    assert_bad_data(run_kvr("export", good, "-o", old, "--overwrite"), good)
    assert not fresh.exists() and old.read_text() == "precious"
    assert list(good.parent.glob("*.part")) == []


def test_a_truncated_input_is_bad_data_not_a_bad_output_file(good: Path, run_kvr: Kvr) -> None:
    good.write_bytes(good.read_bytes()[:5000])
    for kind in ("jsonl", "csv", "parquet"):
        assert_bad_data(run_kvr("export", good, "--format", kind, "-o", good.with_name("out")), good)
    assert not good.with_name("out").exists()
