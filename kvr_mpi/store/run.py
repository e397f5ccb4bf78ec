"""Starting or resuming a run: lock its folder, compare it with the job, and repair it after crashes.

After a crash, a document counts as finished if its record is in a log, and its keys and values are in volumes that a
log lists; all other documents are processed again. Damaged files are set aside, never deleted; unfinished volumes are
deleted.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvr_mpi.disk import (
    LOG_NAME,
    OTHER_FOLDER,
    RUN_FILE,
    final_name,
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
from kvr_mpi.documents import Corpus
from kvr_mpi.errors import DataError, ForeignError, OutputError, Say, UnavailableError, counted
from kvr_mpi.store.folder import DAMAGED, Place, Survey, check_fresh, read_run_header, survey, take_lines
from kvr_mpi.store.lock import Lock
from kvr_mpi.store.log import DROPPED, Header, LogWriter, seal, unseal
from kvr_mpi.store.record import read_record
from kvr_mpi.store.traces import TRACES
from kvr_mpi.store.volumes import is_ours, lines_of, open_volume

RUN_FILE_BYTES = 1 << 30
# Bytes of the newest keys and values that are verified when a run is resumed; `merge_run` verifies all of them.
VERIFY_BYTES = 1 << 30
NAMED = 5  # maximum number of examples in a message
ALL = slice(0, None, 1)
# Keys of a run's identity that are known only once the model is loaded.
OF_MODEL = {"model", "dtype", "frame", "compress", "cache"}
# Keys of an identity whose name in a job file differs.
SETTINGS = {"kv": "output.kv", "columns": "output.columns", "format": "documents.format", "dtype": "model.dtype"}
VALUE_CHARS = 200  # maximum length of a setting in a message

Mode = Literal["new", "overwrite", "resume", "extend"]


def open_run(
    folder: Path,
    header: Header,
    corpus: Corpus,
    lock: Lock,
    *,
    share: slice = ALL,
    mode: Mode = "new",
    retry_failed: bool = False,
    say: Say = lambda line: None,
) -> tuple[set[str], set[str]]:
    """Repair the folder of a run; return the ids of documents that are done, and of those whose error records are kept.

    Documents that could not be read for the moment (`NOT_NOW`) are always processed again.

    header : its identity has to match the existing results.
    corpus : it has to contain the documents of the existing results, unless the run is extended.
    lock : the folder's, which this process holds. The caller releases it if this function raises.
    share : the documents that this job processes, as ``slice(first, None, step)``; recorded for progress reports.
    mode : what to do with existing results: refuse to start, delete them, continue from them, or continue with a
        changed list of documents.
    retry_failed : process documents with error records again.
    say : receives log lines about the folder's contents and repairs.

    Raises `OutputError` if the folder cannot be written, or holds results of another job; the message names the
    difference; `DataError` if a file with the name of a result file was written by another program, or by a newer
    version of this one.
    """
    try:
        others = sorted(name for name in names_in(folder) if name.endswith(".h5") and not is_ours(name))
        if others:
            say(f"files in {str(folder)!r} that are not from kvr-mpi are left alone: {_some(others)}")
        if mode == "overwrite":
            for name in survey(folder).unlisted:
                _refuse_foreign(folder / name)
            _clear(folder)
        elif mode == "new":
            check_fresh(folder)
        with LogWriter(folder, lock.number, None, header) as log:
            places, _, _ = _recover(folder, header, say, log).locate()
            wanted = {corpus.entries[number].id for number in corpus.share(share)}
            stale = _check_job(
                folder, header, corpus, share, (places, wanted), lock.owner.job, say, log, extends=mode == "extend"
            )
        known = places.keys() & wanted - stale
        done = {name for name in known if places[name].is_done}
        kept = {name for name in known - done if not (retry_failed or places[name].is_transient)}
        return done, kept
    except UnavailableError:
        raise
    except OSError as error:
        raise OutputError(f"output.path {str(folder)!r} cannot be used: {error}") from error


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
    """The identity and documents of a run: the file ``run.json``.

    identity : settings that the answers depend on.
    job : id of the last batch job that wrote to the folder; empty: none.
    share : documents of the corpus that this job has to process.
    gone : documents with results that are no longer in the corpus.
    """

    identity: dict[str, Any]
    job: str
    share: slice
    gone: frozenset[str]
    corpus: Corpus

    @property
    def wanted(self) -> list[str]:
        """Ids of the documents that the run's latest job has to process."""
        return [self.corpus.entries[number].id for number in self.corpus.share(self.share)]


def read_run_file(folder: Path) -> RunFile | None:
    """Read the run file; None if it is missing, damaged or not a run file; raises `KvrError` if it cannot be read."""
    path = folder / RUN_FILE
    with contextlib.suppress(DataError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        stored = unseal(read_whole(lambda: read_regular(path, RUN_FILE_BYTES), path))
        if stored is not None and isinstance(stored["identity"], dict):
            listed = stored["corpus"]
            "".join([stored["job"], *listed["ids"], *listed["prompts"]]).encode()  # raises unless all are text
            first, step = map(operator.index, stored.get("share", (0, 1)))
            if 0 <= first < step:
                gone = frozenset(map(str, stored.get("gone", ())))
                corpus = Corpus.from_json(listed)
                return RunFile(stored["identity"], stored["job"], slice(first, None, step), gone, corpus)
    return None


def known_corpus(folder: Path) -> Corpus | None:
    """Return a run's list of documents, for `scan_corpus`; None if it is missing or damaged."""
    stored = read_run_file(folder)
    return None if stored is None else stored.corpus


def is_of_job(folder: Path, job: str) -> bool:
    """Whether this batch job was the last one to write to the folder."""
    stored = read_run_file(folder)
    return stored is not None and job != "" and stored.job == job


def _recover(folder: Path, header: Header, say: Say, log: LogWriter) -> Survey:
    """Repair the folder after a crash, and return a survey of the valid files."""
    found = survey(folder, reads_all=True)
    for source, other in found.headers.items():
        check_identity(source, other.identity, header.identity)
    _remove_unfinished(folder)
    found.verify(VERIFY_BYTES)
    damaged = found.damaged
    for name, why in sorted(damaged.items()):
        kept = _set_aside(folder / name, header)
        say(f"warning: {folder / name} is damaged: {why}; kept as {kept.name}; its documents are processed again")
    for path, why in {piece.path: why for piece, why in found.spoilt.items()}.items():
        say(f"warning: {path} is damaged: {why}; the documents concerned are processed again")
    if found.spoilt:
        _drop(log, found.locate()[2])
    if damaged or found.spoilt:
        found = survey(folder)
    for name in found.unlisted:
        _refuse_foreign(folder / name)
        remove(folder / name)
    for name in set(found.missing) - damaged.keys():
        say(f"warning: {folder / name} is gone: documents that need it are processed again")
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


def _check_job(
    folder: Path,
    header: Header,
    corpus: Corpus,
    share: slice,
    documents: tuple[Mapping[str, Place], set[str]],
    job: str,
    say: Say,
    log: LogWriter,
    *,
    extends: bool,
) -> set[str]:
    """Refuse a job with other settings or documents than the run's, and write ``run.json``.

    `documents` are those with records, and those that the job has to process. Returns the ids of documents whose
    records are no longer valid: they could not be read before, or their text has changed, which is allowed if the job
    `extends` the run.
    """
    places, wanted = documents
    recorded = {*places}
    if passing := {name for name in recorded - wanted if places[name].is_transient}:  # of tables: now there are rows
        recorded -= passing
        _drop(log, passing)
    stored, stale, gone = read_run_file(folder), set[str](), set[str]()
    if stored is not None:
        gone = {*stored.gone}
    if stored is not None and recorded:
        check_identity(folder, stored.identity, header.identity)
        unread = {entry.id for entry in stored.corpus.entries if entry.error is not None}
        stale = {entry.id for entry in corpus.entries if entry.error is None and entry.id in unread} & recorded
        if stale:
            say(f"can be read now, and will be processed: {_describe({'repaired': stale})}")
        _check_read(stored.corpus, corpus)
        if not extends:
            _check_corpus(folder, stored.corpus, corpus)
        else:
            changes = changes_of(stored.corpus, corpus)
            if told := _describe(changes):
                say(f"{folder} is extended: {told}; results of documents that are gone are kept")
            stale |= (changes["changed"] | changes["new"]) & recorded  # new: a document that is there again
            gone = (gone | changes["gone"]) & recorded - wanted
        if stale:
            _drop(log, stale)
    elif recorded and extends:
        raise OutputError(
            f"cannot extend {folder}: {RUN_FILE} is missing or damaged, so it is unknown which documents have changed; "
            f"{OTHER_FOLDER}"
        )
    elif recorded:
        stale = _unproven(places, corpus) & wanted
        same = f"{counted(len(recorded & wanted - stale), 'document')} are still the same, by their hashes"
        again = f"; {counted(len(stale), 'document')} ({_some(sorted(stale))}) may have changed: processed again"
        say(f"warning: {folder / RUN_FILE} is missing or damaged: {same}{again if stale else ''}")
        if stale:
            _drop(log, stale)
    if others := recorded - wanted - gone:
        first = ALL if stored is None else stored.share
        raise OutputError(
            f"cannot resume {folder}: it has {counted(len(others), 'document')} that this job does not process "
            f"({_some(sorted(others))}); it was started with {_share_text(first)}, this job has "
            f"{_share_text(share)}: restore that, or {OTHER_FOLDER}"
        )
    listed = {"share": [share.start, share.step], "corpus": corpus.to_json(), "gone": sorted(gone)}
    line = seal({"identity": header.identity, "model": header.model, "job": job, **listed})
    path = folder / RUN_FILE
    if stored is None or read_regular(path, RUN_FILE_BYTES) != line:
        with replacing(path) as stream:
            stream.write(line)
    return stale


def _unproven(places: Mapping[str, Place], corpus: Corpus) -> set[str]:
    """Return the ids of answers whose records do not have the hash of the document as it is now."""
    now = {entry.id: entry.sha256 for entry in corpus.entries}
    answers = {(place.source, place.at): name for name, place in places.items() if place.is_done and name in now}
    unproven = {*answers.values()}
    for source in {source for source, _ in answers}:
        for at, line in lines_of(source):
            name = answers.get((source, at))
            if name is not None and read_record(line, f"{source}: {name!r}").document_sha256 == now[name]:
                unproven.remove(name)
    return unproven


def _share_text(share: slice) -> str:
    return "all documents" if share.step == 1 else f"documents.shard = '{share.start}/{share.step}'"


def check_identity(file: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to continue a run with other settings or another model; the `OutputError` says what differs."""
    wanted = json.loads(json.dumps(wanted))  # as it was stored: without tuples
    if changed := [f"{key} was {was}, is {now}" for key, was, now in differing_settings(stored, wanted)]:
        raise OutputError(
            f"cannot resume {file}: it was written with other settings ({'; '.join(changed)}); restore them, or "
            f"{OTHER_FOLDER}"
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


def _check_corpus(folder: Path, before: Corpus, now: Corpus) -> None:
    """Refuse changed, missing or new documents; those that could not be read before may have been repaired."""
    if told := differing_documents(before, now):
        raise OutputError(
            f"cannot resume {folder}: the documents have changed since it began: {told}; restore them, answer new and "
            f"changed ones with --extend, or {OTHER_FOLDER}"
        )


def _check_read(before: Corpus, now: Corpus) -> None:
    """Refuse to take documents for changed or gone whose file cannot be read now."""
    unread = {now.files[entry.file].name: entry.error for entry in now.entries if entry.is_transient}
    for entry in before.entries if unread else ():
        if not entry.is_transient and (error := unread.get(before.files[entry.file].name)):
            raise UnavailableError(
                f"{error}; the run has its document {entry.id!r}. If it stays so, take the file out of documents.path, "
                f"and continue with --extend"
            )


def differing_documents(before: Corpus, now: Corpus) -> str:
    """Describe the `changes_of` a corpus; empty if there are none."""
    return "" if before.entries == now.entries else _describe(changes_of(before, now))


def changes_of(before: Corpus, now: Corpus) -> dict[str, set[str]]:
    """Return the ids of changed, gone and new documents; unreadable ones that can be read now are not changed.

    A table that could not be read for the moment (`Entry.is_transient`) has one entry; its rows are not new later.
    """
    old = {entry.id: entry for entry in before.entries}
    new = {entry.id: entry for entry in now.entries}
    both = old.keys() & new.keys()
    passing = {entry.id for entry in before.entries if entry.is_transient}
    unread = {before.files[old[name].file].name for name in passing}
    late = {entry.id for entry in now.entries if unread and now.files[entry.file].name in unread}
    return {
        "changed": {name for name in both if old[name].error is None and old[name].sha256 != new[name].sha256},
        "gone": old.keys() - new.keys() - passing,
        "new": new.keys() - old.keys() - late,
    }


def _describe(changes: dict[str, set[str]]) -> str:
    return ", ".join(f"{len(names)} {what} ({_some(sorted(names))})" for what, names in changes.items() if names)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (" ..." if len(names) > NAMED else "")
