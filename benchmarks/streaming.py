"""Prompts through a rolling cache against chunks with a whole one, in turn; and the memory of short and long ones.

    python -m benchmarks streaming --tokens 4096 --memory-tokens 10000 100000

The model has windows of as many tokens as the cache holds, so that both compute the same: the first token's speed is
compared with that of `chunk_tokens` as long as a step. Memory is the most that a process of its own has held, as the
system tells it, for each of the lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers as tf

from benchmarks.options import make_parser
from benchmarks.pairs import Patience, measure_pairs, ratio_of
from kvr_mpi.kv.rolling import Rolling
from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.streaming import prefill_rolling
from kvr_mpi.transport.local import LocalTransport

# What is to be reached: of the tokens/s of a whole cache, and over the memory of the shortest prompt.
LEAST_SPEED, MOST_GROWTH = 0.85, 0.02
# Of SmolLM2-135M, with fewer layers: what is measured is the same in each.
SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def windowed_model(window: int, layers: int) -> LoadedModel:
    """Build a random model whose layers see a window."""
    config = tf.MistralConfig(
        **SIZES, num_hidden_layers=layers, sliding_window=window, max_position_embeddings=1 << 20, torch_dtype="float32"
    )
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    prepare_model(model, chain=True)
    shape = probe_shape(config, torch.float32)
    return LoadedModel(model, None, shape, "random", "", torch.float32, torch.device("cpu"))


def most_bytes(tokens: int, arguments: list[str]) -> int:
    """Most memory of a process that prefills one prompt."""
    program = [sys.executable, "-m", "benchmarks", "streaming", *arguments, "--only-memory-of", str(tokens)]
    return int(subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()[-1])


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("streaming", __doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--cache", type=int, default=448, help="old tokens that are held")
    parser.add_argument("--step", type=int, default=64, help="new tokens of a step, and of a chunk")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--memory-tokens", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--only-memory-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", help="file for the figures")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    loaded, rolling = windowed_model(given.cache + 1, given.layers), Rolling(given.cache, given.step)
    if given.only_memory_of is not None:
        prefill_rolling(loaded, loaded.shape.sample_ids(given.only_memory_of), rolling)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    ids, partition = loaded.shape.sample_ids(given.tokens), Partition((0, given.tokens))

    def rolled() -> float:
        return prefill_rolling(loaded, ids, rolling).seconds

    def chunked() -> float:
        return prefill_kvr(loaded, ids, partition, LocalTransport(), chunk_tokens=given.step).seconds

    ways = {"rolled": rolled, "chunked": chunked}
    rolled(), chunked()  # the first touch of memory
    found = measure_pairs(
        LocalTransport(), "rolled", ["chunked"], lambda way: ways[way](), float, Patience(given.pairs)
    )
    pairs = [(held, whole) for whole, held in found["chunked"]]
    speed = ratio_of([whole / held for held, whole in pairs])
    reached = "within" if speed.low >= LEAST_SPEED else "under" if speed.high < LEAST_SPEED else "not told from"
    print(
        f"{given.tokens} tokens, {given.cache} + {given.step} held: {speed.median:.3f} of the tokens/s of a whole "
        f"cache in chunks of {given.step} ({speed.low:.3f} to {speed.high:.3f}, {given.pairs} pairs), {reached} "
        f"{LEAST_SPEED}"
    )
    sizes = ["--cache", str(given.cache), "--step", str(given.step), "--layers", str(given.layers)]
    memory = {tokens: most_bytes(tokens, sizes) for tokens in given.memory_tokens}
    least = min(memory.values(), default=1)
    for tokens, size in memory.items():
        flat = "within" if size <= (1 + MOST_GROWTH) * least else "over"
        print(
            f"{tokens} tokens: {size / 1e6:.0f} MB at most, {100 * (size / least - 1):.1f}% over the least, "
            f"{flat} {100 * MOST_GROWTH:g}%"
        )
    if given.json:
        figures = {"tokens": given.tokens, "cache": given.cache, "step": given.step, "layers": given.layers}
        Path(given.json).write_text(json.dumps({**figures, "pairs_s": pairs, "memory_bytes": memory}, indent=1))
