"""Small runs for the tests of the store: records, shards, and a corpus that goes with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from kvr_mpi.documents import Corpus, CorpusFile, Entry
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.lock import this_process
from kvr_mpi.store.outputs import Header, Record
from kvr_mpi.store.run import Run, open_run
from kvr_mpi.store.shards import ShardWriter
from kvr_mpi.store.stored_kv import CachedTokens

IDENTITY: dict[str, Any] = {"model": "0123abcd", "generation": {"max_new_tokens": 96}, "kv": False}
HEADER = Header(IDENTITY, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "float32"})
STAMP = "2026-01-01T00:00:00.000+00:00"
NAMES = [*"abcdef", "dir/c", "..", "x/y.txt", "é"]


def record(name: str, status: str = "done", answer: str = "") -> Record:
    error = "it went wrong" if status == "error" else ""
    return Record(name, status, error=error, answer=answer or f"about {name}", token_ids=(1, 2), finished_at=STAMP)


def write(folder: Path, name: str, records: Iterable[Record], *, kv: bool = False, header: Header = HEADER) -> None:
    """Write one shard."""
    writer = ShardWriter(folder, name, header)
    for number, each in enumerate(records):
        layer = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(number))
        layers = [(layer, -layer), None, (layer.half(), layer.half())] if kv else ()
        writer.write(each, layers, CachedTokens((7, 8, 9, 5), (1, 3)) if kv else None)
    writer.close()


def corpus_of(names: Iterable[str], **texts: str) -> Corpus:
    """A corpus that was listed, of texts that are nowhere."""
    entries = []
    for name in names:
        text = texts.get(name, f"text of {name}")
        entries.append(Entry(name, len(text), hashlib.sha256(text.encode()).hexdigest(), 0, 0))
    return Corpus((CorpusFile("rows.jsonl", "rows.jsonl", 1000, 5),), tuple(entries))


def take(folder: Path, say: Callable[[str], None] = print, **options: Any) -> Run:
    """Resume a run, or do as `options` say."""
    given: dict[str, Any] = {"mode": "resume", **options}
    header, corpus = given.pop("header", HEADER), given.pop("corpus", corpus_of(NAMES))
    return open_run(folder, header, corpus, owner=this_process(), say=say, **given)


def resume(folder: Path, **options: Any) -> tuple[set[str], set[str], list[str]]:
    """Resume and end at once: what is done, what failed, and what was said."""
    said: list[str] = []
    run = take(folder, said.append, **options)
    run.close()
    return run.done, run.failed, said


def result_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith((".h5", ".part")))


def stored_layers(group: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of a document's group, by layer."""
    return {layer.number: layer.read() for layer in open_kv(group).layers}
