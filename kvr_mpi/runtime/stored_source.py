"""New questions about stored documents: only the question is prefilled.

The corpus is the folder of an earlier run. A question follows the document's text in the stored prompt; the keys and
values before it are loaded layer by layer while the model computes (``kv.sequence``), and every block's checksum is
verified. If keys depend on the prompt's length, the prompt is prefilled again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvr_mpi.documents import Asked, Corpus, Document
from kvr_mpi.documents.corpus import corpus_of
from kvr_mpi.documents.questions import parse_answer_id
from kvr_mpi.errors import NOT_NOW, ConfigError, CorpusError, DataError, DocumentError, counted
from kvr_mpi.job import JobSpec
from kvr_mpi.model.rope import depends_on_length
from kvr_mpi.report.style import bytes_text
from kvr_mpi.runtime.requests import Split
from kvr_mpi.runtime.session import Session
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.kv_reader import read_prompt
from kvr_mpi.store.parts import tell_missing
from kvr_mpi.store.prefix import StoredPrefix, check_files
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import Results, read_results

# Work of a loaded token relative to a prefilled one, for the progress and the distribution over chains.
LOADED_WORK = 0.02


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A stored document, or the reason why questions about it cannot be answered.

    sha256 : hash of what its keys and values depend on (`contents_of_stored`); empty: it cannot be read.
    bytes : size of all keys and values.
    compression : method and settings of its compression; empty: all tokens are stored.
    is_askable : False if the run lacks the keys and values that questions need; `error` names what is missing.
    """

    id: str
    tokens: int = 0
    bytes: int = 0
    sha256: str = ""
    error: str | None = None
    compression: str = ""
    is_askable: bool = True


def scan_stored(spec: JobSpec) -> tuple[Corpus, list[str]]:
    """List the questions about the stored documents of a job, from `complete_questions`.

    Returns the documents, with the questions as prompts about them, and lines for the log.
    Raises `ConfigError` if stored documents are compressed and the job stores keys and values; `CorpusError` if a named
    document does not exist, no document has keys and values, or more documents cannot be asked about than
    `output.max_failed` allows; `DataError` if the run cannot be read, or is incomplete.
    """
    questions = spec.questions
    assert questions is not None and isinstance(questions.ask, dict)
    index = _results_of(spec)
    missing, lost, path = index.missing, index.unreadable, f"documents.path {spec.documents.path}"
    wanted = questions.documents if questions.documents is not None else sorted([*index.places, *lost])
    if unknown := [name for name in wanted if name not in index.places and name not in lost]:
        raise CorpusError(
            f"questions.documents: {unknown[0]!r} is not among the {len(index.places)} documents of "
            f"{', '.join(spec.documents.path)}, such as {', '.join(map(repr, index.ids()[:3]))}"
        )
    done = [name for name in dict.fromkeys(wanted) if name in lost or index.places[name].is_done]
    documents = [_look(index, name, spec) for name in done[: spec.documents.limit]]
    good = [one for one in documents if one.error is None]
    if not good:
        why = f": {documents[0].error or ''}" if documents else "".join(f": {one}" for one in missing[:1])
        raise (DataError if lost or index.damaged else CorpusError)(
            f"{path}: none of its documents can be asked about{why}"
        )
    compressed = [one for one in good if one.compression]
    if spec.output.kv and compressed:
        one = compressed[0]
        raise ConfigError(
            f"output.kv = true cannot be combined with questions about {one.id}: it is compressed ({one.compression}), "
            f"so the stored keys and values would differ from those that the model computes; leave output.kv out"
        )
    if missing and questions.documents is None:
        raise DataError(
            f"{path}: {tell_missing(missing)}. Complete the run, name the documents to ask about (--doc, "
            "questions.documents), or merge the others with `kvr merge -o FILE` and ask about that file"
        )
    corpus = _corpus(documents, questions.ask)
    wrong = [one for one in documents if not one.is_askable]
    failed = len(questions.ask) * len(wrong)
    if failed > spec.output.failures_allowed(len(corpus)):
        raise CorpusError(
            f"{path}: {len(wrong)} of {len(documents)} documents cannot be asked about: {wrong[0].error}. Name the "
            f"others with --doc (questions.documents), or set output.max_failed to {failed} or more to get error "
            "records for these"
        )
    lines = [tell_missing(missing)] if missing else []
    if left_out := len(wanted) - len(documents):
        lines.append(f"skipped: {counted(left_out, 'document')} with error records")
    size = bytes_text(sum(one.bytes for one in good))
    lines.append(f"{counted(len(good), 'document')} will be loaded: {size} of keys and values")
    if compressed:
        methods = "; ".join(sorted({one.compression for one in compressed}))
        lines.append(f"compressed: {counted(len(compressed), 'document')} ({methods})")
    return corpus, lines


class StoredSource:
    """Questions about stored documents, and their prompts; the corpus comes from `scan_stored`."""

    def __init__(self, session: Session, corpus: Corpus) -> None:
        self.corpus, self._session = corpus, session
        questions = session.spec.questions
        assert questions is not None and isinstance(questions.ask, dict)
        self._ask: Mapping[str, str] = questions.ask
        self._open: tuple[Record, CachedTokens, StoredPrefix | None] | None = None  # the latest
        self._results: Results | None = None
        self._recomputes = bool(depends_on_length(session.loaded.model))

    def read(self, number: int) -> Document:
        """Return the question and its document by number in the corpus."""
        answer, too_long = self.corpus.named(number)
        error = self.corpus.index.errors.get(self.corpus.document_number(number), too_long)
        document_id, name = parse_answer_id(answer)
        sha256 = self.corpus.digest(number) or ""
        return Document(answer, error=error, asked=Asked(document_id, self._ask[name], sha256))

    def request(self, document: Document, work: int) -> Split:
        """Append a question to a document's text; keys and values are loaded later."""
        if document.error is not None:
            raise DocumentError(document.error)
        assert document.asked is not None
        record, tokens, source = self._find(document.asked)
        _, name = parse_answer_id(document.id)
        config = self._session.prompt_config
        prompt = config.questions[name].after(tuple(tokens.ids), tokens.text, record.dropped_tokens)
        if config.checks_answers:  # the text itself is not stored
            document = replace(document, text=config.tokenizer.decode(tokens.ids[slice(*tokens.text)]))
        shared_tokens = 0 if source is None else source.tokens
        return Split(document, config.scoring(document), work, [prompt], source, shared_tokens)

    def _find(self, asked: Asked) -> tuple[Record, CachedTokens, StoredPrefix | None]:
        """Return the document of a question, and open it unless it was the last one."""
        document_id = asked.document
        results = self._results = self._results or _results_of(self._session.spec)
        if document_id not in results:
            raise DocumentError(f"{document_id}: it was stored when the job began, and is gone: start the job again")
        pieces = results.places[document_id].pieces
        if self._open is None or self._open[0].id != document_id:
            self._open, record = None, results[document_id]
            if contents_of_stored(record) != asked.sha256:
                raise DocumentError(f"{document_id}: its stored keys and values have changed since the job began")
            check_files(pieces)
            if (tokens := read_prompt(pieces)) is None:
                raise DocumentError(f"{document_id}: its stored keys and values do not record their tokens")
            prefix = StoredPrefix(document_id, pieces, tokens.text[1], tokens.compression)
            if self._recomputes and tokens.compression:
                raise DocumentError(
                    f"{document_id}: its stored keys and values are compressed ({tokens.compression}), but depend on "
                    f"how the prompt continues, so they have to be computed again: prefill it in a run of its own"
                )
            self._open = record, tokens, None if self._recomputes else prefix
        return self._open


def contents_of_stored(record: Record) -> str:
    """Return the hash of a document's contents or, if tokens were dropped, of what is stored of it."""
    if not (record.compression or record.dropped_tokens):
        return record.document_sha256
    stored = f"{record.document_sha256} {record.prompt_sha256} {record.compression}"
    return hashlib.sha256(stored.encode()).hexdigest()


def _results_of(spec: JobSpec) -> Results:
    """Locate all documents."""
    return read_results([Path(path) for path in spec.documents.path], passes_damaged=True)


def _look(index: Results, name: str, spec: JobSpec) -> StoredDocument:
    """Examine a stored document without reading keys and values."""
    if (why := index.unreadable.get(name)) is not None:
        return StoredDocument(name, error=f"{NOT_NOW}{name}: {why}; prefill it again")
    place = index.places[name]
    try:
        record, tokens = index[name], read_prompt(place.pieces)
    except DataError as error:
        return StoredDocument(name, error=f"{NOT_NOW}{error}")
    sha256 = contents_of_stored(record)
    if not place.pieces:
        why = "no keys and values are stored for it; prefill it with output.kv = true"
    elif record.parts > 1:
        why = (
            f"its text was too long and was split into {record.parts - 1} parts, so only the keys and values of the "
            f"combined answers are stored"
        )
    elif tokens is None:
        why = "its stored keys and values have no token ids, or not all tokens; prefill it again"
    elif tokens.compression and spec.is_sharded:
        why = f"it is compressed ({tokens.compression}), which needs one rank; leave parallel.ranks_per_chain out"
    if why is not None or tokens is None:
        text = f"{name} cannot be asked about: {why}"
        return StoredDocument(name, sha256=sha256, error=text, is_askable=False)  # answers from before stay
    return StoredDocument(name, tokens.text[1], place.kv_bytes, sha256, None, tokens.compression)


def _corpus(documents: Sequence[StoredDocument], ask: Mapping[str, str]) -> Corpus:
    """List every document, with the questions as prompts about it."""
    question_chars = max(map(len, ask.values()))
    works = [1 + int(document.tokens * LOADED_WORK) + question_chars for document in documents]
    errors = {number: document.error for number, document in enumerate(documents) if document.error is not None}
    hashes = [document.sha256 for document in documents]
    return corpus_of([document.id for document in documents], works, hashes, errors, tuple(ask))
