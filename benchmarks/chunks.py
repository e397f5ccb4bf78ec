"""Prefill a prompt at once and in chunks, in turn; print the ratio of the pairs, and the activations of both.

    mpirun -n 1 python -m benchmarks chunks --tokens 4096 --chunks 512

With more ranks it says how far behind a chain in chunks falls: about a layer of each rank but the first. On hosts with
slow links between them (`slow_chunks`) it says what is gained where segments leave earlier.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.options import make_parser
from benchmarks.pairs import Patience, measure_pairs, ratio_of
from kvr_mpi.cli.environment import read_environment
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.errors import counted
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import footprint_of
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.runtime.loading import load_on_all
from kvr_mpi.transport import gather_json, share_json
from kvr_mpi.transport.mpi import connect

# What is to be reached on one rank: of the time at once, and of its activations.
MOST_TIME, MOST_ACTIVATIONS = 1.03, 0.5


def verdict(low: float, high: float, most: float) -> str:
    """Say whether a share is within what it is to be, or that its interval does not tell."""
    return f"within {most:g}" if high <= most else f"over {most:g}" if low > most else f"not told from {most:g}"


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("chunks", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--kernels", default="measured", help="as model.kernels")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--most-time", type=float, default=MOST_TIME, help="to be reached, of the time at once")
    parser.add_argument("--json", help="file for the figures")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    world = connect()
    cache_dir = read_environment().cache_dir
    loaded = load_on_all(
        world,
        given.model,
        dtype="float32",
        device="cpu",
        offline=True,
        cache_dir=cache_dir,
        kernels=given.kernels,
    )
    prepare_model(loaded.model, chain=True)
    ids, partition = loaded.shape.sample_ids(given.tokens), Partition.even(given.tokens, world.size)

    def seconds(chunk_tokens: int | None) -> float:
        world.barrier()
        prefill = prefill_kvr(loaded, ids, partition, world, chunk_tokens=chunk_tokens)
        return float(max(share_json(world, gather_json(world, prefill.seconds))))

    ways = {"plain": None, "tried": given.chunks}
    for chunk_tokens in ways.values():
        seconds(chunk_tokens)  # the first touch of memory
    found = measure_pairs(world, "plain", ["tried"], lambda way: seconds(ways[way]), float, Patience(given.pairs))
    pairs = [(whole, chunked) for chunked, whole in found["tried"]]
    if world.rank:
        return
    footprint = footprint_of(loaded.model.config, loaded.dtype)
    longest = max(partition.lengths)
    sizes_bytes = [footprint.activation_bytes(longest, each) / footprint.heap_share for each in (None, given.chunks)]
    ratio, share = ratio_of([chunked / whole for whole, chunked in pairs]), sizes_bytes[1] / sizes_bytes[0]
    print(
        f"{given.tokens} tokens on {counted(world.size, 'rank')}, chunks of {given.chunks}: "
        f"{ratio.median:.3f} of the time at once ({ratio.low:.3f} to {ratio.high:.3f}, {given.pairs} pairs), "
        f"{verdict(ratio.low, ratio.high, given.most_time)}; "
        f"activations of a layer {sizes_bytes[1] / 1e6:.1f} MB instead of "
        f"{sizes_bytes[0] / 1e6:.1f} MB at once (counted), {verdict(share, share, MOST_ACTIVATIONS)}"
    )
    if given.json:
        figures = {
            "tokens": given.tokens,
            "ranks": world.size,
            "chunk_tokens": given.chunks,
            "pairs_s": pairs,
        }
        figures |= {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "most": given.most_time}
        Path(given.json).write_text(json.dumps({**figures, "activation_bytes": sizes_bytes}, indent=1))
