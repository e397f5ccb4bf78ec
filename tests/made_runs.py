"""Small runs for the tests of the store: records, logs and volumes, and a corpus that goes with them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import torch
from made_logs import logger_to

from kvr_mpi.documents import Corpus, CorpusPart
from kvr_mpi.documents.corpus import corpus_of as made_corpus
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.store.export import write_export
from kvr_mpi.store.folder import make_writable, survey
from kvr_mpi.store.kv import CachedTokens, KeysValues
from kvr_mpi.store.lock import Lock, session_of, this_process
from kvr_mpi.store.log import Header
from kvr_mpi.store.record import COMPUTED, Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.run import open_run
from kvr_mpi.store.volumes import is_ours, key_of
from kvr_mpi.store.writer import ResultWriter

IDENTITY: dict[str, Any] = {"model": "0123abcd", "generation": {"max_new_tokens": 96}, "kv": False}
HEADER = Header(IDENTITY, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "float32"})
STAMP = "2026-01-01T00:00:00.000+00:00"
NAMES = [*"abcdef", "dir/c", "..", "x/y.txt", "é"]


def record(name: str, status: str = "done", answer: str = "") -> Record:
    error = "it went wrong" if status == "error" else ""
    sha256, text = hash_of(f"text of {name}"), answer or f"about {name}"
    return Record(name, status, error=error, answer=text, token_ids=(1, 2), document_sha256=sha256, finished_at=STAMP)


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def new_writer(folder: Path, rank: int = 0, header: Header = HEADER) -> ResultWriter:
    """Write as a rank of the job that has the folder; of a later one if that rank has written already."""
    session = max(1, session_of(folder))
    while (folder / f"log-{session:04d}-{rank:04d}.jsonl").exists():
        session += 1
    return ResultWriter(folder, rank, header, session)


def write(folder: Path, rank: int, records: Iterable[Record], *, kv: bool = False, header: Header = HEADER) -> None:
    """Write what a rank has of some documents."""
    writer = new_writer(folder, rank, header)
    for number, each in enumerate(records):
        layer = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(number))
        layers = [(layer, -layer), None, (layer.half(), layer.half())] if kv else ()
        writer.write(each, layers, CachedTokens((7, 8, 9, 5), (1, 3)) if kv else None)
    writer.close()


def corpus_of(names: Iterable[str], **texts: str) -> Corpus:
    """A corpus of texts that are nowhere, all of them compared."""
    ids = [*names]
    made = [texts.get(name, f"text of {name}") for name in ids]
    return made_corpus(ids, [*map(len, made)], [*map(hash_of, made)])


def part_of(names: Sequence[str], number: int, count: int) -> Corpus:
    """A part of such a corpus."""
    return replace(corpus_of(names[number::count]), part=CorpusPart(number, count), cut=hash_of(" ".join(names))[:8])


class Run(NamedTuple):
    """A folder that was taken: its documents that are done, those that failed, and its lock."""

    done: set[str]
    failed: set[str]
    lock: Lock


def take(folder: Path, logger: RankLogger = SILENT, **options: Any) -> Run:
    """Open a run's folder for a job."""
    header, corpus = options.pop("header", HEADER), options.pop("corpus", corpus_of(NAMES))
    make_writable(folder)
    lock = Lock(folder, options.pop("owner", None) or this_process(), logger)
    try:
        found = open_run(folder, header, corpus, lock, logger=logger, **options)
        kept = set(corpus.ids()) - {corpus.id(number) for number in found.todo.tolist()}
        places = survey(folder).locate()[0]
        done = {name for name in kept if places[name].is_done}
        assert (len(done), len(kept - done)) == (found.done, found.failed)
        return Run(done, kept - done, lock)
    except BaseException:
        lock.release()
        raise


def write_share(parent: Path, number: int, count: int, names: Sequence[str], failed: Collection[str] = ()) -> Path:
    """Begin a share of these documents in a folder of its own, and write what it has of them."""
    folder, share = parent / f"share-{number}-of-{count}", slice(number, None, count)
    take(folder, corpus=part_of(names, number, count)).lock.release()
    write(folder, 0, [record(name, "error" if name in failed else "done") for name in names[share]])
    return folder


def resume(folder: Path, **options: Any) -> tuple[set[str], set[str], list[str]]:
    """Resume and end at once: what is done, what failed, and what was said."""
    said: list[str] = []
    run = take(folder, logger_to(said), **options)
    run.lock.release()
    return run.done, run.failed, said


def result_files(folder: Path) -> list[str]:
    """Names of logs, volumes and results, finished or not."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if is_ours(path.name) or path.name.endswith(".h5") or ".part" in path.name
    )


def kv_in(file: h5py.File, name: str) -> h5py.Group:
    """A document's keys and values in a volume that is open, of the first piece."""
    return file["kv"][next(key for key in file["kv"] if key.startswith(key_of(f"{name}/")))]


def stored_layers(path: Path, name: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of a document, by layer."""
    with open_results(path).open(name) as (_, kv):
        return {layer: kv.read(layer) for layer in kv.layers}


# Five documents to be shown and exported: ids, answers and errors that are hard to write


SHOWN = Header(
    {"model": "0123abcd", "prompt": {"template": "Summarise: {text}"}},
    {"name": "tiny/Llama", "architecture": "LlamaForCausalLM", "dtype": "float32"},
)
NASTY = 'First line.\nSecond, "quoted" and \'single\'; a, b, c\r\n\n\ttab 😀 é \\n ""'
COLUMNS = [*(spec.name for spec in fields(Record)), *COMPUTED]


def example_records() -> list[Record]:
    """Five documents, in the order of their ids, one of them failed."""
    base = Record(
        "", "done", token_ids=(1, 2, 3), slices=(0, 60, 100), document_sha256="ab" * 32, prompt_sha256="cd" * 32,
        prompt_tokens=100, dropped_tokens=2, new_tokens=3, finish_reason="stop", strategy="kvr", ttft_s=1.5,
        prefill_tokens_per_s=66.6, wait_s=0.25, decode_s=2.125, finished_at="2026-01-01T00:00:00.000+00:00",
    )  # fmt: skip
    return [
        replace(base, id="0001", answer="An id that looks like a number."),
        replace(base, id="bad.txt", status="error", error='the file "bad.txt" is not UTF-8,\nre-encode it', answer=""),
        replace(
            base,
            id="nasty",
            answer=NASTY,
            logprobs=(-0.5, -0.0, -1e-9),
            top_tokens=(1, 5, 2, 7, 3, 1),
            top_logprobs=(-0.5, -2.0, -0.0, -9.5, -1e-9, -3.0),
            token_texts='{"1": "F", "2": "\\ufffd"}',
        ),  # fmt: skip
        replace(base, id="sub/dir/plain.md", answer="Short."),
        replace(base, id="z [bold]ü[/bold] 漢.txt", answer="[red]brackets[/red] [/b]", parts=2),
    ]


def write_run(folder: Path, records: Sequence[Record], layers: Sequence[KeysValues | None] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = new_writer(folder, header=SHOWN)
    for record in records:
        writer.write(record, layers if record.status == "done" else ())
    writer.close()
    return folder


def exported(path: Path, kind: str) -> bytes:
    stream = io.BytesIO()
    write_export(open_results(path), kind, stream)
    return stream.getvalue()
