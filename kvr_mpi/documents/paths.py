"""Finds the files that a job's paths name: on disk, in zip archives, on the Hugging Face hub, or remote (fsspec).

Output folders of jobs are skipped below a folder and in the expansion of ``**``; their logs are never documents.
"""

from __future__ import annotations

import glob
import os
import shlex
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path

from kvr_mpi.disk import LOG_NAME, is_output_folder, kind_of_file, list_folder, retried
from kvr_mpi.documents.formats import ARCHIVE, COMPRESSIONS, SUFFIXES, ZIP, format_of, is_remote, members, remote
from kvr_mpi.errors import CorpusError, UnavailableError, counted

# A dataset on the hub is named as pandas names it: hf://datasets/OWNER/NAME, @REVISION or /GLOB may follow.
HUB = "hf://datasets/"
# Commands that convert files of other types to text.
CONVERTERS = {".pdf": "pdftotext {file}"}
CONVERTERS |= dict.fromkeys((".docx", ".odt", ".rtf", ".epub", ".html", ".htm"), "pandoc {file} -t plain -o {text}")
LOST = "lost+found"  # of the file system; only root may list it


def find_files(paths: Iterable[str]) -> list[tuple[str, str]]:
    """List the corpus files that folders, globs, file names and datasets of the hub (then downloaded) match.

    Returns the path of each file once, and its name in document ids: the path relative to the given folder. These are
    strings, not `Path`s, since there may be 100,000. Raises `CorpusError` if a path matches nothing, a file has an
    unknown format, or there is no permission to list a folder; `UnavailableError` if a folder cannot be listed now.
    """
    found: dict[str, tuple[str, str]] = {}
    for pattern in paths:
        try:
            for file, name in _match(pattern):
                for each, inner in _unpack(file, name):
                    found.setdefault(each if "://" in each else os.path.abspath(each), (each, inner))
        except UnavailableError:
            raise
        except (OSError, RuntimeError, ValueError) as error:  # such as a name that is too long, or an unknown ~user
            raise CorpusError(f"documents.path {pattern!r} cannot be searched: {error}") from error
    return list(found.values())


def _unpack(file: str, name: str) -> list[tuple[str, str]]:
    """Return a file, or the files in a zip archive, with their names; a damaged archive is a file without rows."""
    if not file.lower().endswith(ARCHIVE):
        return [(file, name)]
    try:
        return [(f"{ZIP}{inner}::{file}", f"{name}/{inner}") for inner in members(Path(file))]
    except ValueError as error:
        raise CorpusError(f"{file} is no zip archive that can be read: {error}; remove it") from error


def other_files(paths: Iterable[str]) -> list[str]:
    """List the visible files in folders of documents that are skipped for their type.

    For a glob or a file name that matches such a file, `find_files` raises an error.
    """
    found: dict[str, str] = {}
    for base in (Path(pattern).expanduser() for pattern in paths):
        with suppress(OSError):  # `find_files` reports it
            for above, names, _ in _folders_in(str(base)) if base.is_dir() else ():
                for file in (os.path.join(base, above, name) for name in names if not _is_read(name)):
                    found.setdefault(os.path.abspath(file), file)
    return sorted(found.values())


def describe_others(files: Sequence[str]) -> str:
    """Describe the result of `other_files`, counted by type, the most frequent first: ``12 .docx, 3 .pdf``.

    For types that can be converted to text, it has the command for one file.
    """
    counts = Counter(os.path.splitext(file)[1].lower() or "without a suffix" for file in files)
    types = [f"{count} {suffix}" for suffix, count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))]
    examples: dict[str, str] = {}
    for file in files:
        if (command := CONVERTERS.get(os.path.splitext(file)[1].lower())) is not None:
            text = os.path.splitext(file)[0] + ".txt"
            examples.setdefault(command, command.format(file=shlex.quote(file), text=shlex.quote(text)))
    hint = f"; to convert them, such as: {'; '.join(examples.values())}" if examples else ""
    return f"{counted(len(files), 'file')} of other types will not be read ({', '.join(types)}){hint}"


def _match(pattern: str) -> list[tuple[str, str]]:
    """List the files that one folder, glob or file name matches, with the names of their documents."""
    if pattern.startswith(HUB):
        return _match_on_hub(pattern)
    if is_remote(pattern):
        return _match_remote(pattern)
    base = Path(pattern).expanduser()
    mode = _mode_of(base)
    if _is_dir(mode):
        if _is_output(base):
            raise CorpusError(
                f"documents.path {pattern!r} is the output folder of a job; name a folder or files of documents (kvr "
                f"ask puts questions to the documents of a run)"
            )
        names = _names_in(str(base))
        if not names:
            raise CorpusError(
                f"documents.path {pattern!r}: the folder {base.absolute()} contains no {', '.join(SUFFIXES)} files"
            )
        above = "" if str(base) == "." else f"{str(base).rstrip('/')}/"
        return [(above + name, name) for name in names]
    if mode is not None and not stat.S_ISREG(mode):
        what = kind_of_file(mode)
        raise CorpusError(f"documents.path {pattern!r} is {what}; expected a folder, a glob or a regular file")
    matches = {str(base): False} if mode is not None else dict(_expand(str(base)))
    found = sorted(Path(path) for path, is_folder in matches.items() if not is_folder)
    logs = {file for file in found if LOG_NAME.fullmatch(file.name) and _is_output(file.parent)}
    files = [file for file in found if file not in logs]
    if not files:
        what = "only folders match it" if matches else "no such file or folder, and no file matches it"
        what = "only the logs of a run match it" if logs else what
        raise CorpusError(f"documents.path {pattern!r}: {what} (looked for {base.absolute()})")
    for file in files:
        if not _is_read(file.name):
            raise CorpusError(
                f"documents.path {pattern!r}: {file} has an unsupported type; expected one of {', '.join(SUFFIXES)}"
            )
    return [(str(file), file.name) for file in files]


def _match_remote(pattern: str) -> list[tuple[str, str]]:
    """List the remote files that a URL matches: of a folder, a glob or a file."""
    file_system, inner = remote(pattern)
    try:
        if glob.has_magic(inner):
            base, found = "", file_system.glob(inner)
        elif file_system.isdir(inner):
            base, found = f"{inner.rstrip('/')}/", file_system.find(inner)
        else:
            base, found = "", [inner] if file_system.exists(inner) else []
    except ImportError as error:
        raise CorpusError(f"documents.path {pattern!r}: {error}") from error
    files = [file for file in sorted(found) if format_of(file) is not None]
    if not files:
        raise CorpusError(f"documents.path {pattern!r}: no {', '.join(SUFFIXES)} files found there")
    names = [file.removeprefix(base) if base else file.rpartition("/")[2] for file in files]
    return [(str(file_system.unstrip_protocol(file)), name) for file, name in zip(files, names, strict=True)]


def _match_on_hub(pattern: str) -> list[tuple[str, str]]:
    """List the files of a dataset on the hub, by default all but its Markdown files, such as its README."""
    owner, name, inner = [*pattern.removeprefix(HUB).split("/", 2), "", ""][:3]
    name, _, revision = name.partition("@")
    if not (owner and name):
        raise CorpusError(f"documents.path {pattern!r}: expected {HUB}OWNER/NAME, and @REVISION or /GLOB after it")
    from huggingface_hub import snapshot_download

    kinds = [suffix for suffix in SUFFIXES if suffix != ".md"]
    wanted = [inner] if inner else [f"*{suffix}{packed}" for suffix in kinds for packed in ("", *COMPRESSIONS)]
    try:
        base = snapshot_download(
            f"{owner}/{name}", repo_type="dataset", revision=revision or None, allow_patterns=wanted
        )
    except Exception as error:  # its library, its HTTP client and the file system each have errors of their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CorpusError(
            f"documents.path {pattern!r}: {reason}. Without internet, first download it on a login node, with the same "
            f"HF_HOME: hf download --repo-type dataset {owner}/{name}"
        ) from error
    names = [each for each in _names_in(base) if any(fnmatch(each, some) for some in wanted)]  # as the hub matches
    if not names:
        raise CorpusError(f"documents.path {pattern!r}: the dataset has no such {', '.join(SUFFIXES)} files")
    return [(f"{base}/{name}", name) for name in names]


def _is_output(folder: Path) -> bool:
    return is_output_folder(folder, [entry.name for entry in _list(str(folder))])


def _names_in(base: str) -> list[str]:
    """Names of all visible corpus files below a folder, relative to it, sorted by their parts."""
    # Include folders with such names, so that reading them reports an error.
    found = [above + name for above, *both in _folders_in(base) for names in both for name in names if _is_read(name)]
    return sorted(found, key=lambda name: name.split("/"))


def _folders_in(base: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the path of each visible folder, relative to `base`, with its files and folders; no outputs of jobs.

    Links to folders are named, but not followed. Raises `OSError` for a folder that cannot be listed.
    """
    todo = [""]
    while todo:
        above = todo.pop()
        entries = _visible(os.path.join(base, above))
        if entries is None:
            continue
        folders = {entry.name: entry.is_symlink() for entry in entries if _is_folder(entry)}
        todo += (f"{above}{name}/" for name, is_link in folders.items() if not is_link)
        yield above, [entry.name for entry in entries if entry.name not in folders], sorted(folders)


def _list(folder: str) -> list[os.DirEntry[str]]:
    """List a folder (empty: the current one) that exists, as far as is known."""
    path = folder.rstrip("/") or folder or "."
    return retried(lambda: list_folder(path), path, listed=True)


def _visible(folder: str) -> list[os.DirEntry[str]] | None:
    """List what is visible in a folder; None if it is the output folder of a job."""
    entries = _list(folder)
    if is_output_folder(folder, [entry.name for entry in entries]):
        return None
    return [entry for entry in entries if not entry.name.startswith(".") and entry.name != LOST]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or a link to one."""
    try:
        return retried(entry.is_dir, entry.path)
    except UnavailableError:
        raise
    except OSError:  # a link that leads back to itself, or to where others may not look
        return False


def _mode_of(path: Path | str) -> int | None:
    """Return the mode of a file or folder; None if there is none."""
    try:
        return retried(lambda: os.stat(path).st_mode, path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_read(name: str) -> bool:
    return format_of(name) is not None or name.lower().endswith(ARCHIVE)


def _is_dir(mode: int | None) -> bool:
    return mode is not None and stat.S_ISDIR(mode)


def _expand(pattern: str) -> Iterator[tuple[str, bool]]:
    """Yield what a glob matches, and whether each is a folder; ``**`` follows no links, and finds no outputs of jobs.

    Hidden names match only patterns that begin with a dot, and none after ``**``. Raises `OSError` for a folder that
    cannot be listed; the globs of the standard library leave out what is in it.
    """
    given = Path(pattern)
    parts = given.parts[len(Path(given.anchor).parts) :]
    yield from _expand_in(given.anchor, (*parts, "*") if given.name == "**" else parts, is_below=False)


def _expand_in(folder: str, parts: Sequence[str], *, is_below: bool) -> Iterator[tuple[str, bool]]:
    """Yield the matches of a pattern's remaining parts in a folder (empty: the current one); see `_expand`.

    is_below : a ``**`` came before.
    """
    part, *rest = parts
    if part == "**":
        for above, _, _ in _folders_in(folder):
            yield from _expand_in(os.path.join(folder, above), rest, is_below=True)
        return
    for path, is_folder in _match_names(folder, part, is_below=is_below):
        if not rest:
            yield path, is_folder
        elif is_folder:
            yield from _expand_in(path + "/", rest, is_below=is_below)


def _match_names(folder: str, part: str, *, is_below: bool) -> Iterator[tuple[str, bool]]:
    """Yield the paths in a folder that one part of a pattern matches, and whether each is a folder."""
    if glob.has_magic(part):
        for entry in (_visible(folder) if is_below else _list(folder)) or ():
            is_visible = part.startswith(".") or not entry.name.startswith(".")
            if is_visible and fnmatchcase(entry.name, part):
                yield os.path.join(folder, entry.name), _is_folder(entry)
    elif not is_below or (not part.startswith(".") and _visible(folder) is not None):
        path = os.path.join(folder, part)
        mode = _mode_of(path)
        if mode is not None or os.path.islink(path):
            yield path, _is_dir(mode)
