"""Decode several documents together and one by one on one core, interleaved; print tokens a second and their ratio.

    taskset -c 0 python -m benchmarks decode
    taskset -c 0 python -m benchmarks decode --against pages    together, from pages: as GPUs do it
    taskset -c 0 python -m benchmarks decode --against torch    together, by torch's kernels alone

Caches are made up: how long a step takes does not depend on what is in them.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch
from transformers import GenerationConfig

from benchmarks.options import make_parser
from kvr_mpi.cli.environment import read_environment
from kvr_mpi.cli.log_lines import show_log
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.kv.pool import PAGE_ROWS, Pool, pages_for
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.logs import RankLogger
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.kernels import without_kernels
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, own_pool
from kvr_mpi.runtime.loading import load_on_all
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.tuning.kernels import choose_kernels


def make_prefill(loaded: LoadedModel, tokens: int, reserve_tokens: int, pool: Pool) -> Prefill:
    """Make a prompt's keys and values of noise, as if the prompt had been run."""
    sequence = SequenceKV(loaded, pool, tokens + reserve_tokens, length=tokens)
    for layer_idx, shape in enumerate(loaded.shape.layers):
        sizes = [(1, shape.num_kv_heads, tokens, dim) for dim in (shape.key_dim, shape.value_dim)]
        keys, values = map(torch.randn, sizes)
        sequence.admit(layer_idx, 0, keys, values)
    return Prefill(Partition((0, tokens)), sequence, torch.randn(loaded.shape.vocab_size), 0.0)


def make_batch(
    loaded: LoadedModel, documents: int, tokens: int, reserve_tokens: int, pool: Pool | None = None
) -> DecodeBatch:
    """Documents about to be answered, with an answer that does not end."""
    config = GenerationConfig(do_sample=False, eos_token_id=None)
    batch = DecodeBatch(loaded, config, stop=(), max_new_tokens=reserve_tokens)
    for document in range(documents):
        prefill = make_prefill(loaded, tokens, reserve_tokens, pool or own_pool(loaded))
        batch.add(str(document), prefill, [5] * tokens, document)
    return batch


def step_s(batch: DecodeBatch, steps: int) -> float:
    """Seconds a step takes."""
    began = time.perf_counter()
    for _ in range(steps):
        batch.step()
    return (time.perf_counter() - began) / steps


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("decode", __doc__)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--against", choices=["alone", "pages", "torch"], default="alone")
    parser.add_argument("--steps", type=int, default=4, help="of each kind in a round")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", help="file for the figures")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cache_dir = read_environment().cache_dir
    loaded = load_on_all(
        LocalTransport(), DEFAULT_MODEL, dtype="float32", device="cpu", offline=True, cache_dir=cache_dir
    )
    world, room = LocalTransport(), psutil.virtual_memory().available
    show_log()
    choose_kernels(loaded, world, room, cache_dir, RankLogger())
    prepare_model(loaded.model, chain=True)
    reserve = given.steps * (given.rounds + 1) + 2
    others, pool = 1 if given.against == "alone" else given.documents, None
    if given.against == "pages":
        room = given.documents * PAGE_ROWS * pages_for(given.tokens + reserve)
        pool = Pool(loaded.shape.layers, loaded.dtype, loaded.device, room)
    with torch.inference_mode():
        together = make_batch(loaded, given.documents, given.tokens, reserve)
        other = make_batch(loaded, others, given.tokens, reserve, pool)
    way = without_kernels if given.against == "torch" else nullcontext[Any]

    def in_turns() -> tuple[float, float]:
        ours = step_s(together, given.steps)
        with way(loaded.model):
            return ours, step_s(other, given.steps)

    in_turns()  # the first touch of memory
    rounds = [in_turns() for _ in range(given.rounds)]
    assert together.most_rows is None
    together_s, other_s = (statistics.median(each) for each in zip(*rounds, strict=True))
    ratio = statistics.median(given.documents / others * other_s / together_s for together_s, other_s in rounds)
    name = {"alone": "one by one", "pages": "together from pages", "torch": "by torch's kernels"}[given.against]
    figures: dict[str, Any] = {
        "documents": given.documents,
        "tokens": given.tokens,
        "against": given.against,
        "together_tokens_per_s": given.documents / together_s,
        f"{given.against}_tokens_per_s": others / other_s,
        "ratio": ratio,
        "rounds": rounds,
    }
    print(
        f"{given.documents} documents of {given.tokens} tokens, one core: together {1e3 * together_s:.1f} ms per step, "
        f"{figures['together_tokens_per_s']:.1f} tokens/s; {name} {1e3 * other_s:.1f} ms per step, "
        f"{others / other_s:.1f} tokens/s; ratio {ratio:.2f} (median of {given.rounds})"
    )
    if given.json:
        Path(given.json).write_text(json.dumps(figures, indent=1))
