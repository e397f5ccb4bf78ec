"""Measures decode steps, data-parallel and head-parallel.

The rates of a prefill do not predict decode steps: products of few rows are much less efficient, attention of one query
is memory-bound, and all-reduces wait for the slowest rank. Steps are timed with short documents. Attention to long
documents is timed separately, with random keys and values; ``costs.decoding`` combines both. All ranks of a chain
measure at the same time, as they will decode.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.group import Group
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.kernels import ATTENTION_SLOT
from kvr_mpi.prefill.one_prompt import own_pool, wait_for_compute
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.transport import Transport, gather_json, share_json

PROBE_TOKENS = 16
# Number of timed steps, after one warm-up step.
STEPS = 5
# A rank with more documents is timed with this many.
MOST_DOCUMENTS = 16
# Documents to attend to: the keys and values of all layers together exceed a processor's caches.
LONG_DOCUMENTS, LONG_TOKENS = 2, 1024
ATTENTION_REPEATS = 5


def measure_decoding(
    loaded: LoadedModel, chain: Transport, documents: int, make_group: Callable[[], Group]
) -> tuple[float, float]:
    """Measure a step of short documents in both modes; every rank of the chain calls this and gets the same result.

    make_group : makes the group of ranks that share heads.

    Returns the median seconds of the slowest rank: data-parallel and head-parallel.
    """
    shares = len(range(chain.rank, documents, chain.size))
    greedy = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    options: dict[str, Any] = {"stop": (), "max_new_tokens": STEPS + 3}
    ids = loaded.shape.sample_ids(PROBE_TOKENS, 7, 1)

    def time_step(group: Group | None) -> float:
        batch = DecodeBatch(loaded, greedy, group=group, **options)
        own = min(shares, MOST_DOCUMENTS)
        prefills = prefill_packed(loaded, [ids] * own, reserve_tokens=STEPS + 3) if own else []
        for number, prefill in enumerate(prefills):
            batch.add(number, prefill, ids, 0)
        batch.begin()
        return _step_seconds(chain, batch.step, loaded.device)

    return time_step(None), time_step(make_group())


@torch.inference_mode()
def attention_seconds(loaded: LoadedModel, sequences: Sequence[SequenceKV], ranks: Transport) -> list[float]:
    """Measure each layer's attention from one token per document, on every rank at once; return the minimum.

    loaded : the whole model, even if the sequences have only some of its heads.
    ranks : the ranks that start together.
    """
    row, kernel = Row(sequences), vars(loaded.model).get(ATTENTION_SLOT)
    group = loaded.model.config.get_text_config().num_attention_heads // loaded.shape.layers[0].num_kv_heads
    best = [math.inf] * len(row.layers)
    ranks.barrier()
    for repeat, (at, layer) in itertools.product(range(ATTENTION_REPEATS), enumerate(row.layers)):
        shape = layer.shape
        sizes = (1, shape.num_kv_heads * group, len(sequences), shape.key_dim)
        query = torch.randn(sizes, device=loaded.device).to(loaded.dtype)
        began = time.perf_counter()
        layer.attend(query, query, query, AttentionParams(shape.key_dim**-0.5, kernel=kernel))
        wait_for_compute(loaded.device)
        best[at] = min(best[at], time.perf_counter() - began) if repeat else math.inf
    return best


def kept_token_seconds(loaded: LoadedModel, chain: Transport) -> float:
    """Measure seconds of attention per token that all heads keep, in the mean layer, on the slowest rank.

    Attention to short documents is subtracted from that to long ones, which removes the overhead of the calls.
    """
    long, short = (
        sum(attention_seconds(loaded, [_made_up(loaded, tokens) for _ in range(LONG_DOCUMENTS)], chain))
        for tokens in (LONG_TOKENS, PROBE_TOKENS)
    )
    mine = max(0.0, long - short) / (LONG_DOCUMENTS * (LONG_TOKENS - PROBE_TOKENS))
    return float(max(share_json(chain, gather_json(chain, mine)))) / len(loaded.shape.layers)


@torch.inference_mode()
def _made_up(loaded: LoadedModel, tokens: int) -> SequenceKV:
    """Make a sequence with random contents, ready to decode its last token."""
    sequence = SequenceKV(loaded, own_pool(loaded), tokens, length=tokens - 1)
    for layer_idx, shape in enumerate(loaded.shape.layers):
        sizes = [(1, shape.num_kv_heads, tokens, dim) for dim in (shape.key_dim, shape.value_dim)]
        keys, values = (torch.randn(size, device=loaded.device).to(loaded.dtype) for size in sizes)
        sequence.admit(layer_idx, 0, keys, values)
    return sequence


def _step_seconds(chain: Transport, step: Callable[[], object], device: torch.device) -> float:
    """Time steps that all ranks start together; return the median over steps of the slowest rank's time."""
    times = []
    for _ in range(STEPS + 1):
        chain.barrier()
        began = time.perf_counter()
        step()
        wait_for_compute(device)
        times.append(time.perf_counter() - began)
    everyone = share_json(chain, gather_json(chain, times[1:]))
    return float(median(max(ranks) for ranks in zip(*everyone, strict=True)))
