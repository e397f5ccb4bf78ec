"""Keys and values by Blosc2: bit for bit, and nothing is unpacked that is not what it says."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from made_runs import HEADER, record, resume, stored_layers

from kvr_mpi.errors import ConfigError, DataError, ForeignError
from kvr_mpi.store.arrays import quantise, restore
from kvr_mpi.store.filters import BLOSC2, check_blosc2, has_blosc2
from kvr_mpi.store.hdf5 import child
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.merge import merge_files
from kvr_mpi.store.outputs import check_record, open_file
from kvr_mpi.store.settings import OutputSettings
from kvr_mpi.store.shards import ShardWriter
from kvr_mpi.store.stored_kv import CachedTokens

needs_plugin = pytest.mark.skipif(not has_blosc2(), reason="hdf5plugin is not installed (the extra blosc)")
TOKENS = 3000


def layer_of(dtype: torch.dtype, heads: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.randn(TOKENS, heads, 64, generator=torch.Generator().manual_seed(0))
    return keys.to(dtype), torch.zeros(TOKENS, heads, 64, dtype=dtype)  # a chunk of zeros has no data in its frame


def write(folder: Path, layers: Any, **how: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, "0000", HEADER, session=1, settings=OutputSettings(path="out", kv=True, **how))
    writer.write(record("a"), layers, CachedTokens(tuple(range(TOKENS)), (1, TOKENS)))
    writer.close()
    return next(folder.glob("*.h5"))


@needs_plugin
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_bit_comes_back_and_files_are_smaller(tmp_path: Path, dtype: torch.dtype) -> None:
    layer = layer_of(dtype)
    plain, packed = write(tmp_path / "plain", [layer]), write(tmp_path / "packed", [layer], kv_compression="blosc2")
    assert packed.stat().st_size < 0.6 * plain.stat().st_size  # the values are zeros
    for path in (packed, merge_files(packed.parent, keep_shards=True)):
        with open_file(path) as file:
            group = file["documents/a"]
            check_record(group)
            stored = open_kv(group)
            assert stored.is_compressed and stored.bytes == 2 * layer[0].nbytes
            for found, wanted in zip(stored_layers(group)[0], layer, strict=True):
                assert found.dtype == dtype and torch.equal(found, wanted)
            keys, values = stored.layers[0].read(700, 1711)
            assert torch.equal(keys, layer[0][700:1711]) and torch.equal(values, layer[1][700:1711])


@needs_plugin
def test_8_bits_are_compressed_too(tmp_path: Path) -> None:
    layer = layer_of(torch.float32)
    path = write(tmp_path, [layer], kv_dtype="int8", kv_compression="blosc2")
    with open_file(path) as file:
        keys, _ = stored_layers(file["documents/a"])[0]
    rounded = quantise(layer[0])
    assert torch.equal(keys, restore(rounded.codes, rounded.scales, rounded.dtype))


def no_plugin(name: str) -> None:
    """What importlib finds where it is not installed."""


@needs_plugin
def test_who_cannot_read_it_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And sets no file aside as damaged: it is as good as ever where the plugin is."""
    path = write(tmp_path, [layer_of(torch.float32)], kv_compression="blosc2")
    for ledger in tmp_path.glob("ledger-*"):
        ledger.unlink()
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", no_plugin)
        with open_file(path) as file, pytest.raises(ForeignError, match=r"pip install 'kvr-mpi\[blosc\]'"):
            open_kv(file["documents/a"])
        with pytest.raises(ForeignError, match=r"kvr-mpi\[blosc\]"):
            resume(tmp_path)
        with pytest.raises(ConfigError, match=r"kvr-mpi\[blosc\].*or choose"):
            check_blosc2()
    assert path.exists() and resume(tmp_path)[0] == {"a"}


def chunk_of(path: Path, number: int = 0) -> int:
    """Where a chunk of the keys lies in the file."""
    with h5py.File(path) as file:
        return int(file["documents/a/kv/layer_000/keys"].id.get_chunk_info(number).byte_offset)


def put(offset: int, kind: str, value: int) -> Callable[[bytearray, int], None]:
    def change(data: bytearray, at: int) -> None:
        struct.pack_into(kind, data, at + offset, value)

    return change


def burst_inside(data: bytearray, at: int) -> None:
    """The first chunk in the frame says that it is 2 GB."""
    header = struct.unpack_from(">i", data, at + 11)[0]
    struct.pack_into("<i", data, at + header + 4, 0x7FFFFFFF)


@needs_plugin
@pytest.mark.parametrize(
    "change",
    [
        put(0, ">B", 0),
        put(11, ">i", 1 << 30),
        put(11, ">i", -5),
        put(16, ">Q", 1 << 60),
        put(30, ">q", 1 << 40),
        put(58, ">i", 0x7FFFFFFF),
        put(39, ">q", -1),
        burst_inside,
    ],
)
def test_a_chunk_that_would_burst_is_refused_before_it_is_unpacked(
    tmp_path: Path, change: Callable[[bytearray, int], None]
) -> None:
    path = write(tmp_path, [layer_of(torch.float32)], kv_compression="blosc2")
    data = bytearray(path.read_bytes())
    change(data, chunk_of(path, 1))
    path.write_bytes(data)
    with open_file(path) as file, pytest.raises(DataError, match="chunk 1 is not a Blosc2 frame"):
        open_kv(file["documents/a"])


@needs_plugin
def test_a_flipped_bit_is_never_read(tmp_path: Path) -> None:
    """Wherever it is in a chunk: unreadable for Blosc2, or not what was written."""
    path = write(tmp_path, [layer_of(torch.float32)], kv_compression="blosc2")
    good, at = path.read_bytes(), chunk_of(path)
    with open_file(path) as file:
        wanted = stored_layers(file["documents/a"])[0][0]
    for offset in [*range(400, 600, 7), *range(1000, 300_000, 30_011)]:
        data = bytearray(good)
        data[at + offset] ^= 16
        path.write_bytes(data)
        try:
            with open_file(path) as file:
                assert torch.equal(stored_layers(file["documents/a"])[0][0], wanted)  # a byte that nothing depends on
        except DataError:
            continue


@needs_plugin
def test_filters_and_parameters_that_are_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "foreign.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("lzf", data=np.arange(1000), chunks=(100,), compression="lzf")
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((100, 2, 8))
        plist.set_filter(BLOSC2, h5py.h5z.FLAG_OPTIONAL, (1, 0, 4, 16, 1, 1, 5, 3, 1, 2, 2))
        space = h5py.h5s.create_simple((100, 2, 8))
        h5py.h5d.create(file.id, b"other", h5py.h5t.NATIVE_FLOAT, space, dcpl=plist)
    with h5py.File(path) as file:
        with pytest.raises(DataError, match="filter 32000"):
            child(file, "lzf")
        with pytest.raises(DataError, match="not those of chunks|incomplete|no Blosc2"):
            child(file, "other")
