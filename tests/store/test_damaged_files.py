"""Result files that come from anywhere: a good one, and by name everything that can be wrong with it.

Reading one ends in DataError, or is right, and no command goes on: what may come of it is never a traceback, another
file's data, code that runs, a process that hangs, or a wrong answer.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from constants import Kvr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_runs import new_writer, resume

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK, DataError
from kvr_mpi.store.kv import CachedTokens, piece_id
from kvr_mpi.store.log import SCHEMA_VERSION, Header, seal, unseal
from kvr_mpi.store.record import ARRAYS, ASKED_FOR, REALS, Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.volumes import key_of

HEADER = Header(
    {"model": "0123abcd", "kv": True}, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "float32"}
)
SECRET = "top-secret-words"
TOKENS = CachedTokens((7, 8, 9, 5), (1, 3))


def good_record(name: str) -> Record:
    return Record(
        name, "done", answer=f"about {name}", token_ids=(5, 6), slices=(0, 2, 4), prompt_tokens=4, ttft_s=0.5,
        logprobs=(-0.5, -1.5), top_tokens=(5, 9), top_logprobs=(-0.5, -0.25),
        token_texts='{"5": "a"}', scores='[{"text": "a"}]', samples="[]", cache="rolling", text_tokens=2,
        kernels="CPU",
    )  # fmt: skip


def kv_of(name: str) -> str:
    """Path of a document's keys and values in the file."""
    return f"kv/{key_of(piece_id(good_record(name), TOKENS))}"


def write_good(folder: Path) -> Path:
    """Write the file that everything here is a damaged copy of."""
    folder.mkdir(exist_ok=True)
    writer = new_writer(folder, header=HEADER)
    layer = torch.arange(16.0).reshape(4, 1, 4)
    for name in ("a", "b"):
        writer.write(good_record(name), [(layer, -layer), (layer.half(), layer.half())], TOKENS)
    writer.close()
    return merge_run(folder)


def read_everything(path: Path) -> list[Record]:
    """Read all that the package can read of a file."""
    results = open_results(path, verify=False)
    records = list(results)
    for record in records:
        with results.open(record.id) as (_, kv):
            for layer in kv.layers:
                kv.read(layer)
    return records


def assert_bad_data(outcome: tuple[int, str, str], path: Path) -> None:
    code, out, err = outcome
    assert code == EXIT_BAD_DATA
    assert "Traceback" not in err and SECRET not in out + err
    assert len(err.splitlines()) == 1 and err.startswith("Error: ") and path.name in err


# Given a file, and a folder with files that it may not lead to.
Damage = Callable[[h5py.File, Path], None]

PICKLE = np.void(b"cos\nsystem\n(S'touch owned'\ntR.")
COMPOUND = np.zeros(3, dtype=[("a", "i8"), ("b", "f4")])
DEEP = b"[" * 100_000
WRONG: dict[str, tuple[Any, ...]] = {"str": (5, None, ["a"]), "int": ("5", 1.5, True, 2**64), "float": ("5", [0.5])}
# Where keys and values are, of the two documents.
A, B = kv_of("a"), kv_of("b")
LAYER, KEYS = f"{A}/layer_000", f"{A}/layer_000/keys"


def relined(change: Callable[[dict[str, Any]], Any], name: str = "records", number: int = 0) -> Damage:
    """Change what a line says, and seal it again; bytes are put in its place as they are, None takes it away."""

    def damage(file: h5py.File, outside: Path) -> None:
        lines = file[name][()].tobytes().splitlines(keepends=True)
        value = unseal(lines[number])
        assert value is not None
        changed = change(value)
        lines[number] = changed if isinstance(changed, bytes) else b"" if changed is None else seal(changed)
        del file[name]
        file.create_dataset(name, data=np.frombuffer(b"".join(lines), np.uint8))

    return damage


def setting(name: str, value: Any) -> Damage:
    """Give a field of document a's record another value."""
    return relined(lambda line: line | {name: value})


def without(name: str) -> Damage:
    """Take a field of document a's record away."""
    return relined(lambda line: {key: value for key, value in line.items() if key != name})


def log_line(number: int, **values: Any) -> Damage:
    """Change what a line of the log says."""
    return relined(lambda line: line | values, "log", number)


def instead(place: str, make: Callable[[h5py.File, Path], object]) -> Damage:
    """Make something else in a place."""

    def damage(file: h5py.File, outside: Path) -> None:
        del file[place]
        make(file, outside)

    return damage


def replaced(place: str, value: Any) -> Damage:
    return instead(place, lambda file, outside: file.__setitem__(place, value))


def external(place: str, name: str) -> Damage:
    return instead(
        place, lambda file, outside: file.__setitem__(place, h5py.ExternalLink(str(outside / "other.h5"), name))
    )


def virtual(place: str, source: str) -> Damage:
    def make(file: h5py.File, outside: Path) -> None:
        with h5py.File(outside / "other.h5") as other:
            found = other[source]
            layout = h5py.VirtualLayout(shape=found.shape, dtype=found.dtype)
            layout[...] = h5py.VirtualSource(found)
        file.create_virtual_dataset(place, layout)

    return instead(place, make)


def stored_outside(place: str, shape: tuple[int, ...], dtype: str) -> Damage:
    def make(file: h5py.File, outside: Path) -> None:
        raw = [(str(outside / "secret.txt"), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset(place, shape, dtype, external=raw)

    return instead(place, make)


def unwritten(place: str, shape: tuple[int, ...], dtype: str, **options: Any) -> Damage:
    """Put a dataset without data in the place: its values read as zeros, as many as it claims."""
    return instead(place, lambda file, outside: file.create_dataset(place, shape, dtype, **options))


def chunked(place: str, compression: str | None = None) -> Damage:
    """Store the same values in chunks, or through a filter that kvr-mpi never uses, as a bomb would be."""

    def damage(file: h5py.File, outside: Path) -> None:
        values = file[place][()]
        del file[place]
        file.create_dataset(place, data=values, chunks=True, compression=compression)

    return damage


def attribute(place: str, name: str, value: Any) -> Damage:
    """Give an attribute another value; None: take it away."""

    def damage(file: h5py.File, outside: Path) -> None:
        del file[place].attrs[name]
        if value is not None:
            file[place].attrs[name] = value

    return damage


def move(source: str, target: str) -> Damage:
    return lambda file, outside: file.move(source, target)


def misplaced(place: str) -> dict[str, Damage]:
    """Put everything that cannot be there in the place of a group or dataset."""
    found: dict[str, Damage] = {
        "missing": move(place, "other"),
        "group": instead(place, lambda file, outside: file.create_group(place)),
        "scalar": replaced(place, 5),
        "text": replaced(place, "{}"),
        "numbers": replaced(place, np.arange(3)),
        "column": replaced(place, np.zeros((3, 1), np.uint8)),
        "pickle": replaced(place, PICKLE),
        "compound": replaced(place, COMPOUND),
        "external-link": external(place, "/numbers"),
        "soft-link": replaced(place, h5py.SoftLink(f"/{place.replace(A, B)}")),  # else to itself
        "dangling-link": replaced(place, h5py.SoftLink("/nowhere")),
        "virtual": virtual(place, "numbers"),
        "stored-outside": stored_outside(place, (16,), "u1"),
        "unwritten": unwritten(place, (100,), "u1"),
        "huge": unwritten(place, (2**50,), "u1", chunks=(8,), compression="gzip"),
    }
    return {f"{place.replace(A, 'kv')}-{what}": damage for what, damage in found.items()}


PLACES = ("records", "log", A, LAYER, KEYS, f"{LAYER}/digests", f"{A}/token_ids")
DAMAGE: dict[str, Damage] = {
    **{name: damage for place in PLACES for name, damage in misplaced(place).items()},
    # In the records.
    "records-deflated": chunked("records", "gzip"),
    "log-deflated": chunked("log", "gzip"),
    "records-chunked": chunked("records"),
    "log-chunked": chunked("log"),
    "records-wide": replaced("records", np.zeros(8, np.uint16)),
    "line-cut": relined(lambda line: b'{"id": "a", "st\n'),
    "line-unsealed": relined(lambda line: b'{"id": "a"}\n'),
    "line-deep": relined(lambda line: DEEP + b"\n"),
    "line-header": relined(lambda line: line | {"line": "header"}),
    "line-unknown": relined(lambda line: {"line": "other"}),
    "line-not-utf8": relined(lambda line: b"\xff\xfe\n"),
    **{f"{name}-missing": without(name) for name in [spec.name for spec in fields(Record)] if name not in ASKED_FOR},
    **{
        f"{spec.name}-{number}": setting(spec.name, value)
        for spec in fields(Record)
        if spec.name not in ARRAYS
        for number, value in enumerate(WRONG[str(spec.type)])
    },
    **{
        f"{name}-{number}": setting(name, value)
        for name in ARRAYS
        for number, value in enumerate((5, "5", ["5"], [[1]], {"1": 2}, [None] if name not in REALS else ["x"]))
    },
    "answer-surrogate": setting("answer", "\ud800"),
    "field-unknown": setting("note", "more"),
    "status-unknown": setting("status", "maybe"),
    "pieces-missing": without("pieces"),
    "pieces-text": setting("pieces", "abc"),
    "pieces-numbers": setting("pieces", [1]),
    # In what a file says of itself.
    **{
        f"schema-{number}": attribute("/", "schema", value)
        for number, value in enumerate((None, "anndata", 1, ["kvr-mpi"] * 2, h5py.Empty("S5"), PICKLE))
    },
    "schema-variable": attribute("/", "schema", "kvr-mpi"),  # libhdf5 2.0 hangs over damaged heaps of such strings
    "schema-not-utf8": attribute("/", "schema", np.array(b"\xff\xfe", dtype=h5py.string_dtype("utf-8", 2))),
    "version-newer": attribute("/", "schema_version", SCHEMA_VERSION + 1),
    **{
        f"version-{number}": attribute("/", "schema_version", value)
        for number, value in enumerate((None, 2**62, "1", 1.5, [1, 1]))
    },
    **{
        f"{name}-{what}": log_line(0, **{name: value})
        for name in ("identity", "model", "software")
        for what, value in {"list": [1, 2], "text": "name", "null": None, "number": 5}.items()
    },
    **{
        f"model-without-{name}": log_line(0, model={k: v for k, v in HEADER.model.items() if k != name})
        for name in HEADER.model
    },
    "header-missing": relined(lambda line: None, "log", 0),
    "header-deep": relined(lambda line: DEEP + b"\n", "log", 0),
    **{
        f"{kind}-{number}": relined(lambda line, kind=kind, ids=ids: {"line": kind, "ids": ids}, "log", 1)  # type: ignore[misc]
        for kind in ("dropped", "pruned")
        for number, ids in enumerate((5, "a", ["a", {}]))
    },
    "second-header": relined(lambda line: HEADER.as_line(), "log", 1),
    "volume-path": log_line(1, name="../other.h5"),
    "volume-number": log_line(1, name=5),
    "volume-pieces": log_line(1, pieces=[1, 2]),
    "piece-size": log_line(1, pieces={"a": ["1", "2"]}),
    "piece-seal": log_line(1, pieces={"a": [1, 2]}),
    "piece-short": log_line(1, pieces={"a": [1]}),
    # In keys and values.
    **{
        f"layer-named-{name or 'nothing'}": move(LAYER, f"{A}/layer_{name}")
        for name in ("", "x", "0x1", "1e3", "-1", "0 0", "000 ", "٣", "%2E%2E")
    },
    "layer-unnamed": move(LAYER, f"{A}/strange"),
    "keys-virtual": virtual(KEYS, "floats"),
    "keys-stored-outside": stored_outside(KEYS, (4, 1, 4), "f4"),
    "keys-unwritten": unwritten(KEYS, (4, 1, 4), "f4"),
    "keys-unwritten-chunks": unwritten(KEYS, (4, 1, 4), "f4", chunks=(4, 1, 4)),
    "keys-huge": unwritten(KEYS, (2**40, 2**5, 2**5), "f4", chunks=(8, 8, 8), compression="gzip"),
    "keys-deflated": chunked(KEYS, "gzip"),
    "layer-with-more": lambda file, outside: file.create_group(f"{LAYER}/more"),
    "keys-integers": replaced(KEYS, np.zeros((4, 1, 4), dtype=np.int32)),
    "digests-other": replaced(f"{LAYER}/digests", np.zeros((1, 2), np.int64)),
    "digests-huge": unwritten(f"{LAYER}/digests", (2**40, 2), "i8", chunks=(64, 2)),
    "ids-other": replaced(f"{A}/token_ids", np.arange(4)),
    "ids-huge": unwritten(f"{A}/token_ids", (2**40,), "i8", chunks=(64,)),
    "kv-text-other": attribute(A, "text_stop", 2),
    "kv-text-outside": attribute(A, "text_stop", 99),
    "kv-text-missing": attribute(A, "text_start", None),
    "kv-blocks-other": attribute(A, "block_tokens", 4),
    "kv-blocks-none": attribute(A, "block_tokens", 0),
}

SIGNATURE = b"\x89HDF\r\n\x1a\n"


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_good(tmp_path_factory.mktemp("good")).read_bytes()


@pytest.fixture
def good(tmp_path: Path, good_bytes: bytes) -> Path:
    path = tmp_path / "results.h5"
    path.write_bytes(good_bytes)
    return path


@pytest.fixture
def outside(tmp_path: Path, good_bytes: bytes) -> Path:
    """Hold files that no result file may lead to."""
    (folder := tmp_path / "outside").mkdir()
    (other := folder / "other.h5").write_bytes(good_bytes)
    with h5py.File(other, "a") as file:
        file["secret"] = SECRET
        file["words"] = np.array([SECRET.encode()])
        file["numbers"] = np.array([0, 2, 4], dtype=np.int64)
        file["floats"] = np.ones((4, 1, 4), dtype=np.float32)
    (folder / "secret.txt").write_bytes(SECRET.encode().ljust(256, b"."))
    return folder


def do(damage: Damage, path: Path, outside: Path) -> None:
    with h5py.File(path, "a") as file:
        damage(file, outside)


def test_the_undamaged_file_is_read(good: Path, run_kvr: Kvr) -> None:
    """So that all the refusals below mean something."""
    assert [record.id for record in read_everything(good)] == ["a", "b"]
    for command in (["inspect", good], ["inspect", good, "a"], ["export", good], ["export", good, "--format", "csv"]):
        code, out, err = run_kvr(*command)
        assert code == EXIT_OK and out and not err


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_reading_a_damaged_file_is_bad_data(good: Path, outside: Path, damage: Damage) -> None:
    do(damage, good, outside)
    with pytest.raises(DataError) as caught:
        read_everything(good)
    assert good.name in str(caught.value) and SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["records-external-link", "line-cut", "id-missing", "version-newer", "identity-list", "keys-virtual"]
)
def test_no_command_goes_on_with_a_damaged_document(good: Path, outside: Path, name: str, run_kvr: Kvr) -> None:
    do(DAMAGE[name], good, outside)
    commands = [["inspect", good, "a"], ["inspect", good, "a", "--json"]]
    if name != "keys-virtual":
        commands += [["inspect", good], ["inspect", good, "--json"], ["export", good], ["merge", good.parent]]
    for command in commands:
        assert_bad_data(run_kvr(*command), good)


@pytest.mark.parametrize(
    "name",
    [
        "id-missing",
        "status-unknown",
        "records-soft-link",
        "log-missing",
        "header-deep",
        "answer-surrogate",
        "volume-path",
    ],
)
def test_no_damaged_file_is_resumed(good: Path, outside: Path, name: str) -> None:
    do(DAMAGE[name], good, outside)
    content = good.read_bytes()
    done, failed, said = resume(good.parent, header=HEADER)  # it is set aside, whole, and nothing in it counts
    assert not done and not failed and any("is damaged" in line for line in said)
    assert good.with_name(f"{good.name}.damaged-1").read_bytes() == content and not good.exists()


@pytest.mark.parametrize(
    "damage", [external("records", "/secret"), virtual(KEYS, "floats"), stored_outside("log", (16,), "u1")]
)
def test_no_other_file_is_even_opened(good: Path, outside: Path, kvr: Path, damage: Damage) -> None:
    # Opening a pipe that nobody writes to waits for ever, so a reader that follows the link runs out of time.
    do(damage, good, outside)
    for name in ("other.h5", "secret.txt"):
        (outside / name).unlink()
        os.mkfifo(outside / name)
    done = subprocess.run([kvr, "inspect", good], capture_output=True, text=True, timeout=300, check=False)
    assert_bad_data((done.returncode, done.stdout, done.stderr), good)


def test_a_failed_export_leaves_no_file_and_keeps_the_old_one(good: Path, outside: Path, run_kvr: Kvr) -> None:
    do(setting("token_ids", "5"), good, outside)
    fresh, old = good.parent / "fresh.jsonl", good.parent / "old.jsonl"
    old.write_text("precious")
    for _ in range(2):
        for kind in ("jsonl", "csv", "parquet"):
            assert_bad_data(run_kvr("export", good, "--format", kind, "-o", fresh), good)
            assert_bad_data(run_kvr("export", good, "--format", kind, "-o", old, "--overwrite"), good)
        good.write_bytes(good.read_bytes()[:5000])
    assert not fresh.exists() and old.read_text() == "precious"
    assert list(good.parent.glob("*.part*")) == []


@settings(max_examples=40)
@example(b"")
@example(SIGNATURE + bytes(4096))
@example(SIGNATURE + b"\xff" * 4096)
@example(b"PK\x03\x04" + bytes(100))
@example(b"cos\nsystem\n(S'touch owned'\ntR.")
@given(st.binary(max_size=600).flatmap(lambda content: st.sampled_from([content, SIGNATURE + content])))
def test_what_is_no_hdf5_file_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("random") / "results.h5"
    path.write_bytes(content)
    for read in (path, path.parent):
        with pytest.raises(DataError, match=r"results\.h5"):
            read_everything(read)
