"""Starting or resuming a run: lock its folder, compare it with the job, and repair it after crashes.

A document is done if the results have a record with its id and the hash of its contents (`Document.sha256`), and the
folder's logs have the job's identity. Nothing else decides: no times, sizes or names of files, and no list of an
earlier job. The keys and values that the record needs must be in volumes that a log lists. All other documents are
processed again. Damaged files are set aside, never deleted; unfinished volumes are deleted.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvr_mpi.disk import (
    LOG_NAME,
    OTHER_FOLDER,
    RUN_FILE,
    final_name,
    is_folder,
    list_folder,
    names_in,
    read_regular,
    read_whole,
    remove,
    remove_rank_files,
    rename,
    replacing,
    retried,
)
from kvr_mpi.documents import Corpus, CorpusPart
from kvr_mpi.documents.index import has_hash, hash_id
from kvr_mpi.documents.questions import parse_answer_id
from kvr_mpi.errors import NOT_NOW, DataError, ForeignError, OutputError, UnavailableError, counted
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.store.folder import DAMAGED, Survey, read_run_header, survey, take_lines
from kvr_mpi.store.lock import Lock
from kvr_mpi.store.log import DROPPED, Header, LogWriter, seal, unseal
from kvr_mpi.store.places import Places, short_digest
from kvr_mpi.store.traces import TRACES
from kvr_mpi.store.volumes import is_ours, open_volume

RUN_FILE_BYTES = 1 << 30
# Bytes of the newest keys and values that are verified when a run is resumed; `merge_run` verifies all of them.
VERIFY_BYTES = 1 << 30
NAMED = 5  # maximum number of examples in a message
# Keys of a run's identity that are known only once the model is loaded.
OF_MODEL = {"model", "dtype", "frame", "compress", "cache", "date", "pooling"}
# Keys of an identity whose name in a job file differs.
SETTINGS = {"kv": "output.kv", "columns": "output.columns", "format": "documents.format", "dtype": "model.dtype"}
SETTINGS |= {"date": "prompt.date"}
VALUE_CHARS = 200  # maximum length of a setting in a message


class Opened(NamedTuple):
    """What a job has to do in the folder of a run: numbers of documents in its corpus, and how many have records."""

    todo: npt.NDArray[np.int64]
    done: int
    failed: int


def open_run(
    folder: Path,
    header: Header,
    corpus: Corpus,
    lock: Lock,
    *,
    overwrite: bool = False,
    retry_failed: bool = False,
    logger: RankLogger = SILENT,
) -> Opened:
    """Repair the folder of a run, and compare its records with the documents.

    Error records of documents that could not be read for the moment (`NOT_NOW`) are always processed again.

    header : its identity has to match the existing results.
    lock : the folder's, which this process holds. The caller releases it if this function raises.
    overwrite : delete existing results.
    retry_failed : process documents with error records again.
    logger : told about the folder's contents and repairs.

    Raises `OutputError` if the folder cannot be written, or holds results of another job; the message names the
    difference; `DataError` if a file with the name of a result file was written by another program, or by a newer
    version of this one.
    """
    try:
        others = sorted(name for name in names_in(folder) if name.endswith(".h5") and not is_ours(name))
        if others:
            logger.info(f"files in {str(folder)!r} that are not from kvr-mpi are left alone: {_some(others)}")
        if overwrite:
            for name in survey(folder).unlisted:
                _refuse_foreign(folder / name)
            _clear(folder)
        with LogWriter(folder, lock.number, None, header) as log:
            places = _recover(folder, header, logger, log).locate()[0]
            if places:
                _check_part(folder, corpus)
            opened, changes = _compare(places, corpus, retry_failed=retry_failed)
            for what, names in changes.items():
                if names:
                    logger.info(f"{folder}: {counted(len(names), 'document')} {what} ({_some(names)})")
            if stale := [*changes[CHANGED], *changes[REPAIRED], *changes[PASSING]]:
                _drop(log, stale)
            _write_run_file(folder, header, corpus, lock.owner.job, changes[GONE])
        return opened
    except UnavailableError:
        raise
    except OSError as error:
        raise OutputError(f"output.path {str(folder)!r} cannot be used: {error}") from error


# What can be different about documents with results.
CHANGED, REPAIRED = "changed, to be answered again", "that could not be read before, to be answered now"
UNREAD = "cannot be compared, since they cannot be read now; their answers are kept"
GONE, PASSING = "no longer in the corpus; their results are kept", "of files that could not be read before"


def _compare(places: Places, corpus: Corpus, *, retry_failed: bool) -> tuple[Opened, dict[str, list[str]]]:
    """Compare the records of a run with the documents of a job; also return the ids of those that differ."""
    changes: dict[str, list[str]] = {what: [] for what in (CHANGED, REPAIRED, UNREAD, GONE, PASSING)}
    is_done, met = np.zeros(len(corpus), np.bool_), 0
    if not corpus.prompts and len(corpus.index.digested):  # most of them, all at once
        numbers, hashes = corpus.index.digested, corpus.index.hash_ids(corpus.files)
        hashes = hashes if len(numbers) == len(hashes) else hashes[numbers]
        is_done[numbers] = places.matching(hashes, corpus.index.digests)
        met = int(is_done.sum())
    is_todo, known = ~is_done, set[str]()
    for number in np.flatnonzero(is_todo).tolist() if places else ():
        name = corpus.id(number)
        place = places.get(name)
        if place is None:
            continue
        known.add(name)
        digest = _digest_now(corpus, number)
        if place.is_done and place.digest and short_digest(corpus.digest(number) or "") == place.digest:
            digest = place.digest  # of a stored document that was pruned since
        if digest is None:  # unknown
            is_kept = place.is_done
            if is_kept:
                changes[UNREAD].append(name)
        elif is_kept := digest == place.digest:
            is_kept = place.is_done or not (retry_failed or place.is_transient)
        else:
            changes[CHANGED if place.digest else REPAIRED].append(name)
        is_todo[number], is_done[number] = not is_kept, is_kept and place.is_done
    if met + len(known) < len(places):
        same = np.sort(np.fromiter((hash_id(corpus.id(int(one))) for one in np.flatnonzero(is_done)), np.uint64))
        for name in places.ordered():
            if name not in known and not has_hash(same, name):
                changes[PASSING if places[name].is_transient else GONE].append(name)
    todo, done = np.flatnonzero(is_todo), int(is_done.sum())
    return Opened(todo, done, len(corpus) - len(todo) - done), changes


def _digest_now(corpus: Corpus, number: int) -> str | None:
    """Return the digest of a document as it is now; empty if it cannot be processed, None if it cannot be read now."""
    if corpus.is_transient(number):
        return None
    if corpus.is_bad(number):
        return ""
    if (found := corpus.digest(number)) is not None:
        return short_digest(found)
    document = corpus.read(number)
    if document.error is None:
        return short_digest(document.sha256)
    return None if document.error.startswith(NOT_NOW) else ""


def hash_recorded(folder: Path, *, has_prompts: bool) -> npt.NDArray[np.uint64]:
    """Return sorted hashes of the ids of the documents with results; with several prompts, of what these are about."""
    if not is_folder(folder):
        return np.zeros(0, np.uint64)
    records = survey(folder).records
    if not has_prompts:
        return np.unique(records.hashes())
    names = {parse_answer_id(records.name(number))[0] for number in range(len(records))}
    return np.sort(np.fromiter(map(hash_id, names), np.uint64))


def check_settings(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse to continue a run with other settings, as far as they are known before torch is imported.

    `open_run` checks those that depend on the model (`OF_MODEL`). Raises `OutputError`, which says what differs.
    """
    if (header := last_header(folder)) is not None:
        check_identity(folder, {key: header.identity[key] for key in header.identity.keys() - OF_MODEL}, identity)


def last_header(folder: Path) -> Header | None:
    """Read a run's latest header; None if there is none, or only damaged ones, which `open_run` sets aside."""
    with contextlib.suppress(DataError):
        return read_run_header(folder)
    return None


@dataclass(frozen=True, slots=True)
class RunFile:
    """What other commands want to know of a run: the file ``run.json``. It does not decide what is done.

    identity : settings that the answers depend on.
    job : id of the last batch job that wrote to the folder; empty: none.
    part, cut : the part of the corpus that this run processes, and how the corpus was divided (`index.describe_cut`).
    documents : number of documents (or questions) that the run's latest job has to process.
    gone : documents with results that are no longer among them.
    """

    identity: dict[str, Any]
    job: str
    part: CorpusPart
    cut: str
    documents: int
    gone: frozenset[str]

    def left(self, ids: Collection[str]) -> int:
        """Return how many documents have no record, given the ids of all records."""
        return max(0, self.documents - len(ids) + sum(name in ids for name in self.gone))


def read_run_file(folder: Path) -> RunFile | None:
    """Read the run file; None if it is missing, damaged or not a run file; raises `KvrError` if it cannot be read."""
    path = folder / RUN_FILE
    with contextlib.suppress(DataError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        stored = unseal(read_whole(lambda: read_regular(path, RUN_FILE_BYTES), path))
        if stored is not None and isinstance(stored["identity"], dict):
            first, step = map(operator.index, stored["share"])
            gone = frozenset(map(str, stored["gone"]))
            documents, cut = operator.index(stored["documents"]), str(stored["cut"])
            if 0 <= first < step and documents >= 0:
                return RunFile(stored["identity"], str(stored["job"]), CorpusPart(first, step), cut, documents, gone)
    return None


def _write_run_file(folder: Path, header: Header, corpus: Corpus, job: str, gone: Sequence[str]) -> None:
    listed = {"share": corpus.part, "cut": corpus.cut, "documents": len(corpus), "gone": gone}
    line = seal({"identity": header.identity, "model": header.model, "job": job, **listed})
    path = folder / RUN_FILE
    if RUN_FILE not in names_in(folder) or read_regular(path, RUN_FILE_BYTES) != line:
        with replacing(path) as stream:
            stream.write(line)


def _check_part(folder: Path, corpus: Corpus) -> None:
    """Refuse to continue one part of a corpus as another, since no task would know what the others have done."""
    stored = read_run_file(folder)
    if stored is None or (stored.part, stored.cut) == (corpus.part, corpus.cut) or corpus.part.parts == 1:
        return
    what = f"it is {stored.part} of the corpus, this job has {corpus.part}"
    if stored.part == corpus.part:
        what = (
            "documents.limit, the corpus's files or the sizes of its tables have changed, which divide it differently"
        )
    raise OutputError(f"cannot resume {folder}: {what}; restore that, or {OTHER_FOLDER}")


def is_of_job(folder: Path, job: str) -> bool:
    """Whether this batch job was the last one to write to the folder, or may have been: ``run.json`` is damaged."""
    stored = read_run_file(folder)
    return job != "" and (stored.job == job if stored is not None else RUN_FILE in names_in(folder))


def _recover(folder: Path, header: Header, logger: RankLogger, log: LogWriter) -> Survey:
    """Repair the folder after a crash, and return a survey of the valid files."""
    found = survey(folder, reads_all=True)
    for source, other in found.headers.items():
        check_identity(source, other.identity, header.identity)
    _remove_unfinished(folder)
    found.verify(VERIFY_BYTES)
    damaged = found.damaged
    for name, why in sorted(damaged.items()):
        kept = _set_aside(folder / name, header)
        logger.warning(f"{folder / name} is damaged: {why}; kept as {kept.name}; its documents are processed again")
    for path, why in {piece.path: why for piece, why in found.spoilt.items()}.items():
        logger.warning(f"{path} is damaged: {why}; the documents concerned are processed again")
    if found.spoilt:
        _drop(log, found.locate()[2])
    if damaged or found.spoilt:
        found = survey(folder)
    for name in found.unlisted:
        _refuse_foreign(folder / name)
        remove(folder / name)
    for name in set(found.missing) - damaged.keys():
        logger.warning(f"{folder / name} is gone: documents that need it are processed again")
    return found


def _remove_unfinished(folder: Path) -> None:
    """Remove files that were never completed, so that nothing was ever read from them; the folder must be locked."""
    for entry in list_folder(folder):
        name = final_name(entry.name)
        if name != entry.name and (is_ours(name) or name == RUN_FILE) and not entry.is_dir(follow_symlinks=False):
            remove(folder / entry.name)


def _drop(log: LogWriter, documents: Iterable[str]) -> None:
    """Invalidate the records of documents."""
    log.write(seal({"line": DROPPED, "ids": sorted(documents)}))
    log.sync()


def _set_aside(file: Path, header: Header) -> Path:
    """Rename a damaged file so that it is never read; return its new path. A log's valid lines become a new log."""
    number = 1
    while os.path.lexists(kept := file.with_name(f"{file.name}{DAMAGED}-{number}")):
        number += 1
    if not LOG_NAME.fullmatch(file.name) or not file.is_file() or file.is_symlink():
        rename(file, kept)
        return kept
    retried(lambda: shutil.copyfile(file, kept), file)
    with replacing(file) as clean:
        clean.write(seal(header.as_line()))
        for line in take_lines(Survey(file.parent, {}), file, reads_all=True):
            clean.write(line + b"\n")
    return kept


def _refuse_foreign(file: Path) -> None:
    """Refuse to delete files of other programs that have one of our names."""

    def look() -> None:
        with open_volume(file):
            pass

    try:
        read_whole(look, file)
    except ForeignError:
        raise
    except DataError:
        pass  # it was not finished


def _clear(folder: Path) -> None:
    """Delete the files of a run, including damaged and unfinished ones, and nothing else."""
    remove(folder / RUN_FILE)
    remove_rank_files(folder / TRACES)
    _remove_unfinished(folder)
    for entry in list_folder(folder):
        if is_ours(entry.name.partition(DAMAGED)[0]) and (entry.is_file() or entry.is_symlink()):
            remove(folder / entry.name)


def check_identity(file: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to continue a run with other settings or another model; the `OutputError` says what differs."""
    wanted = json.loads(json.dumps(wanted))  # as it was stored: without tuples
    if changed := [f"{key} was {was}, is {now}" for key, was, now in differing_settings(stored, wanted)]:
        raise OutputError(
            f"cannot resume {file}: it was written with other settings ({'; '.join(changed)}); restore them, delete "
            f"the results with --overwrite, or {OTHER_FOLDER}"
        )


def differing_settings(
    one: Mapping[str, Any], other: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield the settings that differ between two runs: the key in a job file, and both values as text."""
    for name in sorted({*one, *other}):
        key = f"{above}{name}" if above else SETTINGS.get(name, name)
        mine, theirs = one.get(name), other.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from differing_settings(mine, theirs, f"{key}.")
        elif mine != theirs:
            texts = ("not set" if each is None else json.dumps(each, ensure_ascii=False) for each in (mine, theirs))
            yield key, *_around_difference(*texts)


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """Cut two long texts to `VALUE_CHARS` around the place where they begin to differ."""
    start = max(0, len(os.path.commonprefix([one, other])) - VALUE_CHARS // 2)

    def cut(text: str) -> str:
        end = start + VALUE_CHARS
        return "..." * (start > 0) + text[start:end] + "..." * (len(text) > end)

    return cut(one), cut(other)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (" ..." if len(names) > NAMED else "")
