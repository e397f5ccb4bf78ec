"""Merge a run of some thousand documents, and print by how many bytes this process grew.

Usage: merge_growth.py FOLDER DOCUMENTS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kvr_mpi.store.log import Header
from kvr_mpi.store.record import Record
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.writer import ResultWriter

HEADER = Header({"model": "0123abcd"}, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "float32"})


def rss_bytes() -> int:
    """Memory of this process that is no file's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


folder, layer = Path(sys.argv[1]), torch.ones(4, 1, 4)
writer = ResultWriter(folder, 0, HEADER, 1)
for number in range(int(sys.argv[2])):
    record = Record(f"doc-{number:05d}", "done", answer=f"about {number}", token_ids=(1, 2))
    writer.write(record, [(layer, layer)] if number % 2 else ())
writer.close()
before = rss_bytes()
merge_run(folder)
print(rss_bytes() - before)
