"""The schema, its records, and keys and values: what goes in comes out, through our reader and through plain h5py."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h5py
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_runs import stored_layers

from kvr_mpi.documents import read_corpus
from kvr_mpi.errors import DataError
from kvr_mpi.store.arrays import type_name
from kvr_mpi.store.folder import RESULTS
from kvr_mpi.store.hdf5 import group_in
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.merge import merge_run
from kvr_mpi.store.outputs import (
    ANNOUNCED,
    SCHEMA,
    SCHEMA_VERSION,
    Header,
    Record,
    document_groups,
    key_of,
    open_file,
    read_header,
    read_record,
    read_software,
    start_file,
    write_record,
)
from kvr_mpi.store.record import ASKED_FOR, DATASETS
from kvr_mpi.store.results import open_results
from kvr_mpi.store.shards import ShardWriter

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
# No longer than the answer: readers refuse what is.
OF_TOKENS = ("logprobs", "top_tokens", "top_logprobs")
RECORD = st.builds(
    Record,
    id=ID,
    status=st.sampled_from(["done", "error"]),
    error=TEXT,
    answer=TEXT,
    token_ids=st.lists(INT64, max_size=6).map(tuple),
    slices=st.lists(INT64, max_size=4).map(tuple),
    logprobs=st.lists(st.floats(), max_size=6).map(tuple),
    top_tokens=st.lists(INT64, max_size=12).map(tuple),
    top_logprobs=st.lists(st.floats(), max_size=12).map(tuple),
    token_texts=TEXT,
    scores=TEXT,
    samples=TEXT,
    document_sha256=TEXT,
    prompt_sha256=TEXT,
    prompt_tokens=INT64,
    dropped_tokens=INT64,
    new_tokens=INT64,
    finish_reason=TEXT,
    strategy=TEXT,
    ttft_s=st.floats(),
    prefill_tokens_per_s=st.floats(),
    wait_s=st.floats(),
    decode_s=st.floats(),
    parts=INT64,
    finished_at=TEXT,
).map(lambda found: replace(found, **{name: getattr(found, name)[: len(found.token_ids)] for name in OF_TOKENS}))


@contextmanager
def memory_file() -> Iterator[h5py.File]:
    """Hold a file of ours that touches no disk."""
    with h5py.File("memory.h5", "w", driver="core", backing_store=False, libver="v110") as file:
        start_file(file, HEADER)
        yield file


def as_stored(record: Record) -> dict[str, Any]:
    """Say what must come back: the same, but for NULs, which HDF5 strings cannot hold."""
    values = record.as_dict()
    return {name: value.replace("\0", "\ufffd") if isinstance(value, str) else value for name, value in values.items()}


def same(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Compare field by field and type by type; NaN is like NaN, and -0.0 unlike 0.0."""
    return list(got) == list(wanted) and all(repr(got[name]) == repr(wanted[name]) for name in wanted)


def write_shard(folder: Path, record: Record, layers: list[tuple[torch.Tensor, torch.Tensor] | None]) -> Path:
    writer = ShardWriter(folder, "0000", HEADER)
    writer.write(record, layers)
    writer.flush()
    (path,) = folder.glob("*.h5")
    return path


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
    with memory_file() as file:
        write_record(file, record)
        ((group, _, _),) = document_groups(file)
        got = read_record(group)
    assert same(got.as_dict(), as_stored(record))


@settings(max_examples=30)
@given(records=st.lists(RECORD, min_size=1, max_size=6, unique_by=lambda record: record.id))
def test_records_side_by_side_in_a_file_stay_apart(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    writer = ShardWriter(folder, "0000", HEADER)
    for record in records:
        writer.write(record)
    writer.flush()
    got = {record.id: record.as_dict() for record in open_results(folder)}
    assert set(got) == {record.id for record in records}
    assert all(same(got[record.id], as_stored(record)) for record in records)


@settings(max_examples=60)
@given(record=RECORD, size=st.integers(1, 9))
def test_texts_longer_than_a_chunk_may_be_come_back(record: Record, size: int) -> None:
    with pytest.MonkeyPatch.context() as patched, memory_file() as file:
        patched.setattr("kvr_mpi.store.hdf5.PIECE_BYTES", size)
        write_record(file, record)
        ((group, _, _),) = document_groups(file)
        got = read_record(group)
    assert same(got.as_dict(), as_stored(record))


def test_what_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvr_mpi.store.hdf5.MOST_TEXT_BYTES", 100)
    monkeypatch.setattr("kvr_mpi.store.hdf5.LARGEST_BYTES", 10_000)
    for record in (Record("a", "done", answer=101 * "x"), Record("b", "done", columns=10_001 * "x")):
        with memory_file() as file, pytest.raises(DataError, match="can be stored"):
            write_record(file, record)


def test_long_texts_come_back_even_after_a_merge(tmp_path: Path) -> None:
    record = Record("long", "error", error="e" * 200_000, answer="ä" * 300_000, strategy="s" * 70_000)
    write_shard(tmp_path, record, [])
    assert list(open_results(tmp_path)) == [record]
    merge_run(tmp_path)
    assert list(open_results(tmp_path / RESULTS)) == [record]


def test_as_dict_is_plain_json(tmp_path: Path) -> None:
    record = Record("a", "done", token_ids=(1, 2), slices=(0, 5), ttft_s=0.5)
    (got,) = open_results(write_shard(tmp_path, record, []))
    # Values read from HDF5 are numpy's; JSON would refuse those.
    assert json.loads(json.dumps(got.as_dict())) == record.as_dict()


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


@settings(max_examples=100)
@given(name=ID)
def test_an_id_is_one_group_deep(name: str) -> None:
    with memory_file() as file:
        write_record(file, Record(name, "done"))
        assert list(file["documents"]) == [key_of(name)]
        assert text(file["documents"][key_of(name)].attrs["id"]) == name
        assert set(file) == {"documents"}


def test_ids_that_look_alike_are_two_documents(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9")
    writer = ShardWriter(tmp_path, "0000", HEADER)
    for name in (composed, decomposed, "CAFE", "cafe"):
        writer.write(Record(name, "done", answer=name))
    writer.flush()
    assert {record.id: record.answer for record in open_results(tmp_path)} == {
        name: name for name in (composed, decomposed, "CAFE", "cafe")
    }


@pytest.mark.parametrize("name", ["\ud800", "nul\0id", "", "x" * 5000, "a\nb", "\x7f"])
def test_whatever_id_the_corpus_lets_through_can_be_stored(tmp_path: Path, name: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": name, "text": "words"}) + "\n")
    (document,) = read_corpus([str(rows)])
    folder = tmp_path / "run"
    folder.mkdir()
    write_shard(folder, Record(document.id, "error", error=document.error or ""), [])
    (record,) = open_results(folder)
    assert record.id == document.id and record.error == (document.error or "")


# The schema, seen by others


def test_a_file_is_readable_with_h5py_alone(tmp_path: Path) -> None:
    keys, values = torch.randn(7, 2, 4), torch.randn(7, 2, 4)
    record = Record(
        "dir/report 1.txt",
        "done",
        answer="Zwei Sätze.\n😀",
        token_ids=(5, 6, 7),
        slices=(0, 4, 7),
        prompt_tokens=7,
        new_tokens=3,
        finish_reason="stop",
        strategy="kvr",
        ttft_s=1.25,
    )
    path = write_shard(tmp_path, record, [(keys, values)])
    with h5py.File(path, "r") as file:
        assert text(file.attrs["schema"]) == SCHEMA == "kvr-mpi"
        assert int(file.attrs["schema_version"]) == SCHEMA_VERSION == 4
        assert text(file.attrs["created"]).startswith("20")
        assert json.loads(file.attrs["identity"]) == HEADER.identity
        assert json.loads(file.attrs["model"]) == HEADER.model
        assert {"kvr_mpi", "python", "torch", "transformers", "h5py", "hdf5"} <= set(json.loads(file.attrs["software"]))
        group = file["documents/dir%2Freport 1.txt"]
        stored = {spec.name for spec in fields(Record)} - {*DATASETS, *ASKED_FOR}
        assert set(group.attrs) == stored | {*ANNOUNCED, "record_sha256"}
        assert group.attrs["answer_tokens"] == 3 and group.attrs["kv_bytes"] == 2 * 7 * 2 * 4 * 4
        for name in ("answer", "token_ids", "slices", "kv/layer_000/digests"):
            assert group[name].fletcher32, f"{name} is not guarded"
        assert text(group.attrs["id"]) == record.id and text(group.attrs["status"]) == "done"
        assert group.attrs["prompt_tokens"] == 7 and group.attrs["ttft_s"] == 1.25
        assert group["answer"].asstr()[0] == record.answer
        assert group["token_ids"].dtype == np.int64 and group["token_ids"][:].tolist() == [5, 6, 7]
        assert group["slices"].dtype == np.int64 and group["slices"][:].tolist() == [0, 4, 7]
        np.testing.assert_array_equal(group["kv/layer_000/keys"][()], keys.numpy())
        np.testing.assert_array_equal(group["kv/layer_000/values"][()], values.numpy())


def test_the_schemas_docstring_names_every_attribute() -> None:
    import kvr_mpi.store.outputs as outputs

    assert outputs.__doc__ is not None
    for spec in fields(Record):
        assert spec.name in outputs.__doc__, f"{spec.name} is stored, but not documented"


def test_header_and_versions_come_back(tmp_path: Path) -> None:
    path = write_shard(tmp_path, Record("a", "done"), [])
    with open_file(path) as file:
        assert read_header(file) == HEADER
        assert read_software(file)["torch"] == torch.__version__
        assert read_software(file)["h5py"] == h5py.__version__


def test_a_file_is_closed_after_reading(tmp_path: Path) -> None:
    path = write_shard(tmp_path, Record("a", "done"), [])
    with open_file(path) as file:
        assert file.mode == "r"
    assert not file
    # An open reader would make this fail: HDF5 opens no file twice for reading and for writing.
    with h5py.File(path, "a") as again:
        again.attrs["note"] = "seen"


def test_a_missing_file_is_bad_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"), open_file(tmp_path / "absent.h5"):
        pass


# Keys and values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    patterns = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype).reshape(1024, 16, 4)
    with memory_file() as file:
        write_record(file, Record("a", "done"), [(patterns, patterns)])
        got, _ = stored_layers(file["documents/a"])[0]
        keys = file["documents/a/kv/layer_000/keys"]
        plain = np.asarray(keys[()])
        assert type_name(keys) == str(dtype).removeprefix("torch.")
    assert got.dtype == dtype and got.shape == patterns.shape
    np.testing.assert_array_equal(bits(got), bits(patterns))
    # Plain h5py sees the values: NaN, infinities and subnormals (the smallest is 2**-133) where they are.
    np.testing.assert_array_equal(plain.astype(np.float32), patterns.float().numpy())
    assert np.isinf(plain).sum() == 2 and np.isnan(plain).sum() > 100


def test_bfloat16_is_float32_to_plain_h5py() -> None:
    smallest, largest = 2.0**-133, 3.3895313892515355e38
    tensor = torch.tensor([[[0.0, -0.0, smallest, largest, float("inf"), float("-inf"), float("nan"), 1 / 3]]])
    with memory_file() as file:
        write_record(file, Record("a", "done"), [(tensor.bfloat16(), tensor.bfloat16())])
        keys = file["documents/a/kv/layer_000/keys"]
        plain = keys[()]
        assert keys.id.get_type().get_size() == 2  # of the file's bytes, though h5py gives float32
    assert plain.dtype == np.float32
    np.testing.assert_array_equal(plain, tensor.bfloat16().float().numpy())
    assert plain[0, 0, 2] == smallest and plain[0, 0, 3] == largest and np.signbit(plain[0, 0, 1])


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
        write_record(file, Record("a", "done"), [(tensor, tensor)])
        _, got = stored_layers(file["documents/a"])[0]
    assert got.dtype == dtype
    np.testing.assert_array_equal(bits(got), bits(tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_layers_come_back_from_a_records_group(tmp_path: Path, dtype: torch.dtype, tokens: int) -> None:
    # As the model hands them over: transposed views, not contiguous, and with a gradient.
    layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [
        (torch.randn(2, tokens, 4).to(dtype).transpose(0, 1), torch.randn(tokens, 2, 3, requires_grad=True).to(dtype))
        for _ in range(3)
    ]
    path = write_shard(tmp_path, Record("a", "done"), layers)
    with open_file(path) as file:
        got = stored_layers(group_in(file["documents"], "a"))
    assert sorted(got) == [0, 1, 2]
    for number, layer in enumerate(layers):
        assert layer is not None
        for mine, stored in zip(layer, got[number], strict=True):
            assert stored.dtype == dtype and stored.shape == mine.shape
            np.testing.assert_array_equal(bits(stored), bits(mine))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_survive_a_merge(tmp_path: Path, dtype: torch.dtype) -> None:
    patterns = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)
    tensor = patterns.to(dtype).reshape(-1, 4, 16)
    write_shard(tmp_path, Record("a", "done"), [(tensor, tensor.flip(0))])
    with open_file(merge_run(tmp_path)) as file:
        ((keys, values),) = stored_layers(group_in(file["documents"], "a")).values()
        np.testing.assert_array_equal(bits(keys), bits(tensor))
        np.testing.assert_array_equal(bits(values), bits(tensor.flip(0)))


@settings(max_examples=25)
@given(present=st.lists(st.booleans(), max_size=12))
def test_absent_layers_are_skipped_and_the_others_keep_their_numbers(present: list[bool]) -> None:
    layers = [(torch.full((2, 1, 2), float(n)), torch.full((2, 1, 2), -float(n))) if is_there else None
              for n, is_there in enumerate(present)]  # fmt: skip
    with memory_file() as file:
        write_record(file, Record("a", "done"), iter(layers))
        ((group, _, _),) = document_groups(file)
        got = {n: (float(keys[0, 0, 0]), float(values[0, 0, 0])) for n, (keys, values) in stored_layers(group).items()}
        assert ("kv" in group) == any(present)
    assert got == {n: (float(n), -float(n)) for n, is_there in enumerate(present) if is_there}


def test_a_record_without_layers_has_none(tmp_path: Path) -> None:
    write_shard(tmp_path, Record("a", "done"), [])
    with open_results(tmp_path).open("a") as (found, kv):
        assert found.id == "a" and not kv.layers


@pytest.mark.parametrize("data", [np.zeros((4, 2, 8), int), np.zeros((4, 2, 8), "V8"), np.zeros((4, 2, 8), complex)])
def test_what_is_no_float_type_is_refused(data: np.ndarray[Any, Any]) -> None:
    with memory_file() as file:
        write_record(file, Record("a", "done"), [(torch.zeros(4, 2, 8), torch.zeros(4, 2, 8))])
        layer = file["documents/a/kv/layer_000"]
        del layer["keys"]
        layer["keys"] = data
        with pytest.raises(DataError, match="expected .*'f'"):
            open_kv(file["documents/a"])
