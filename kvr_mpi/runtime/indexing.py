"""The corpus of a job, indexed by all ranks together, and how its documents are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvr_mpi.documents import Corpus, describe_others, scan_corpus
from kvr_mpi.documents.corpus import make_corpus, with_model
from kvr_mpi.documents.index import (
    FileSpan,
    Index,
    Lines,
    cut_spans,
    index_spans,
    list_files,
    pack_columns,
    unpack_columns,
)
from kvr_mpi.errors import ConfigError, CorpusError, UnavailableError
from kvr_mpi.job import JobSpec
from kvr_mpi.job.inputs import row_format
from kvr_mpi.logs import RankLogger
from kvr_mpi.runtime.checks import find_others, name_files
from kvr_mpi.runtime.requests import DocumentSource, TextSource
from kvr_mpi.runtime.reuse import find_beginnings
from kvr_mpi.runtime.session import Session
from kvr_mpi.runtime.stored_source import StoredSource, scan_stored
from kvr_mpi.store.run import hash_recorded
from kvr_mpi.transport import Transport, on_root, together


def index_job(spec: JobSpec, world: Transport, logger: RankLogger, folder: Path, *, is_new: bool) -> Corpus:
    """Index the documents of a job's part of the corpus, each rank some of them; every rank calls this.

    is_new : results in the folder do not count, so that no document has to be compared with them.

    Raises as `scan_corpus` and `scan_stored`, on all ranks.
    """
    if spec.questions is not None:
        return _share(world, on_root(world, lambda: _list_questions(spec, logger)))

    def begin() -> Corpus:
        if others := find_others(spec):
            logger.info(f"skipped {name_files(others)}: {describe_others(others)}")
        files = list_files(spec.documents.path)
        rows = with_model(files, row_format(spec))
        empty = index_spans(files, (), rows)[0]
        return Corpus(files, empty, rows, tuple(spec.prompts), spec.documents.part)

    def list_recorded() -> bytes:
        return b"" if is_new else hash_recorded(folder, has_prompts=bool(spec.prompts)).tobytes()

    empty = _share(world, on_root(world, begin))
    recorded = np.frombuffer(world.broadcast(on_root(world, list_recorded) or b""), np.uint64)
    files, limit = empty.files, spec.documents.limit
    spans = cut_spans(files, empty.part, world.rank, world.size)
    if limit is not None:  # one rank reads until there are enough
        spans = [] if world.rank else [FileSpan(number) for number in range(len(files))]
    found = [together(world, lambda: index_spans(files, spans, empty.rows, recorded=recorded, limit=limit))]
    parts = world.gather(_to_bytes(*found.pop())) if world.size > 1 else []

    def finish() -> Corpus:
        # Each rank's index is kept no longer than it is needed.
        indexes = (_from_bytes(parts.pop(0)) if parts else found.pop() for _ in range(world.size))
        about: dict[str, Any] = {"prompts": empty.prompts, "part": empty.part, "limit": limit}
        corpus = make_corpus(files, indexes, empty.rows, paths=spec.documents.path, **about)
        if limit is not None:
            _check_counted(corpus)
        return corpus

    return _share(world, on_root(world, finish))


def scan_documents(spec: JobSpec, prompts: Sequence[str] = ()) -> Corpus:
    """Index a job's part of the corpus on one rank; raises `CorpusError` if it has no documents."""
    wanted = spec.documents
    if spec.questions is not None:
        raise ConfigError("a job with [questions] uses the documents of a run and cannot be planned")
    corpus = scan_corpus(wanted.path, rows=row_format(spec), limit=wanted.limit, prompts=prompts, part=wanted.part)
    if not len(corpus):
        raise CorpusError(f"documents.path {wanted.path}: there are no documents in the share {wanted.shard}")
    return corpus


def open_documents(session: Session, corpus: Corpus) -> DocumentSource:
    """Open the source of documents and their prompts; every rank calls this."""
    if session.spec.questions is not None:
        return StoredSource(session, corpus)
    reused = None if session.spec.documents.reuse is None else find_beginnings(session)
    return TextSource(corpus, session.prompt_config, None if reused is None else reused.find, session.spec.prompts)


def _share(world: Transport, corpus: Corpus | None) -> Corpus:
    """Return rank 0's corpus on every rank."""
    if world.size > 1:
        data = world.broadcast(b"" if corpus is None else corpus.to_bytes())
        corpus = Corpus.from_bytes(data) if corpus is None else corpus
    assert corpus is not None, "on rank 0"
    return corpus


def _list_questions(spec: JobSpec, logger: RankLogger) -> Corpus:
    corpus, lines = scan_stored(spec)
    for line in lines:
        logger.info(line)
    return corpus


def _check_counted(corpus: Corpus) -> None:
    """Refuse to count documents while the number of rows of a table is unknown."""
    for number, error in corpus.index.errors.items():
        is_table = corpus.files.format(int(corpus.index.file[number])).is_table
        if is_table and corpus.is_transient(number * (len(corpus.prompts) or 1)):
            raise UnavailableError(f"{error}; its rows are counted for documents.limit")


def _to_bytes(index: Index, lines: Sequence[Lines]) -> bytes:
    return pack_columns({"lines": lines, "errors": [*index.errors.items()]}, index.columns())


def _from_bytes(data: bytes) -> tuple[Index, list[Lines]]:
    head, columns = unpack_columns(data)
    columns |= {name: columns[name].copy() for name in ("row", "is_bad")}  # which `join` changes
    return Index.of(columns, dict(head["errors"])), [Lines(*one) for one in head["lines"]]
