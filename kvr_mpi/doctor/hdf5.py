"""HDF5: its version, and a small file written the way results are: part, close, fsync, rename, read back."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np

from kvr_mpi.doctor.findings import Finding, ok
from kvr_mpi.store.hdf5 import open_hdf5

VALUES = 1 << 18


def check_hdf5() -> list[Finding]:
    """Name h5py and HDF5; either build will do, since every rank writes files of its own."""
    kind = "with MPI" if h5py.get_config().mpi else "serial, which is sufficient"
    return [ok("hdf5", f"h5py {h5py.version.version}, HDF5 {h5py.version.hdf5_version}, built {kind}")]


def write_and_read(folder: Path, stem: str) -> bool:
    """Write an HDF5 file under its final name and say whether it reads back unchanged; leaves nothing.

    Raises
    ------
    OSError, DataError
    """
    part, path = folder / f"{stem}.h5.part", folder / f"{stem}.h5"
    values = np.arange(VALUES, dtype=np.int64)
    try:
        with h5py.File(part, "x") as file:  # takes HDF5's lock, as every writer does
            file["values"] = values
        for target in (part, folder):
            handle = os.open(target, os.O_RDONLY)
            try:
                if target == folder:
                    os.replace(part, path)
                os.fsync(handle)
            finally:
                os.close(handle)
        with open_hdf5(path) as file:
            return bool(np.array_equal(file["values"][()], values))
    finally:
        part.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
