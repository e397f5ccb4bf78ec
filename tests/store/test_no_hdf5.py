"""Files that are no HDF5, or not all of one, end in DataError, or are read right."""

from __future__ import annotations

from pathlib import Path

import pytest
from constants import Kvr
from hypothesis import given, settings
from hypothesis import strategies as st
from untrusted import assert_bad_data, read_everything

from kvr_mpi.errors import DataError
from kvr_mpi.store.record import Record

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


@settings(max_examples=40)
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
