"""The schema, its records, and keys and values: what goes in comes out, through our reader and through plain h5py."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import h5py
import numpy as np
import pandas
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvr_mpi.documents import read_corpus
from kvr_mpi.store.arrays import type_name
from kvr_mpi.store.hdf5 import group_in
from kvr_mpi.store.kv import open_kv, write_kv
from kvr_mpi.store.log import Header, seal, unseal
from kvr_mpi.store.record import ASKED_FOR, KINDS, OF_RUN, REALS, Record, read_record, record_values
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.stored_kv import KeysValues
from kvr_mpi.store.volumes import KV, RESULTS, SCHEMA, SCHEMA_VERSION, create_volume, key_of, open_volume
from kvr_mpi.store.writer import ResultWriter

pytestmark = pytest.mark.quick

HEADER = Header(
    identity={"model": "0123abcd", "prompt": {"template": "Summarise: {text}\n", "keep": "head"}, "kv": True},
    model={"name": "tiny-é", "architecture": "LlamaForCausalLM", "dtype": "bfloat16"},
)
INT64 = st.integers(-(2**63), 2**63 - 1)
# What document ids are made of: no control characters (documents.py refuses them), but anything a path may hold.
ID = st.one_of(
    st.sampled_from([".", "..", "...", "%", "%2E", "%2F", "/", "//", "/etc/passwd", "../../x", " ", "a b", "~", "kv"]),
    st.text(alphabet="ab./%\\ ~-_+#:2EFé漢\u0301😀", min_size=1, max_size=20),
    st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20),
)
TEXT = st.one_of(
    st.sampled_from(["", "\n", "a\0b", "\0", "line\nline\r\n\ttab", "😀 🇩🇪 e\u0301", "\u2028", '"quoted", or not']),
    st.text(max_size=60),
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "str": TEXT,
    "int": INT64,
    "float": st.floats(),
    "tuple[int, ...]": st.lists(INT64, max_size=6).map(tuple),
    "tuple[float, ...]": st.lists(st.floats(), max_size=6).map(tuple),
}
GIVEN = {"id": ID, "status": st.sampled_from(["done", "error"]), OF_RUN: st.just(0.0)}
RECORD = st.builds(Record, **{name: GIVEN.get(name, VALUES[kind]) for name, kind in KINDS.items()})
Layers = list[tuple[torch.Tensor, torch.Tensor] | None]


@contextmanager
def memory_file() -> Iterator[h5py.File]:
    """Hold a file that touches no disk."""
    with h5py.File("memory.h5", "w", driver="core", backing_store=False, libver="v110") as file:
        yield file


def layers_in(kv: h5py.Group, told: tuple[int, str]) -> dict[int, KeysValues]:
    """Read keys and values of a group; `told` is what `write_kv` returned."""
    return {layer.number: layer.read() for layer in open_kv(kv, *told).layers}


def as_stored(record: Record) -> dict[str, Any]:
    """Say what must come back: the same, but for infinities and NaN, which JSON has not."""
    values = record.as_dict()
    for name, value in values.items():
        if name in ASKED_FOR and not value:
            values[name] = type(value)()  # -0.0, too
        elif name in REALS:
            values[name] = [one if isfinite(one) else -inf for one in value]
        elif isinstance(value, float) and not isfinite(value):
            values[name] = nan
    return values


def same(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Compare field by field and type by type; NaN is like NaN, and -0.0 unlike 0.0."""
    return list(got) == list(wanted) and all(repr(got[name]) == repr(wanted[name]) for name in wanted)


def write_one(folder: Path, record: Record, layers: Layers) -> None:
    writer = ResultWriter(folder, 0, HEADER, 1)
    writer.write(record, layers)
    writer.close()


def text(value: Any) -> str:
    """Give what plain h5py reads as text: a string of fixed length is bytes to it."""
    return value.decode() if isinstance(value, bytes) else str(value)


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    size = tensor.element_size()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tensor.detach().cpu().contiguous().view(kind).numpy()


# Records


@settings(max_examples=150)
@given(record=RECORD)
def test_every_field_of_a_record_comes_back(record: Record) -> None:
    values = unseal(seal(record_values(record, ["a", "b"])))
    assert values is not None and values["pieces"] == ["a", "b"]
    assert same(read_record(values, "here").as_dict(), as_stored(record))


@settings(max_examples=30)
@given(records=st.lists(RECORD, min_size=1, max_size=6, unique_by=lambda record: record.id))
def test_records_side_by_side_in_a_file_stay_apart(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    writer = ResultWriter(folder, 0, HEADER, 1)
    for record in records:
        writer.write(record)
    writer.close()
    got = {record.id: record.as_dict() for record in open_results(folder)}
    assert set(got) == {record.id for record in records}
    assert all(same(got[record.id], as_stored(record)) for record in records)


def test_long_texts_come_back_even_after_a_merge(tmp_path: Path) -> None:
    record = Record("long", "error", error="e" * 200_000, answer="ä" * 300_000, strategy="s" * 70_000)
    write_one(tmp_path, record, [])
    assert list(open_results(tmp_path)) == [record]
    merge_run(tmp_path)
    assert list(open_results(tmp_path / RESULTS)) == [record]


@settings(max_examples=300)
@given(one=st.one_of(ID, st.text(max_size=8)), other=st.one_of(ID, st.text(max_size=8)))
@example(".", "%2E")
@example("..", "%2E%2E")
@example("a/b", "a%2Fb")
@example("é", "e\u0301")
@example("A", "a")
def test_key_of_is_injective_and_never_a_path(one: str, other: str) -> None:
    keys = key_of(one), key_of(other)
    assert (keys[0] == keys[1]) == (one == other)
    for name, key in zip((one, other), keys, strict=True):
        assert "/" not in key and "\0" not in key and key not in (".", "..")
        assert unquote(key) == name


@pytest.mark.parametrize("name", ["\ud800", "nul\0id", "", "x" * 5000, "a\nb", "\x7f"])
def test_whatever_id_the_corpus_lets_through_can_be_stored(tmp_path: Path, name: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": name, "text": "words"}) + "\n")
    (document,) = read_corpus([str(rows)])
    folder = tmp_path / "run"
    folder.mkdir()
    write_one(folder, Record(document.id, "error", error=document.error or ""), [])
    (record,) = open_results(folder)
    assert record.id == document.id and record.error == (document.error or "")


# The schema, seen by others


def test_a_file_is_readable_with_h5py_and_json_alone(tmp_path: Path) -> None:
    keys, values = torch.randn(7, 2, 4), torch.randn(7, 2, 4)
    record = Record(
        "dir/report 1.txt", "done", answer="Zwei Sätze.\n😀", token_ids=(5, 6, 7), slices=(0, 4, 7), prompt_tokens=7,
        new_tokens=3, finish_reason="stop", strategy="kvr", ttft_s=1.25,
    )  # fmt: skip
    write_one(tmp_path, record, [(keys, values)])
    with h5py.File(merge_run(tmp_path), "r") as file:
        assert text(file.attrs["schema"]) == SCHEMA == "kvr-mpi"
        assert int(file.attrs["schema_version"]) == SCHEMA_VERSION == 5
        header, volume = map(json.loads, file["log"][()].tobytes().splitlines())
        assert header["created"].startswith("20")
        assert (header["identity"], header["model"]) == (HEADER.identity, HEADER.model)
        assert {"kvr_mpi", "python", "torch", "transformers", "h5py", "hdf5"} <= set(header["software"])
        content = file["records"][()].tobytes()
        (line,) = content.splitlines()
        found = json.loads(line)
        stored = {spec.name for spec in fields(Record)} - {*ASKED_FOR}
        assert found.keys() == stored | {"pieces", "seal"} and list(found)[:2] == ["id", "status"]
        assert found["answer"] == record.answer and found["token_ids"] == [5, 6, 7] and found["ttft_s"] == 1.25
        table = pandas.read_json(io.BytesIO(content), lines=True)
        assert table["id"][0] == record.id and table["slices"][0] == [0, 4, 7]
        (piece,) = found["pieces"]
        assert piece.startswith("dir/report 1.txt/") and volume["pieces"][piece][0] == 2 * 7 * 2 * 4 * 4
        group = file["kv"][quote(piece, safe=" ,+=@()")]
        np.testing.assert_array_equal(group["layer_000/keys"][()], keys.numpy())
        np.testing.assert_array_equal(group["layer_000/values"][()], values.numpy())
        assert group["layer_000/digests"].fletcher32


def test_the_docs_of_a_record_name_every_field() -> None:
    import kvr_mpi.store.record as documented

    assert documented.__doc__ is not None
    for spec in fields(Record):
        assert spec.name in documented.__doc__, f"{spec.name} is stored, but not documented"


def test_a_file_is_closed_after_reading(tmp_path: Path) -> None:
    write_one(tmp_path, Record("a", "done"), [])
    path = merge_run(tmp_path)
    assert len(list(open_results(path))) == 1
    # An open reader would make this fail: HDF5 opens no file twice for reading and for writing.
    with h5py.File(path, "a") as again:
        again.attrs["note"] = "seen"


# Keys and values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    patterns = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype).reshape(1024, 16, 4)
    with memory_file() as file:
        told = write_kv(file, "a", [(patterns, patterns)], None)
        got, _ = layers_in(file["a"], told)[0]
        keys = file["a/layer_000/keys"]
        plain = np.asarray(keys[()])
        assert type_name(keys) == str(dtype).removeprefix("torch.") and keys.id.get_type().get_size() == 2
    assert got.dtype == dtype and got.shape == patterns.shape
    np.testing.assert_array_equal(bits(got), bits(patterns))
    # Plain h5py sees the values: NaN, infinities and subnormals (the smallest is 2**-133) where they are.
    np.testing.assert_array_equal(plain.astype(np.float32), patterns.float().numpy())
    assert np.isinf(plain).sum() == 2 and np.isnan(plain).sum() > 100


@settings(max_examples=50)
@given(
    patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=24),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@example([0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x00000001, 0x80000000, 0x7F800000], torch.float32)
def test_any_tensor_comes_back_bit_for_bit(patterns: list[int], dtype: torch.dtype) -> None:
    raw = torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.int32))
    tensor = (raw.view(dtype)).reshape(-1, 1, 1)
    with memory_file() as file:
        told = write_kv(file, "a", [(tensor, tensor)], None)
        _, got = layers_in(file["a"], told)[0]
    assert got.dtype == dtype
    np.testing.assert_array_equal(bits(got), bits(tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_layers_come_back_from_a_volume(tmp_path: Path, dtype: torch.dtype, tokens: int) -> None:
    # As the model hands them over: transposed views, not contiguous, and with a gradient.
    layers: Layers = [
        (torch.randn(2, tokens, 4).to(dtype).transpose(0, 1), torch.randn(tokens, 2, 3, requires_grad=True).to(dtype))
        for _ in range(3)
    ]
    with create_volume(tmp_path / "a.h5") as file:
        told = write_kv(file[KV], "a", layers, None)
    with open_volume(tmp_path / "a.h5") as file:
        got = layers_in(group_in(file[KV], "a"), told)
    assert sorted(got) == [0, 1, 2]
    for number, layer in enumerate(layers):
        assert layer is not None
        for mine, stored in zip(layer, got[number], strict=True):
            assert stored.dtype == dtype and stored.shape == mine.shape
            np.testing.assert_array_equal(bits(stored), bits(mine))


@settings(max_examples=25)
@given(present=st.lists(st.booleans(), max_size=12))
def test_absent_layers_are_skipped_and_the_others_keep_their_numbers(present: list[bool]) -> None:
    layers = [(torch.full((2, 1, 2), float(n)), torch.full((2, 1, 2), -float(n))) if is_there else None
              for n, is_there in enumerate(present)]  # fmt: skip
    with memory_file() as file:
        told = write_kv(file, "a", iter(layers), None)
        assert ("a" in file) == any(present)
        stored = layers_in(file["a"], told) if any(present) else {}
        got = {n: (float(keys[0, 0, 0]), float(values[0, 0, 0])) for n, (keys, values) in stored.items()}
    assert got == {n: (float(n), -float(n)) for n, is_there in enumerate(present) if is_there}
