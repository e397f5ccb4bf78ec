"""Finds the files that a job's paths name, on disk or on the Hugging Face hub.

Output folders of jobs are skipped below a folder and in the expansion of ``**``; their logs are never documents.
"""

from __future__ import annotations

import functools
import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from kvr_mpi.disk import LOG_NAME, is_output_folder, kind_of_file
from kvr_mpi.errors import CorpusError, counted

TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".parquet")
# A dataset on the hub is named as pandas names it: hf://datasets/OWNER/NAME, @REVISION or /GLOB may follow.
HUB = "hf://datasets/"


def find_files(paths: Iterable[str]) -> list[tuple[str, str]]:
    """List the corpus files that folders, globs, file names and datasets of the hub (then downloaded) match.

    Returns the path of each file once, and its name in document ids: the path relative to the given folder. These are
    strings, not `Path`s, since there may be 100,000. Raises `CorpusError` if a path matches nothing, or a file has an
    unknown format.
    """
    found: dict[str, tuple[str, str]] = {}
    for pattern in paths:
        try:
            for file, name in _match(pattern):
                found.setdefault(os.path.abspath(file), (file, name))
        except (OSError, RuntimeError, ValueError) as error:  # such as a name that is too long, or an unknown ~user
            raise CorpusError(f"documents.path {pattern!r} cannot be searched: {error}") from error
    return list(found.values())


def other_files(paths: Iterable[str]) -> list[str]:
    """List the visible files in folders of documents that are skipped for their type.

    For a glob or a file name that matches such a file, `find_files` raises an error.
    """
    found: dict[str, str] = {}
    for base in (Path(pattern).expanduser() for pattern in paths):
        if base.is_dir():
            for above, names, _ in _folders_in(str(base)):
                for file in (os.path.join(base, above, name) for name in names if not _is_read(name)):
                    found.setdefault(os.path.abspath(file), file)
    return sorted(found.values())


def describe_others(files: Sequence[str]) -> str:
    """Describe the result of `other_files`, counted by type, the most frequent first: ``12 .docx, 3 .pdf``."""
    counts = Counter(os.path.splitext(file)[1].lower() or "without a suffix" for file in files)
    types = [f"{count} {suffix}" for suffix, count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))]
    return f"{counted(len(files), 'file')} of other types will not be read ({', '.join(types)})"


def _match(pattern: str) -> list[tuple[str, str]]:
    """List the files that one folder, glob or file name matches, with the names of their documents."""
    if pattern.startswith(HUB):
        return _match_on_hub(pattern)
    base = Path(pattern).expanduser()
    if base.is_dir():
        if is_output_folder(base, os.listdir(base)):
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
    matches = [base] if base.exists() else sorted(_matches_of(str(base)))
    if base.exists() and not base.is_file():
        what = kind_of_file(base.stat().st_mode)
        raise CorpusError(f"documents.path {pattern!r} is {what}; expected a folder, a glob or a regular file")
    files = [file for file in matches if not file.is_dir() and not _is_log(file)]
    if not files:
        what = "only folders match it" if matches else "no such file or folder, and no file matches it"
        what = "only the logs of a run match it" if any(map(_is_log, matches)) else what
        raise CorpusError(f"documents.path {pattern!r}: {what} (looked for {base.absolute()})")
    for file in files:
        if not suffix_of(file):
            raise CorpusError(
                f"documents.path {pattern!r}: {file} has an unsupported type; expected one of {', '.join(SUFFIXES)}"
            )
    return [(str(file), file.name) for file in files]


def _match_on_hub(pattern: str) -> list[tuple[str, str]]:
    """List the files of a dataset on the hub, by default all but its Markdown files, such as its README."""
    owner, name, inner = [*pattern.removeprefix(HUB).split("/", 2), "", ""][:3]
    name, _, revision = name.partition("@")
    if not (owner and name):
        raise CorpusError(f"documents.path {pattern!r}: expected {HUB}OWNER/NAME, and @REVISION or /GLOB after it")
    from huggingface_hub import snapshot_download

    wanted = [inner] if inner else [f"*{suffix}" for suffix in SUFFIXES if suffix != ".md"]
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


def _is_log(file: Path) -> bool:
    """Whether a file is a log of a job, by its name and folder; other tables may have similar names."""
    return LOG_NAME.fullmatch(file.name) is not None and is_output_folder(file.parent, os.listdir(file.parent))


def suffix_of(file: Path) -> str | None:
    """Return the known suffix of a file name."""
    name = file.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _names_in(base: str) -> list[str]:
    """Names of all visible corpus files below a folder, relative to it, sorted by their parts."""
    # Include folders with such names, so that reading them reports an error.
    found = [above + name for above, *both in _folders_in(base) for names in both for name in names if _is_read(name)]
    return sorted(found, key=lambda name: name.split("/"))


def _folders_in(base: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the path of each visible folder, relative to `base`, with its files and folders; no outputs of jobs."""
    for folder, inner, names in os.walk(base):
        if is_output_folder(folder, names):
            inner.clear()
            continue
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        above = "" if folder == base else os.path.relpath(folder, base) + "/"
        yield above, [name for name in names if not name.startswith(".")], inner


def _is_read(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _matches_of(pattern: str) -> list[Path]:
    """Expand a glob; ``**`` finds nothing hidden and no outputs of jobs, and follows no symbolic links."""
    given = Path(pattern)
    if "**" not in given.parts:
        return [*map(Path, glob.glob(pattern))]
    root, at = Path(given.anchor), given.parts.index("**")
    is_output = functools.cache(lambda folder: is_output_folder(folder, os.listdir(folder)))
    return [
        file
        for file in root.glob(str(given.relative_to(root) / "*" if given.name == "**" else given.relative_to(root)))
        if not any(part.startswith(".") for part in file.parts[at:])
        and not any(map(is_output, file.parents[: len(file.parts) - at]))
    ]
