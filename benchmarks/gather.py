"""Gather the shares of an array: time of putting them into one file, verified, beside that of copying their bytes.

Every share has some documents with answers of 2 kB, and with keys and values of some tokens (default: none).
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.options import make_parser
from kvr_mpi.documents import CorpusPart
from kvr_mpi.documents.corpus import corpus_of
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.lock import Lock, this_process
from kvr_mpi.store.log import Header
from kvr_mpi.store.record import Record
from kvr_mpi.store.run import open_run
from kvr_mpi.store.writer import ResultWriter

HEADER = Header({"model": "0123abcd"}, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "bfloat16"})
LAYERS, HEADS, HEAD_DIM = 32, 8, 128


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("gather", __doc__)
    parser.add_argument("shares", nargs="?", type=int, default=100)
    parser.add_argument("documents", nargs="?", type=int, default=100, help="of each share")
    parser.add_argument("kv_tokens", nargs="?", type=int, default=0, help="of each document")
    given = parser.parse_args(arguments)
    shares, documents, kv_tokens = given.shares, given.documents, given.kv_tokens
    names = [f"doc-{number:07d}" for number in range(shares * documents)]
    layer = torch.randn(kv_tokens, HEADS, HEAD_DIM).bfloat16()
    with tempfile.TemporaryDirectory(dir=".") as made:
        folder = Path(made)
        for number in range(shares):
            share, path = slice(number, None, shares), folder / f"share-{number}-of-{shares}"
            path.mkdir()
            lock = Lock(path, this_process())
            hashes = [f"{name.removeprefix('doc-'):0>64}" for name in names[share]]
            corpus = corpus_of(names[share], [9] * len(hashes), hashes)
            open_run(path, HEADER, replace(corpus, part=CorpusPart(number, shares), cut="benchmark"), lock)
            writer = ResultWriter(path, 0, HEADER)
            for name in names[share]:
                kv = [(layer, layer)] * LAYERS if kv_tokens else ()
                tokens = CachedTokens(tuple(range(kv_tokens)), (1, kv_tokens)) if kv_tokens else None
                writer.write(Record(name, "done", answer=f"{name} " * 180, token_ids=tuple(range(500))), kv, tokens)
            writer.close()
            lock.release()
        files = list(folder.glob("share-*/*"))
        size = sum(file.stat().st_size for file in files)
        began = time.perf_counter()
        (folder / "copies").mkdir()
        for place, file in enumerate(files):
            shutil.copyfile(file, folder / "copies" / str(place))
        copy_s = time.perf_counter() - began
        shutil.rmtree(folder / "copies")
        began = time.perf_counter()
        command: list[str | Path] = [Path(sys.executable).parent / "kvr", "merge", *sorted(folder.glob("share-*"))]
        subprocess.run([*command, "--shares", str(shares), "-o", folder / "all.h5"], check=True)
        merge_s = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{shares} shares, {len(names)} documents, {size / 1e6:.0f} MB: gathered and verified in {merge_s:.1f} s "
        f"({used.ru_utime + used.ru_stime:.1f} s of a core), copied in {copy_s:.1f} s"
    )
