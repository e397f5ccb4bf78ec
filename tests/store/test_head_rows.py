"""Keys and values of which each head keeps its own tokens, in a file: whole and right, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from kvr_mpi.errors import DataError
from kvr_mpi.store.hdf5 import group_in
from kvr_mpi.store.head_rows import HeadRows, open_head_rows
from kvr_mpi.store.kv import open_kv, write_kv
from kvr_mpi.store.stored_kv import CachedTokens, StoredPiece
from kvr_mpi.store.volumes import create_volume, open_volume

ROWS = HeadRows((3, 5), np.array([0, 4, 9, 1, 2, 3, 8, 9], np.int32))
METHOD = "snapkv: budget 4"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A document of ten tokens: one layer is compressed, one has no keys, one was left alone."""
    draw = torch.Generator().manual_seed(0)
    rows, whole = torch.randn(8, 1, 6, generator=draw), torch.randn(10, 2, 6, generator=draw)
    file = create_volume(tmp_path / "results.h5")
    layers = [(rows, -rows), None, (whole, -whole)]
    tokens = CachedTokens(tuple(range(10)), (1, 8), compression=METHOD, rows={0: ROWS})
    told.append(write_kv(file["kv"], "a", layers, tokens))
    file.close()
    return tmp_path / "results.h5"


told: list[tuple[int, str]] = []  # of the last file, what a log tells


def read(path: Path) -> StoredPiece:
    with open_volume(path) as file:
        found = open_kv(group_in(group_in(file, "kv"), "a"), *told[-1])
        found.check()
        return found


def test_what_was_written_is_read(path: Path) -> None:
    found = read(path)
    assert found.tokens is not None and (found.tokens.compression, found.tokens.ids) == (METHOD, tuple(range(10)))
    first, last = found.layers
    assert (first.number, last.number) == (0, 2) and last.rows is None and first.rows is not None
    assert first.rows.counts == ROWS.counts and (first.rows.positions == ROWS.positions).all()
    assert first.rows.bounds == [(0, 3), (3, 8)] and first.rows.bounds_before(9) == [(0, 2), (3, 7)]
    assert first.rows.bounds_before(0) == [(0, 0), (3, 3)]


@pytest.mark.parametrize("name", ["keys", "values", "positions", "head_rows", "digests"])
def test_a_flipped_bit_is_found_wherever_it_is(path: Path, name: str) -> None:
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
            read(path)
    path.write_bytes(content)
    read(path)


def test_a_file_cut_short_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for size in range(len(content) // 8, len(content), len(content) // 8):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match="results.h5"):
            read(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rows: rows.update(head_rows=[3, 4]), "do not make up 8"),
        (lambda rows: rows.update(head_rows=[0, 8]), "do not make up 8"),
        (lambda rows: rows.update(head_rows=[9, -1]), "do not make up 8"),
        (lambda rows: rows["positions"].reverse(), "rows 0 to 3 are not of ascending tokens"),
        (lambda rows: rows["positions"].__setitem__(4, 1), "rows 3 to 8 are not of ascending tokens"),
        (lambda rows: rows["positions"].__setitem__(0, -1), "rows 0 to 3 are not of ascending tokens"),
        (lambda rows: rows["positions"].pop(), "do not match"),
        (lambda rows: rows.pop("positions"), "positions"),
        (lambda rows: rows.pop("head_rows"), "head_rows"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, change: Callable[[Any], Any], why: str) -> None:
    """Whoever made the checksums, too."""
    rows: dict[str, Any] = {"head_rows": list(ROWS.counts), "positions": ROWS.positions.tolist()}
    change(rows)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layer = file.create_group("layer_000")
        for name, values in rows.items():
            layer[name] = np.array(values, np.int32 if name == "positions" else np.int64)
        with pytest.raises(DataError) as caught:
            open_head_rows(layer, (8, 1, 6))
        assert re.search(why, str(caught.value))
        if len(rows) == 2:
            with pytest.raises(DataError, match="do not match"):
                open_head_rows(layer, (8, 2, 6))
