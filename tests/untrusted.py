"""Result files that come from anywhere: a good one to damage, all that can be read of it, and what may come of that.

Never a traceback, another file's data, code that runs, a process that hangs, or a wrong answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from made_runs import new_writer

from kvr_mpi.errors import EXIT_BAD_DATA
from kvr_mpi.store.log import Header
from kvr_mpi.store.pieces import piece_id
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.stored_kv import CachedTokens
from kvr_mpi.store.volumes import key_of

IDENTITY: dict[str, Any] = {"model": "0123abcd", "kv": True}
HEADER = Header(IDENTITY, {"name": "tiny", "architecture": "LlamaForCausalLM", "dtype": "float32"})
SECRET = "top-secret-words"
TOKENS = CachedTokens((7, 8, 9, 5), (1, 3))


def good_record(name: str) -> Record:
    return Record(
        name, "done", answer=f"about {name}", token_ids=(5, 6), slices=(0, 2, 4), prompt_tokens=4, ttft_s=0.5,
        logprobs=(-0.5, -1.5), top_tokens=(5, 9), top_logprobs=(-0.5, -0.25),
        token_texts='{"5": "a"}', scores='[{"text": "a"}]', samples="[]", cache="rolling", text_tokens=2,
        kernels="CPU",
    )  # fmt: skip


def kv_of(name: str) -> str:
    """Path of a document's keys and values in the file."""
    return f"kv/{key_of(piece_id(good_record(name), TOKENS))}"


def write_good(folder: Path) -> Path:
    """Write the file that everything here is a damaged copy of."""
    folder.mkdir(exist_ok=True)
    writer = new_writer(folder, header=HEADER)
    layer = torch.arange(16.0).reshape(4, 1, 4)
    for name in ("a", "b"):
        writer.write(good_record(name), [(layer, -layer), (layer.half(), layer.half())], TOKENS)
    writer.close()
    return merge_run(folder)


def read_everything(path: Path) -> list[Record]:
    """Read all that the package can read of a file."""
    results = open_results(path, verify=False)
    records = list(results)
    for record in records:
        with results.open(record.id) as (_, kv):
            for layer in kv.layers:
                kv.read(layer)
    return records


def assert_bad_data(outcome: tuple[int, str, str], path: Path) -> None:
    code, out, err = outcome
    assert code == EXIT_BAD_DATA
    assert "Traceback" not in err and SECRET not in out + err
    assert len(err.splitlines()) == 1 and err.startswith("Error: ") and path.name in err
