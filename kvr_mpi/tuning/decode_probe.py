"""Measure what a step of decoding takes, each rank its own documents or all ranks some heads of all of them.

What the rates of a prefill say of it is too little: a few rows are multiplied much slower than many, and sums wait for
whoever is late. Documents are short here: what they attend to is computed (``costs.decoding``). All ranks of a chain
measure at once, as they will work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.head_parallel import HeadParallelBatch, Place, Prefilled
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.one_prompt import Prefill, wait_for_compute
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.transport import Transport, gather_json, share_json

PROBE_TOKENS = 16
# Steps that are timed, after one that is not.
STEPS = 5
# More documents of a rank are timed as so many.
MOST_DOCUMENTS = 16


def measure_decoding(loaded: LoadedModel, chain: Transport, documents: int, place: Place) -> tuple[float, float]:
    """Time a step in either way; every rank of the chain calls this.

    Parameters
    ----------
    documents : int
        Of the chain.
    place : callable
        As for `HeadParallelBatch`.

    Returns
    -------
    (float, float)
        Seconds of the slowest rank, the middle of some steps: each rank its own documents, and shared heads.
    """
    shares = len(range(chain.rank, documents, chain.size))
    greedy = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    options: dict[str, Any] = {"stop": (), "max_new_tokens": STEPS + 3}
    ids = loaded.shape.sample_ids(PROBE_TOKENS, 7, 1)

    def prefills() -> list[Prefill]:
        own = min(shares, MOST_DOCUMENTS)
        return prefill_packed(loaded, [ids] * own, reserve_tokens=STEPS + 3) if own else []

    apart: DecodeBatch[int] = DecodeBatch(loaded, greedy, why_alone=None, **options)
    for number, prefill in enumerate(prefills()):
        apart.add(number, prefill, ids, 0)
    apart_s = _step_seconds(chain, apart.step, loaded.device)
    del apart
    shared: HeadParallelBatch[int] = HeadParallelBatch(loaded, chain, greedy, place=place, **options)
    shared.add([Prefilled(number, prefill, ids) for number, prefill in enumerate(prefills())])
    return apart_s, _step_seconds(chain, shared.step, loaded.device)


def _step_seconds(chain: Transport, step: Callable[[], object], device: torch.device) -> float:
    """Time steps that all ranks begin together: of each that of the slowest, and of these the middle one."""
    times = []
    for _ in range(STEPS + 1):
        chain.barrier()
        began = time.perf_counter()
        step()
        wait_for_compute(device)
        times.append(time.perf_counter() - began)
    everyone = share_json(chain, gather_json(chain, times[1:]))
    return float(median(max(ranks) for ranks in zip(*everyone, strict=True)))
