"""The schema, its records, and keys and values: what goes in comes out, through our reader and through plain h5py."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import fields
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvr_mpi.errors import DataError
from kvr_mpi.store.hdf5 import type_name
from kvr_mpi.store.kv import CachedTokens, Piece
from kvr_mpi.store.kv_reader import KVReader, read_kept
from kvr_mpi.store.kv_writer import KVWriter
from kvr_mpi.store.log import SCHEMA_VERSION, Header
from kvr_mpi.store.record import ASKED_FOR, KINDS, REALS, Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.volumes import SCHEMA
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
GIVEN = {"id": ID, "status": st.sampled_from(["done", "error"]), "joules": st.just(0.0)}
RECORD = st.builds(Record, **{name: GIVEN.get(name, VALUES[kind]) for name, kind in KINDS.items()})
Layers = list[tuple[torch.Tensor, torch.Tensor] | None]


def write_kv(path: Path, layers: Iterable[Any], tokens: CachedTokens | None) -> Piece:
    """Write a volume with one piece; None stands for a layer without keys and values."""
    with KVWriter(path) as writer:
        writer.begin("a", tokens)
        for number, layer in enumerate(layers):
            if layer is not None:
                writer.add(number, layer)
        writer.end()
        writer.finish()
    return Piece("a", str(path), *writer.pieces["a"])


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


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    size = tensor.element_size()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tensor.detach().cpu().contiguous().view(kind).numpy()


# Records


@settings(max_examples=100)
@given(records=st.lists(RECORD, min_size=1, max_size=6, unique_by=lambda record: record.id))
def test_every_field_of_records_side_by_side_comes_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    writer = ResultWriter(folder, 0, HEADER, 1)
    for record in records:
        writer.write(record)
    writer.close()
    got = [record.as_dict() for record in open_results(folder)]
    wanted = [as_stored(record) for record in sorted(records, key=lambda record: record.id)]
    assert repr(got) == repr(wanted), "NaN is like NaN, and -0.0 unlike 0.0"


# The schema, seen by others


def test_a_file_is_readable_with_h5py_and_json_alone(tmp_path: Path) -> None:
    keys, values = torch.randn(7, 2, 4), torch.randn(7, 2, 4)
    record = Record(
        "dir/report 1.txt", "done", answer="Zwei Sätze.\n😀", token_ids=(5, 6, 7), slices=(0, 4, 7), prompt_tokens=7,
        new_tokens=3, finish_reason="stop", strategy="kvr", ttft_s=1.25,
    )  # fmt: skip
    writer = ResultWriter(tmp_path, 0, HEADER, 1)
    writer.write(record, [(keys, values)])
    writer.close()
    with h5py.File(merge_run(tmp_path), "r") as file:
        assert file.attrs["schema"] in ("kvr-mpi", b"kvr-mpi") and SCHEMA == "kvr-mpi"
        assert int(file.attrs["schema_version"]) == SCHEMA_VERSION
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


# Keys and values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    patterns = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype).reshape(1024, 16, 4)
    piece = write_kv(tmp_path / "a.h5", [(patterns, patterns)], None)
    with KVReader("a", [piece]) as kv, h5py.File(tmp_path / "a.h5", locking=False) as file:
        got, _ = kv.read(0)
        keys = file["kv/a/layer_000/keys"]
        plain = np.asarray(keys[()])
        assert type_name(keys) == str(dtype).removeprefix("torch.") and keys.id.get_type().get_size() == 2
    assert got.dtype == dtype and got.shape == patterns.shape
    np.testing.assert_array_equal(bits(got), bits(patterns))
    # Plain h5py sees the values: NaN, infinities and subnormals (the smallest is 2**-133) where they are.
    np.testing.assert_array_equal(plain.astype(np.float32), patterns.float().numpy())
    assert np.isinf(plain).sum() == 2 and np.isnan(plain).sum() > 100


@settings(max_examples=50)
@given(
    present=st.lists(st.booleans(), max_size=12),
    tokens=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_layers_come_back_from_a_volume_and_keep_their_numbers(
    tmp_path_factory: pytest.TempPathFactory, present: list[bool], tokens: int, dtype: torch.dtype
) -> None:
    # As the model hands them over: transposed views, not contiguous, and with a gradient.
    layers: Layers = [
        (torch.randn(2, tokens, 4).to(dtype).transpose(0, 1), torch.randn(tokens, 2, 3, requires_grad=True).to(dtype))
        if is_there
        else None
        for is_there in present
    ]
    with KVReader("a", [write_kv(tmp_path_factory.mktemp("volume") / "a.h5", layers, None)]) as kv:
        got = {number: kv.read(number) for number in kv.layers}
    wanted = {number: layer for number, layer in enumerate(layers) if layer is not None}
    assert got.keys() == wanted.keys()
    for number, layer in wanted.items():
        for mine, stored in zip(layer, got[number], strict=True):
            assert stored.dtype == dtype and stored.shape == mine.shape
            np.testing.assert_array_equal(bits(stored), bits(mine))


# Those of which each head keeps its own tokens: whole and right, or refused

POSITIONS = np.array([0, 4, 9, 1, 2, 3, 8, 9], np.int32)
KEPT = POSITIONS[:3], POSITIONS[3:]
METHOD = "snapkv: budget 4"


@pytest.fixture
def piece(tmp_path: Path) -> Piece:
    """A document of ten tokens: one layer is compressed, one has no keys, one was left alone."""
    draw = torch.Generator().manual_seed(0)
    rows, whole = torch.randn(8, 1, 6, generator=draw), torch.randn(10, 2, 6, generator=draw)
    tokens = CachedTokens(tuple(range(10)), (1, 8), compression=METHOD, kept={0: KEPT})
    return write_kv(tmp_path / "results.h5", [(rows, -rows), None, (whole, -whole)], tokens)


def test_what_was_written_is_read(piece: Piece) -> None:
    with KVReader("a", [piece]) as kv:
        kv.check()
    assert kv.tokens is not None and (kv.compression, kv.tokens.ids) == (METHOD, tuple(range(10)))
    assert kv.layers == (0, 2) and kv.kept(2) is None
    kept = kv.kept(0)
    assert kept is not None and [own.tolist() for own in kept] == [own.tolist() for own in KEPT]
    assert kv.tokens.kept[0] is kept


@pytest.mark.parametrize("name", ["keys", "values", "positions", "head_rows", "digests"])
def test_a_flipped_bit_is_found_wherever_it_is(piece: Piece, name: str) -> None:
    def read() -> None:
        with KVReader("a", [piece]) as kv:
            kv.check()

    path = Path(piece.path)
    with h5py.File(path) as file:
        data = file[f"kv/a/layer_000/{name}"]
        offset = data.id.get_offset() or data.id.get_chunk_info(0).byte_offset
        size = data.size * data.dtype.itemsize
    content = path.read_bytes()
    for at in range(offset, offset + size, 3):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="results.h5"):
            read()
    path.write_bytes(content)
    read()


@pytest.mark.parametrize(
    ("counts", "positions", "why"),
    [
        ([3, 4], POSITIONS, "do not add up to 8"),
        ([0, 8], POSITIONS, "do not add up to 8"),
        ([9, -1], POSITIONS, "do not add up to 8"),
        ([3, 5], POSITIONS[::-1], "rows 0 to 3 .*ascending"),
        ([3, 5], [0, 4, 9, 1, 1, 3, 8, 9], "rows 3 to 8 .*ascending"),
        ([3, 5], [-1, 4, 9, 1, 2, 3, 8, 9], "rows 0 to 3 .*ascending"),
        ([3, 5], POSITIONS[:-1], "do not match"),
        ([3, 5], None, "positions"),
        (None, POSITIONS, "head_rows"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, counts: Any, positions: Any, why: str) -> None:
    """Whoever made the checksums, too."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layer = file.create_group("layer_000")
        if counts is not None:
            layer["head_rows"] = np.array(counts, np.int64)
        if positions is not None:
            layer["positions"] = np.array(positions, np.int32)
        with pytest.raises(DataError, match=why):
            read_kept(layer, (8, 1, 6))
