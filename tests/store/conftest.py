"""A good result file to damage, and files outside that none may lead to."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from untrusted import SECRET, write_good


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
