"""File formats of a corpus, by the suffixes of file names, and opening files: compressed, in archives, or remote.

a.txt  a.md            a document
a.jsonl  a.csv  a.tsv  a.parquet         a document in each row
a.txt.gz  a.jsonl.zst  ...               compressed (all but Parquet)
zip://MEMBER::ARCHIVE                    a file in a zip archive
s3://BUCKET/a.jsonl  https://... ...     a remote file, read by fsspec
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from kvr_mpi.disk import open_regular, retried
from kvr_mpi.errors import CorpusError

TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".csv", ".tsv", ".parquet")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
ARCHIVE = ".zip"
ZIP = "zip://"


class FileFormat(NamedTuple):
    """What a file contains.

    suffix : one of `SUFFIXES`.
    compression : one of `COMPRESSIONS`; empty: none.
    can_seek : whether reading can start at any row.
    """

    suffix: str
    compression: str
    can_seek: bool

    @property
    def is_table(self) -> bool:
        """Whether each row is a document."""
        return self.suffix not in TEXT_SUFFIXES


def format_of(path: str) -> FileFormat | None:
    """Return the format of a file, by its name; None if it is not supported."""
    name = path.partition("::")[0].lower() if path.startswith(ZIP) else path.lower()
    stem, compression = name, ""
    for suffix in COMPRESSIONS:
        if name.endswith(suffix):
            stem, compression = name.removesuffix(suffix), suffix
    found = next((suffix for suffix in SUFFIXES if stem.endswith(suffix)), None)
    if found is None or (compression and found == ".parquet"):
        return None
    can_seek = found in (".jsonl", ".parquet") and not compression and not path.startswith(ZIP)
    return FileFormat(found, compression, can_seek)


def plain_name(name: str) -> str:
    """Return a file's name without the suffix of its compression: documents keep their ids when files are packed."""
    found = format_of(name)
    return name.rpartition(".")[0] if found is not None and found.compression else name


def is_remote(path: str) -> bool:
    """Whether fsspec reads a file, rather than the operating system."""
    return "://" in path and not path.startswith(ZIP)


def is_table(path: str | Path) -> bool:
    """Whether each row of a file is a document."""
    found = format_of(str(path))
    return found is not None and found.is_table


def open_file(path: str) -> IO[bytes]:
    """Open a file for reading its uncompressed bytes; raises `OSError`, or `CorpusError` if a package is missing."""
    found = format_of(path)
    stream = _open_stored(path)
    if found is None or not found.compression:
        return stream
    openers: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zstd}
    try:
        return cast("IO[bytes]", _Layers(openers[found.compression](stream), stream))
    except BaseException:
        stream.close()
        raise


def _open_stored(path: str) -> IO[bytes]:
    if path.startswith(ZIP):
        member, _, archive = path.removeprefix(ZIP).rpartition("::")
        file = open_regular(Path(archive))
        try:
            opened = zipfile.ZipFile(file)
            return cast("IO[bytes]", _Layers(opened.open(member), opened, file))
        except (KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
            file.close()  # the member is gone or encrypted, or its compression is unknown
            raise ValueError(f"{member}: {error}") from error
    if is_remote(path):
        file_system, inner = remote(path)
        return cast("IO[bytes]", file_system.open(inner, "rb"))
    return open_regular(Path(path))


class _ZstdReader(io.RawIOBase):
    """Reads the frames of a Zstandard file; unlike zstandard's own reader, it notices if the last one is truncated."""

    def __init__(self, stream: IO[bytes], zstandard: Any) -> None:
        self._stream, self._new, self._error = stream, zstandard.ZstdDecompressor, zstandard.ZstdError
        self._frame: Any = None
        self._rest = b""  # compressed bytes of the next frame
        self._ready = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read decompressed bytes."""
        while not self._ready:
            data = self._rest or self._stream.read(1 << 13)  # little may become much
            self._rest = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("compressed file ended before the end of its last frame")
                return 0
            self._frame = self._frame or self._new().decompressobj()
            try:
                self._ready = self._frame.decompress(data)
            except self._error as error:
                raise ValueError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def open_zstd(stream: IO[bytes]) -> IO[bytes]:
    """Return a reader of a Zstandard file; raises `CorpusError` if the package for it is missing."""
    try:
        import zstandard
    except ImportError as error:
        raise CorpusError("reading .zst files needs zstandard; `pip install zstandard`") from error
    return io.BufferedReader(_ZstdReader(stream, zstandard), 1 << 17)


class _Layers:
    """A stream that is read from others, all of which are closed with it."""

    def __init__(self, stream: Any, *below: Any) -> None:
        self._stream, self._below = stream, below

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _Layers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the stream and those below."""
        for each in (self._stream, *self._below):
            each.close()


def remote(path: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it; raises `CorpusError` if its package is missing."""
    import fsspec

    try:
        file_system, inner = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise CorpusError(f"{path}: {error}") from error
    return file_system, inner


def size_and_time(path: str) -> tuple[int, int]:
    """Return the size in bytes and the modification time of a file; the time is 0 if it is remote."""
    if is_remote(path):
        file_system, inner = remote(path)
        return int(file_system.size(inner) or 0), 0
    found = os.stat(path.rpartition("::")[2] if path.startswith(ZIP) else path)
    return found.st_size, found.st_mtime_ns


def members(archive: Path) -> list[str]:
    """List the visible files of supported formats in a zip archive, by URL; raises `OSError` or `ValueError`."""

    def read() -> list[str]:
        with open_regular(archive) as stream, zipfile.ZipFile(stream) as opened:
            return sorted(name for name in opened.namelist() if format_of(name) is not None)

    try:
        names = retried(read, archive)
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error
    return [name for name in names if not any(part.startswith((".", "__MACOSX")) for part in name.split("/"))]
