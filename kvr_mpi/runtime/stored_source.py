"""Documents whose keys and values are stored, asked again: only the question is prefilled.

A run's folder is the corpus. The questions follow each document's text in its stored prompt, and what comes before is
loaded layer by layer while the model computes (``kv.loading``), each block held against its checksum. Where loading
would take longer than prefilling, or the keys would depend on how the prompt goes on, the prompt is prefilled again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kvr_mpi.disk import drop_pages
from kvr_mpi.documents import MAX_ID_CHARS, Asked, Corpus, CorpusFile, Document, Entry
from kvr_mpi.documents.questions import answer_id, check_length, parse_answer_id
from kvr_mpi.duration import duration_text
from kvr_mpi.errors import ConfigError, CorpusError, DataError, DocumentError
from kvr_mpi.job import JobSpec
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model.rope import depends_on_length
from kvr_mpi.requests.document_request import DocumentRequest
from kvr_mpi.setup.job_setup import JobSetup
from kvr_mpi.store.folder import DamagedFile, Index
from kvr_mpi.store.hdf5 import group_in
from kvr_mpi.store.outputs import key_of, open_file, read_record
from kvr_mpi.store.parts import PartIndexes, open_whole_kv
from kvr_mpi.store.shares import find_runs, index_runs
from kvr_mpi.stored.prompt import StoredPrompt, compressed_prefix_of, open_prompt, prefix_of

# Of stored keys and values, to see how fast they are read here.
SAMPLE_BYTES = 128 << 20
# How much work a loaded token is, of a prefilled one; for the progress and for sharing out.
LOADED_WORK = 0.02


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """What is stored of a document, or why it cannot be asked.

    bytes : of keys and values, all of them.
    prefill_s : seconds that one rank would take to prefill it; 0 if that is not known.
    compression : by which method and settings its heads have dropped tokens; empty: they hold all.
    is_askable : False if the run never stored what questions need; `error` says what that is.
    """

    id: str
    file: Path
    tokens: int = 0
    bytes: int = 0
    prefill_s: float = 0.0
    sha256: str = ""
    error: str | None = None
    compression: str = ""
    is_askable: bool = True


@dataclass(frozen=True, slots=True)
class StoredCorpus:
    """Questions about stored documents.

    corpus : an entry for each document and question; `place` is the document's number.
    documents : by number.
    loads : for each document, whether what is stored is used.
    read_bytes_per_s : measured; None if nothing was there to read.
    left_out : documents of the run that have no answer, and so no keys and values.
    """

    corpus: Corpus
    documents: tuple[StoredDocument, ...]
    loads: list[bool]
    read_bytes_per_s: float | None
    left_out: int = 0

    def load_s(self, document: StoredDocument) -> float:
        """Seconds to load a document."""
        return document.bytes / self.read_bytes_per_s if self.read_bytes_per_s else 0.0

    def describe(self) -> list[str]:
        """Say what is loaded, what is not, and why."""
        good = [(one, loads) for one, loads in zip(self.documents, self.loads, strict=True) if one.error is None]
        loaded = [one for one, loads in good if loads]
        lines = []
        if self.left_out:
            lines.append(f"{self.left_out} document(s) of the run have error records, and are skipped")
        if loaded:
            size, load_s = sum(one.bytes for one in loaded), sum(map(self.load_s, loaded))
            known = sum(one.prefill_s for one in loaded)
            instead = f", instead of prefilling them for {duration_text(known)} on one rank" if known else ""
            speed = (self.read_bytes_per_s or 0) / 1e9
            lines.append(
                f"{len(loaded)} document(s) will be loaded: {size / 1e9:.2f} GB of keys and values at {speed:.2f} "
                f"GB/s, {load_s:.1f} s{instead}"
            )
        if methods := [one.compression for one in loaded if one.compression]:
            lines.append(
                f"{len(methods)} document(s) are compressed ({'; '.join(sorted(set(methods)))}), and always loaded, "
                f"even if a prefill would be faster; --reuse never prefills them without compression"
            )
        if len(loaded) < len(good):
            lines.append(
                f"{len(good) - len(loaded)} document(s) will be prefilled again, which is faster or was requested"
            )
        return lines


def scan_stored(spec: JobSpec, *, cold: bool = False) -> StoredCorpus:
    """Find the stored documents of a job with questions, and decide which are loaded.

    Parameters
    ----------
    spec : JobSpec
        Of `complete_questions`.
    cold : bool
        Give back what the system holds of the files in memory before it is measured how fast they are read.

    Raises
    ------
    ConfigError
        If what is stored is not exact, and what goes on from it is to be stored again.
    CorpusError
        If a document that is named is not there, or none has keys and values.
    DataError
        If nothing of the run can be read.
    """
    questions = spec.questions
    assert questions is not None and isinstance(questions.ask, dict)
    index, _ = index_runs(find_runs([Path(path) for path in spec.documents.path]), passes_damaged=True)
    lost = {name: _lost(name, one) for one in index.damaged for name in one.documents}
    wanted = questions.documents if questions.documents is not None else sorted([*index.places, *lost])
    if unknown := [name for name in wanted if name not in index.places and name not in lost]:
        raise CorpusError(
            f"questions.documents: {unknown[0]!r} is not among the {len(index.places)} documents of "
            f"{', '.join(spec.documents.path)}, such as {', '.join(map(repr, index.ids()[:3]))}"
        )
    done = [name for name in dict.fromkeys(wanted) if name in lost or index.places[name].is_done][
        : spec.documents.limit
    ]
    parts = PartIndexes()
    documents = tuple(
        lost[name] if name in lost else _look(index, name, parts, is_sharded=questions.sharded) for name in done
    )
    if all(one.error is not None for one in documents):
        why = f": {documents[0].error}" if documents else ""
        raise (DataError if lost else CorpusError)(
            f"documents.path {spec.documents.path}: no document there can be asked about{why}"
        )
    if cold:
        for file in {one.file for one in documents}:
            drop_pages(file)
    speed = _measure_reading(documents, parts)
    found = StoredCorpus(Corpus((), ()), documents, [], speed, len(wanted) - len(done))
    loads = [
        questions.reuse != "never"
        and (
            questions.reuse == "always"
            or not one.prefill_s
            # Else the answer would depend on how fast this machine is.
            or bool(one.compression)
            or found.load_s(one) < one.prefill_s
        )
        for one in documents
    ]
    if spec.output.kv:
        _check_stored_again([one for one, is_loaded in zip(documents, loads, strict=True) if is_loaded])
    return StoredCorpus(_corpus(documents, questions.ask, loads), documents, loads, speed, found.left_out)


def check_askable(spec: JobSpec, found: StoredCorpus) -> None:
    """Refuse questions about more documents that cannot be asked than `output.max_failed` allows.

    Raises
    ------
    CorpusError
        Naming some of them, and what to do.
    """
    wrong = [one for one in found.documents if not one.is_askable]
    asked = len(found.corpus) // len(found.documents)
    if asked * len(wrong) <= spec.output.failures_allowed(len(found.corpus)):
        return
    raise CorpusError(
        f"documents.path {spec.documents.path}: {len(wrong)} of {len(found.documents)} documents cannot be asked "
        f"about: {wrong[0].error}. Name the others with --doc (questions.documents), or set output.max_failed to "
        f"{asked * len(wrong)} or more to get error records for these"
    )


class StoredSource:
    """Questions about stored documents, and their prompts.

    Parameters
    ----------
    setup : JobSetup
    corpus : Corpus
        Of `scan_stored`.
    loads : sequence of bool
        For each document, whether what is stored is used.
    """

    def __init__(self, setup: JobSetup, corpus: Corpus, loads: Sequence[bool]) -> None:
        self.corpus, self._setup, self._loads = corpus, setup, loads
        questions = setup.spec.questions
        assert questions is not None and isinstance(questions.ask, dict)
        self._ask: Mapping[str, str] = questions.ask
        self._numbers = {entry.id: number for number, entry in enumerate(corpus.entries)}
        self._open: tuple[StoredPrompt, SharedPrefix | None] | None = None  # the last one
        self._parts = PartIndexes()
        self._recomputes = bool(depends_on_length(setup.loaded.model))

    def read(self, number: int) -> Document:
        """Say what is asked, about which document."""
        entry = self.corpus.entries[number]
        document_id, name = parse_answer_id(entry.id)
        return Document(entry.id, error=entry.error, asked=Asked(document_id, self._ask[name], ""))

    def request(self, document: Document, work: int) -> DocumentRequest:
        """Let a question follow a document's text; its keys and values are loaded when they are needed."""
        if document.error is not None:
            raise DocumentError(document.error)
        assert document.asked is not None
        stored, prefix = self._find(document.id)
        _, name = parse_answer_id(document.id)
        prompt = self._setup.question_frames[name].after(stored.ids, stored.text, stored.record.dropped_tokens)
        document = replace(document, asked=replace(document.asked, sha256=stored.record.document_sha256))
        return DocumentRequest(document, self._setup.prompt_config.scoring(document), work, [prompt], prefix)

    def _find(self, answer: str) -> tuple[StoredPrompt, SharedPrefix | None]:
        """Open the document of an answer, unless it is the last one that was."""
        entry = self.corpus.entries[self._numbers[answer]]
        document_id, name = parse_answer_id(answer)
        if self._open is None or self._open[0].record.id != document_id:
            self._open = None
            path = Path(self.corpus.files[entry.file].path)
            stored = open_prompt(path, key_of(document_id), self._parts)
            prefix = self._prefix_of(stored, path) if self._loads[entry.place] else None
            self._open = stored, prefix
        if _seal(self._open[0].kv.seal(), self._ask[name]) != entry.sha256:
            raise DocumentError(f"{document_id}: its stored keys and values have changed since the job began")
        return self._open

    def _prefix_of(self, stored: StoredPrompt, path: Path) -> SharedPrefix | None:
        """Make a prefix of a stored document's text; None if it has to be prefilled again."""
        ids, loaded, compression = stored.ids[: stored.text[1]], self._setup.loaded, stored.kv.compression
        if not compression:
            return None if self._recomputes else prefix_of(ids, loaded, lambda: stored, path)
        if self._recomputes:
            raise DocumentError(
                f"{stored.record.id}: its stored keys and values are compressed ({compression}), but depend on how the "
                f"prompt continues, so they have to be computed again; use `--reuse never`"
            )
        return compressed_prefix_of(ids, loaded, lambda: stored, path, compression)


def _look(index: Index, name: str, parts: PartIndexes, *, is_sharded: bool) -> StoredDocument:
    """Find out what is stored of a document; nothing of its keys and values is read."""
    file = index.places[name].file
    try:
        with open_file(file) as stored, ExitStack() as others:
            group = group_in(group_in(stored, "documents"), key_of(name))
            record, kv = read_record(group), open_whole_kv(group, parts, others)
            seal, size = kv.seal(), kv.bytes
    except DataError as error:
        return StoredDocument(name, file, error=str(error))
    why = None
    if not kv.layers:
        why = "no keys and values are stored for it; prefill it with output.kv = true"
    elif record.parts > 1:
        why = (
            f"its text was too long and was split into {record.parts - 1} parts, so only the keys and values of the "
            f"combined answers are stored"
        )
    elif kv.tokens is None:
        why = "its stored keys and values have no token ids, or not all tokens; prefill it again"
    elif kv.compression and is_sharded:
        why = f"it is compressed ({kv.compression}), which needs one rank; leave --sharded out"
    if why is not None or kv.tokens is None:
        return StoredDocument(name, file, error=f"{name} cannot be asked about: {why}", is_askable=False)
    rate = record.prefill_tokens_per_s / max(1, len(record.slices) - 1)
    tokens = kv.tokens.text[1]
    return StoredDocument(name, file, tokens, size, tokens / rate if rate > 0 else 0.0, seal, None, kv.compression)


def _check_stored_again(loaded: Sequence[StoredDocument]) -> None:
    """Refuse to store what goes on from keys and values that are not exact: it would not say so itself."""
    for one in loaded:
        if one.compression:
            raise ConfigError(
                f"output.kv = true cannot be combined with questions about {one.id}: it is compressed "
                f"({one.compression}), so the stored keys and values would differ from those that the model computes; "
                f"leave output.kv out, or prefill the documents again with questions.reuse = 'never'"
            )


def _lost(name: str, damaged: DamagedFile) -> StoredDocument:
    why = f"{name} cannot be asked about: {damaged.file} is damaged ({damaged.why}); prefill it again"
    return StoredDocument(name, damaged.file, error=why)


def _corpus(documents: Sequence[StoredDocument], ask: Mapping[str, str], loads: Sequence[bool]) -> Corpus:
    """List every question about every document."""
    files = list(dict.fromkeys(document.file for document in documents))
    numbers = {file: number for number, file in enumerate(files)}
    entries = []
    for place, (document, is_loaded) in enumerate(zip(documents, loads, strict=True)):
        for name, question in ask.items():
            answer = answer_id(document.id, name)
            work = 1 + int(document.tokens * (LOADED_WORK if is_loaded else 1.0)) + len(question)
            error = document.error or check_length(answer)
            sha256 = _seal(document.sha256, question)
            if error is not None and len(answer) > MAX_ID_CHARS:
                answer = answer_id(document.id[: MAX_ID_CHARS - 80], f"{name}")
            entries.append(Entry(answer, work, sha256, numbers[document.file], place, error))
    return Corpus(tuple(_file(file) for file in files), tuple(entries))


def _file(file: Path) -> CorpusFile:
    found = file.stat()
    return CorpusFile(str(file), file.name, found.st_size, found.st_mtime_ns)


def _measure_reading(documents: Sequence[StoredDocument], parts: PartIndexes) -> float | None:
    """Read some of what is stored, with its checksums, and return bytes per second."""
    read_bytes, began = 0, time.perf_counter()
    for document in documents:
        if document.error is None and read_bytes < SAMPLE_BYTES:
            try:
                with open_file(document.file) as stored, ExitStack() as others:
                    group = group_in(group_in(stored, "documents"), key_of(document.id))
                    for layer in open_whole_kv(group, parts, others).layers:
                        layer.read()
                        read_bytes += layer.bytes
                        if read_bytes >= SAMPLE_BYTES:
                            break
            except DataError:
                continue  # said when it is asked
    return read_bytes / (time.perf_counter() - began) if read_bytes else None


def _seal(kv_sha256: str, question: str) -> str:
    return hashlib.sha256(f"{kv_sha256} {question}".encode()).hexdigest()
