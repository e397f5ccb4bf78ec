"""Merge a shard of some thousand documents, and print by how many bytes this process grew.

Usage: merge_growth.py FOLDER DOCUMENTS
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py

from kvr_mpi.store.ledger import LedgerWriter
from kvr_mpi.store.merge import merge_files
from kvr_mpi.store.outputs import Header, Record, start_file, write_record

HEADER = Header({"model": "0123abcd"}, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "float32"})


def rss_bytes() -> int:
    """Memory of this process that is no file's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


folder, names = Path(sys.argv[1]), [f"doc-{number:05d}" for number in range(int(sys.argv[2]))]
shard = folder / "shard-0001-0000-00000.h5"
with h5py.File(f"{shard}.part", "x", libver="v110", locking=False) as file:
    start_file(file, HEADER)
    for name in names:
        write_record(file, Record(name, "done", answer=f"about {name}", token_ids=(1, 2)))
LedgerWriter(folder, "0000").publish(shard, names, {}, {})
before = rss_bytes()
merge_files(folder)
print(rss_bytes() - before)
