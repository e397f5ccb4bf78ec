"""Gather the shares of an array: time of putting them into one file, verified, beside that of copying their bytes.

Usage: bench_gather.py [SHARES [DOCUMENTS [KV_TOKENS]]]

Every share has DOCUMENTS documents of 2 kB answers, with keys and values of KV_TOKENS tokens (default: none).
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from kvr_mpi.documents import Corpus, CorpusFile, Entry
from kvr_mpi.store.lock import this_process
from kvr_mpi.store.outputs import Header, Record
from kvr_mpi.store.run import open_run
from kvr_mpi.store.shards import ShardWriter
from kvr_mpi.store.stored_kv import CachedTokens

HEADER = Header({"model": "0123abcd"}, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "bfloat16"})
LAYERS, HEADS, HEAD_DIM = 32, 8, 128

shares, documents, kv_tokens = (int(word) for word in [*sys.argv[1:], *("100", "100", "0")[len(sys.argv) - 1 :]])
names = [f"doc-{number:07d}" for number in range(shares * documents)]
corpus = Corpus(
    (CorpusFile("rows.jsonl", "rows.jsonl", 1000, 5),), tuple(Entry(name, 9, f"{name:0>64}", 0, 0) for name in names)
)
layer = torch.randn(kv_tokens, HEADS, HEAD_DIM).bfloat16()
with tempfile.TemporaryDirectory(dir=".") as made:
    folder = Path(made)
    for number in range(shares):
        share, path = slice(number, None, shares), folder / f"share-{number}-of-{shares}"
        run = open_run(path, HEADER, corpus, share=share, owner=this_process())
        writer = ShardWriter(path, "0000", HEADER)
        for name in names[share]:
            kv = [(layer, layer)] * LAYERS if kv_tokens else ()
            tokens = CachedTokens(tuple(range(kv_tokens)), (1, kv_tokens)) if kv_tokens else None
            writer.write(Record(name, "done", answer=f"{name} " * 180, token_ids=tuple(range(500))), kv, tokens)
        writer.close()
        run.close()
    files = list(folder.glob("share-*/*"))
    size = sum(file.stat().st_size for file in files)
    began = time.perf_counter()
    (folder / "copies").mkdir()
    for place, file in enumerate(files):
        shutil.copyfile(file, folder / "copies" / str(place))
    copy_s = time.perf_counter() - began
    shutil.rmtree(folder / "copies")
    began = time.perf_counter()
    command = [Path(sys.executable).parent / "kvr", "merge", *sorted(folder.glob("share-*")), "--shares", str(shares)]
    subprocess.run([*command, "-o", folder / "all.h5"], check=True)
    merge_s = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(
    f"{shares} shares, {len(names)} documents, {size / 1e6:.0f} MB: gathered and verified in {merge_s:.1f} s "
    f"({used.ru_utime + used.ru_stime:.1f} s of a core), copied in {copy_s:.1f} s"
)
