"""HDF5 filters: which data may have gone through, and Blosc2 (by hdf5plugin), by which keys and values shrink a little.

A filter runs on what a file holds, and files may come from anywhere. So none but HDF5's own and Blosc2 are let through;
and of Blosc2 all that says how large something is, in the file and in the head of each chunk's frame (c-blosc2,
README_CFRAME_FORMAT and README_CHUNK_FORMAT), is held against the dataset before the library sees a chunk.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import struct
from typing import Any

import h5py

from kvr_mpi.errors import ConfigError, DataError, ForeignError

BLOSC2 = 32026  # registered with the HDF Group
KNOWN = (h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, BLOSC2)
# zstd at its fastest after a byte shuffle: slower and stronger gain next to nothing on keys and values.
CODEC, LEVEL = "zstd", 1
INSTALL = "pip install 'kvr-mpi[blosc]'"
# Of a chunk, what is looked at; a frame's header is shorter, and its first chunk's follows it.
HEAD_BYTES = 4096
MAGIC = b"\x9e\xa8b2frame\0\xd2"
# Offsets in a frame's header of: header and frame length, bytes unpacked and packed, and bytes of a (Blosc2) chunk.
HEADER_FIELDS = {11: ">i", 16: ">Q", 30: ">q", 39: ">q", 58: ">i"}
LEAST_HEADER_BYTES = 62
# Blosc2 pads each of three dimensions to whole blocks, none of which is larger than its dimension.
MOST_PADDING = 8


def has_blosc2() -> bool:
    """Whether Blosc2 can be written and read here."""
    return importlib.util.find_spec("hdf5plugin") is not None


def check_blosc2() -> None:
    """Refuse to write what needs Blosc2 where it is not installed.

    Raises
    ------
    ConfigError
        Saying what to install.
    """
    if not has_blosc2():
        raise ConfigError(
            f"output.kv_compression = 'blosc2' needs hdf5plugin, which is not installed here: {INSTALL}, or choose "
            f"kv_compression = 'none'"
        )


def compress(plist: Any) -> None:
    """Let a dataset be made with these properties go through Blosc2; it has to be in chunks."""
    plugin = importlib.import_module("hdf5plugin")  # which registers it with HDF5
    chosen = plugin.Blosc2(cname=CODEC, clevel=LEVEL, filters=plugin.Blosc2.SHUFFLE)
    plist.set_filter(BLOSC2, h5py.h5z.FLAG_MANDATORY, tuple(chosen.filter_options))


def is_compressed(dataset: Any) -> bool:
    """Whether an h5py dataset goes through Blosc2."""
    return BLOSC2 in _filters(dataset.id.get_create_plist())


def check_filters(dataset: Any, where: str, largest_bytes: int) -> None:
    """Refuse data that went through other filters than these, or whose chunks would burst.

    Parameters
    ----------
    dataset : h5py DatasetID
    where : str
        Its name, for messages.
    largest_bytes : int
        What a chunk may take when it is unpacked.

    Raises
    ------
    DataError
        Saying which; `ForeignError` if it is Blosc2, and that is not installed here.
    """
    plist = dataset.get_create_plist()
    filters = _filters(plist)
    if strange := sorted(set(filters) - set(KNOWN)):
        raise DataError(f"{where} uses the HDF5 filter {strange[0]}, which kvr-mpi never writes")
    if BLOSC2 not in filters:
        return
    if not has_blosc2():
        raise ForeignError(f"{where} is compressed by Blosc2, which needs hdf5plugin to read: {INSTALL}")
    importlib.import_module("hdf5plugin")
    chunk, item_bytes = plist.get_chunk(), dataset.get_type().get_size()
    chunk_bytes = math.prod(chunk) * item_bytes
    told = plist.get_filter_by_id(BLOSC2)[1]
    if len(filters) > 1 or (*told[2:4], *told[7:]) != (item_bytes, chunk_bytes, len(chunk), *chunk):
        raise DataError(f"{where}: filters {filters}, Blosc2 {told}: not those of chunks {chunk} of {item_bytes} bytes")
    _check_frames(dataset, where, min(MOST_PADDING * chunk_bytes, largest_bytes))


def _filters(plist: Any) -> list[int]:
    return [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]


def _check_frames(dataset: Any, where: str, most_bytes: int) -> None:
    """Look at the head of every chunk, where it lies in the file."""
    file = os.open(os.fsdecode(h5py.h5f.get_name(dataset)), os.O_RDONLY)
    try:
        for number in range(dataset.get_num_chunks()):
            info = dataset.get_chunk_info(number)
            head = os.pread(file, min(HEAD_BYTES, info.size), info.byte_offset)
            if info.filter_mask or not _is_sound(head, info.size, most_bytes):
                raise DataError(
                    f"{where} is damaged: chunk {number} is not a Blosc2 frame of at most {most_bytes} bytes"
                )
    finally:
        os.close(file)


def _is_sound(head: bytes, size: int, most_bytes: int) -> bool:
    """Whether a frame says of itself that it is one chunk, of no more bytes than that, within what is stored."""
    if len(head) < LEAST_HEADER_BYTES or not head.startswith(MAGIC):
        return False
    fields = (struct.unpack_from(kind, head, offset)[0] for offset, kind in HEADER_FIELDS.items())
    header, frame, unpacked, packed, chunk = fields
    if not LEAST_HEADER_BYTES <= header <= min(frame, len(head)) - 16 or frame > size:
        return False
    first, _, first_packed = struct.unpack_from("<iii", head, header + 4)  # a chunk's: unpacked, a block, packed
    fits = 0 < unpacked == chunk <= most_bytes and 0 <= packed <= frame
    return fits and b"b2nd" in head[:header] and 0 <= first <= most_bytes and 0 <= first_packed <= frame - header
