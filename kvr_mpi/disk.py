"""Safe file access in folders where other users may create links, pipes, devices or huge files.

Writing creates a new regular file, and never follows a link; reading accepts only regular files, up to a maximum size.
File modes follow the umask. An output folder is recognised by its lock or its ``run.json``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PART = ".part"
MODE = 0o666  # minus the umask
OTHER_FOLDER = "choose another output folder (output.path; kvr ask: -o)"
RUN_FILE = "run.json"  # identity and documents of a run (`store.run.RunFile`)
RUN_FILE_START = b'{"identity": '
LOG_NAME = re.compile(r"log-([0-9]{4,})(?:-([0-9]{4,}))?\.jsonl", re.ASCII)
VOLUME_NAME = re.compile(r"kv-([0-9]{4,})-([0-9]{4,})-([0-9]{5,})\.h5", re.ASCII)
LOCK_NAME = re.compile(r"\.lock-([0-9]{6,})", re.ASCII)
RANK_FILE_NAME = re.compile(r"([0-9]{4,})-([0-9]{4,})\.json", re.ASCII)
# Names of file types that are not regular files.
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def is_output_folder(folder: Path | str, names: Iterable[str]) -> bool:
    """Whether a job has used a folder, with files of these names, for its output.

    Other programs also write a ``run.json``, so its first bytes are checked.
    """
    there = set(names)
    if any(map(LOCK_NAME.fullmatch, there)):
        return True
    with contextlib.suppress(OSError):
        if RUN_FILE in there:
            with open_regular(Path(folder, RUN_FILE)) as stream:
                return stream.read(len(RUN_FILE_START)) == RUN_FILE_START
    return False


def rank_file(folder: Path, session: int, rank: int) -> Path:
    """Return the path of a rank's file in a folder with one file per rank and job."""
    return folder / f"{session:04d}-{rank:04d}.json"


def rank_files(folder: Path) -> list[tuple[int, Path]]:
    """List the files named by `rank_file`, by session and rank, each with its session; none if the folder is a link."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    found = []
    with contextlib.suppress(OSError):  # removed meanwhile
        found = [match for match in map(RANK_FILE_NAME.fullmatch, os.listdir(folder)) if match]
    found.sort(key=lambda match: (int(match[1]), int(match[2])))
    return [(int(match[1]), folder / match[0]) for match in found]


def remove_rank_files(folder: Path, but_of: int | None = None) -> None:
    """Delete the files of `rank_files` and then the folder, or all but the files of one session."""
    for session, path in rank_files(folder):
        if session != but_of:
            path.unlink(missing_ok=True)
    if but_of is None:
        with contextlib.suppress(OSError):  # it is missing, or has other files
            folder.rmdir()


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raise `OSError` for others: pipes could block, devices could be endless."""
    _check_regular(os.stat(path).st_mode, path)  # opening a device may already have effects
    return os.fdopen(_checked(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), path), "rb")


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Read a regular file; raise `OSError` if it is another kind of file, or larger than the limit."""
    with open_regular(path) as stream:
        data = stream.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes", str(path))
    return data


def create(path: Path) -> int:
    """Create a file that must not exist, not even as a dangling link; return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)


def truncate(path: Path) -> None:
    """Truncate a file to free its space; raises `OSError` for links."""
    handle = _checked(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), path)
    try:
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems cannot sync folders
            raise
    finally:
        os.close(handle)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield ``PATH.part``, a name that does not exist; when the block succeeds, that file replaces `path`, synced.

    An existing ``PATH.part``, which may be a link, is removed first.
    """
    part = path.with_name(path.name + PART)
    part.unlink(missing_ok=True)
    try:
        yield part
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` once it is complete and synced; see `replaced`."""
    with replaced(path) as part, os.fdopen(create(part), "wb") as stream:
        yield stream


def kind_of_file(mode: int) -> str:
    """Describe by its mode what is not a regular file, such as a named pipe."""
    return KINDS.get(stat.S_IFMT(mode), "something else")


def _checked(handle: int, path: Path) -> int:
    """Return a descriptor if it refers to a regular file."""
    try:
        _check_regular(os.fstat(handle).st_mode, path)
    except OSError:
        os.close(handle)
        raise
    return handle


def _check_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind_of_file(mode)}, not a regular file", str(path))
