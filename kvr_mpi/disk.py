"""Safe file access in folders where other users may create links, pipes, devices or huge files.

Writing creates a new regular file, and never follows a link; reading accepts only regular files, up to a maximum size.
File modes follow the umask. An output folder is recognized by its lock or its ``run.json``.

Network file systems fail at times although nothing is wrong with a file. Opening, listing, reading, renaming and
removing are tried again for a while (`retried`). A failed write or sync is not: the kernel reports lost data only once,
so that a second attempt could succeed without them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from kvr_mpi.errors import ConfigError, DataError, KvrError, MissingError, OutputError, UnavailableError

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

# Errors that can go away by themselves.
TRANSIENT = frozenset(
    {errno.ESTALE, errno.EIO, errno.EINTR, errno.ETIMEDOUT, getattr(errno, "EREMOTEIO", errno.EIO), errno.EAGAIN}
)
FIRST_WAIT_S, RETRY_S = 0.05, 5.0  # the first of the waits between attempts, which double, and all of them together
RETRIED = TRANSIENT | {errno.ENOMEM}
# How h5py, libraries in Rust, and PyTorch quote a system error.
QUOTED_ERRNO = re.compile(r"errno = ([0-9]+), error message = |\(os error ([0-9]+)\)|unable to mmap .* \(([0-9]+)\)$")
NO_MEMORY = "memory allocation failed"  # in a message of HDF5
# Errors of what is not a regular file, or too large to be one of ours.
WRONG_KIND = {errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EFBIG, errno.ENAMETOOLONG}

PART_NAME = re.compile(r"(.+)\.part-[0-9a-f]{16}", re.DOTALL)  # unfinished files
PART_CHARS = len(".part-") + 16
LEFTOVER_S = 86400.0  # an unfinished file that was not written to for this long has no writer any more
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


def retried(action: Callable[[], T], path: Path | str, *, listed: bool = False, patience: float = 1.0) -> T:
    """Call a function that reads, lists, renames or removes; call it again for a while after a `TRANSIENT` error.

    Raises `UnavailableError` if the error stays; other errors pass unchanged.

    path : the file or folder, for the message.
    listed : a listing just named the file, so that it should exist.
    patience : share of `RETRY_S`; halve it after each failure, since many files may fail together.
    """
    waited_s, wait_s = 0.0, FIRST_WAIT_S
    while True:
        try:
            return action()
        except UnavailableError:
            raise
        except OSError as error:
            if error.errno not in RETRIED and not (listed and error.errno == errno.ENOENT):
                raise
            if waited_s >= patience * RETRY_S:
                raise unavailable(path, error) from error
        time.sleep(wait_s)
        waited_s, wait_s = waited_s + wait_s, 2 * wait_s


def errno_of(error: BaseException) -> int | None:
    """Return the number of the system error that caused an exception, also a library's; None if there was none."""
    if isinstance(error, MemoryError) or NO_MEMORY in str(error):
        return errno.ENOMEM
    number: int | None = getattr(error, "errno", None)
    if number is None and (told := QUOTED_ERRNO.search(str(error))):
        number = int(next(filter(None, told.groups())))
    return number


def unavailable(path: Path | str, error: BaseException) -> UnavailableError:
    """Return the error that says that a file cannot be read now, because of a system error."""
    number = errno_of(error)
    reason = os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__
    return UnavailableError(
        f"{path} cannot be read now: {reason}; if it can be read again, start the same command again"
    )


def read_error(path: Path | str, error: BaseException) -> KvrError:
    """Return the error to raise for a file that could not be read; only wrong contents are a `DataError`."""
    number = errno_of(error)
    if isinstance(error, KvrError):
        return error
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError(f"{path}: no permission to read it; its owner can change that (chmod)")
    if number == errno.ENOENT:
        return MissingError(f"{path}: no such file or folder")
    if number is None or number in WRONG_KIND:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        return DataError(f"{path} is damaged, or not a result file: {reason}")
    return unavailable(path, error)


def read_whole(action: Callable[[], T], path: Path) -> T:
    """Call a function that reads a result file, `retried`; its errors become those of `read_error`."""
    try:
        return retried(action, path)
    except KvrError:
        raise
    except (OSError, MemoryError) as error:
        raise read_error(path, error) from error


def named_error(error: Exception) -> Exception:
    """Return the error that a system error about a file becomes if nothing has handled it; others as they are."""
    number, path = errno_of(error), getattr(error, "filename", None)
    if isinstance(error, KvrError) or path is None or not isinstance(error, OSError) or number is None:
        return error
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError(f"{path}: {error.strerror or os.strerror(number)}")
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return OutputError(f"{path} cannot be written: {os.strerror(number)}; free some space, or use another disk")
    return unavailable(path, error) if number in RETRIED else error


def stat_of(path: Path) -> os.stat_result | None:
    """Return the status of a file or folder, `retried`; None if it does not exist."""
    try:
        return retried(lambda: os.stat(path), path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_folder(path: Path) -> bool:
    """Whether there is a folder; unlike `Path.is_dir`, raises `OSError` if that is not known."""
    found = stat_of(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_regular(path: Path) -> bool:
    """Whether there is a regular file; raises `OSError` as `is_folder` does."""
    found = stat_of(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def names_in(folder: Path) -> list[str]:
    """List the names in a folder; `retried`."""
    return [entry.name for entry in list_folder(folder)]


def list_folder(folder: Path | str) -> list[os.DirEntry[str]]:
    """List a folder; `retried`."""

    def entries() -> list[os.DirEntry[str]]:
        with os.scandir(folder) as found:
            return list(found)

    return retried(entries, folder)


def rename(source: Path, target: Path) -> None:
    """Rename a file, and replace an existing one; `retried`."""
    retried(lambda: os.replace(source, target), target)


def remove(path: Path) -> None:
    """Remove a file, if it exists; `retried`."""
    retried(lambda: path.unlink(missing_ok=True), path)


def is_output_folder(folder: Path | str, names: Iterable[str]) -> bool:
    """Whether a job has used a folder, with files of these names, for its output.

    Other programs also write a ``run.json``, so its first bytes are checked.
    """
    there = set(names)
    if any(map(LOCK_NAME.fullmatch, there)):
        return True
    run_file = Path(folder, RUN_FILE)

    def start() -> bytes:
        with open_regular(run_file) as stream:
            return stream.read(len(RUN_FILE_START))

    try:
        return RUN_FILE in there and retried(start, run_file) == RUN_FILE_START
    except UnavailableError:
        raise
    except OSError:
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
        found = [match for entry in list_folder(folder) if (match := RANK_FILE_NAME.fullmatch(entry.name))]
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
    """Open a regular file for reading; raise `OSError` for others: pipes could block, devices be endless."""
    check_regular(os.stat(path).st_mode, path)  # opening a device may already have effects
    return os.fdopen(_checked(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), path), "rb")


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Read a regular file, `retried`; raise `OSError` if it is another kind of file, or larger than the limit."""

    def read() -> bytes:
        with open_regular(path) as stream:
            is_small = os.fstat(stream.fileno()).st_size <= limit_bytes
            return stream.read() if is_small else stream.read(limit_bytes + 1)  # which allocates as much

    data = retried(read, path)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"larger than {limit_bytes} bytes", str(path))
    return data


def create(path: Path) -> int:
    """Create a file that must not exist, not even as a dangling link; return its descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)


def create_rank_file(folder: Path, session: int, rank: int) -> int:
    """Create the file `rank_file` and its folder, which must not be a link; return the file's descriptor."""
    folder.mkdir(exist_ok=True)
    if folder.is_symlink():
        raise OSError("a symbolic link, which is not followed")
    return create(rank_file(folder, session, rank))


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = retried(lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK), path)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems cannot sync folders
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


def write_all(handle: int, data: Buffer, at: int | None = None) -> None:
    """Write all data, with as many system calls as needed; at an offset, or at the file's position."""
    view = memoryview(data).cast("B")
    while view:
        count = os.write(handle, view) if at is None else os.pwrite(handle, view, at)
        view, at = view[count:], None if at is None else at + count


def final_name(name: str) -> str:
    """Return the name of the file that an unfinished file (`replaced`) was to become; of others their own."""
    part = PART_NAME.fullmatch(name)
    return part[1] if part else name


def unfinished_path(path: Path) -> Path:
    """Return a new name next to `path`, ``PATH.part-NUMBER``, for a file that will replace it."""
    return path.with_name(f"{path.name}.part-{secrets.token_hex(8)}")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield the name of `unfinished_path`; if the block succeeds, that file replaces `path`, synced.

    Several processes can replace a file at the same time: each complete file replaces the one before. What killed
    processes left behind is removed after `LEFTOVER_S`.
    """
    part = unfinished_path(path)
    try:
        yield part
        sync(part)
        rename(part, path)
        sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    with contextlib.suppress(OSError):
        remove_parts(path.parent, path.name, older_s=LEFTOVER_S)


def remove_parts(folder: Path, name: str, older_s: float = 0.0) -> None:
    """Remove the unfinished files that were to become `name`; with `older_s`, if they are so much older than `name`."""
    parts = [entry for entry in list_folder(folder) if entry.name != name and final_name(entry.name) == name]
    newest_s = (folder / name).stat().st_mtime if parts and older_s else 0.0  # both by the file system's clock
    for entry in parts:
        if not older_s or newest_s - entry.stat(follow_symlinks=False).st_mtime > older_s:
            remove(folder / entry.name)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` once it is complete and synced; see `replaced`."""
    with replaced(path) as part, os.fdopen(create(part), "wb") as stream:
        yield stream


@contextmanager
def writing(what: object, remedy: str = "", kind: type[OutputError] = OutputError) -> Iterator[None]:
    """Convert an `OSError` raised while a file or folder is written to an `OutputError` that names it and a remedy."""
    try:
        yield
    except UnavailableError:  # of a file that is read meanwhile
        raise
    except OSError as error:  # such as a name that is too long, or a folder without permission
        why = f"{error.strerror or error}{'; ' * bool(remedy)}{remedy}"
        raise kind(f"{what} cannot be written: {why}") from error


def kind_of_file(mode: int) -> str:
    """Describe by its mode what is not a regular file, such as a named pipe."""
    return KINDS.get(stat.S_IFMT(mode), "something else")


def _checked(handle: int, path: Path) -> int:
    """Return a descriptor if it refers to a regular file."""
    try:
        check_regular(os.fstat(handle).st_mode, path)
    except OSError:
        os.close(handle)
        raise
    return handle


def check_regular(mode: int, path: Path) -> None:
    """Raise `OSError` unless the mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind_of_file(mode)}, not a regular file", str(path))
