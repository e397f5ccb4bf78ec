"""Result files that come from anywhere: a good one to damage, all that can be read of it, and what may come of that.

Never a traceback, another file's data, code that runs, a process that hangs, or a wrong answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvr_mpi.errors import EXIT_BAD_DATA
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.outputs import Header, Record, document_groups, open_file, read_header, read_software
from kvr_mpi.store.results import open_results
from kvr_mpi.store.shards import ShardWriter
from kvr_mpi.store.stored_kv import CachedTokens

IDENTITY: dict[str, Any] = {"model": "0123abcd", "kv": True}
HEADER = Header(IDENTITY, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "float32"})
SECRET = "top-secret-words"


def write_good(folder: Path) -> Path:
    """Write the file that everything here is a damaged copy of."""
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, "0000", HEADER)
    layer = torch.arange(16.0).reshape(4, 1, 4)
    for name in ("a", "b"):
        record = Record(
            name, "done", answer=f"about {name}", token_ids=(5, 6), slices=(0, 2, 4), prompt_tokens=4, ttft_s=0.5,
            logprobs=(-0.5, -1.5), top_tokens=(5, 9), top_logprobs=(-0.5, -0.25),
            token_texts='{"5": "a"}', scores='[{"text": "a"}]', samples="[]", cache="rolling", text_tokens=2,
            kernels="CPU",
        )  # fmt: skip
        tokens = CachedTokens((7, 8, 9, 5), (1, 3))
        writer.write(record, [(layer, -layer), (layer.half(), layer.half())], tokens)
    writer.flush()
    return next(folder.glob("*.h5"))


def read_everything(path: Path) -> list[Record]:
    """Read all that the package can read of a file."""
    records = list(open_results(path))
    with open_file(path) as file:
        read_header(file)
        read_software(file)
        for group, _, _ in document_groups(file):
            for layer in open_kv(group).layers:
                layer.read()
    return records


def assert_bad_data(outcome: tuple[int, str, str], path: Path) -> None:
    code, out, err = outcome
    assert code == EXIT_BAD_DATA
    assert "Traceback" not in err and SECRET not in out + err
    assert len(err.splitlines()) == 1 and err.startswith("Error: ") and path.name in err
