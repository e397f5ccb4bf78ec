"""Prefill a prompt of any length in constant memory: a few tokens per step, with a rolling cache.

Each prompt runs on one rank. This is exact if all layers have windows (or chunks) that fit into the cache; for other
models it is StreamingLLM's approximation, which a job has to ask for by name (`kv.rolling`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.pool import Pool
from kvr_mpi.kv.rolling import Rolling, check_rolling
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.layer_chunks import UnreadError
from kvr_mpi.model.rope import depends_on_length
from kvr_mpi.partition import cut_range
from kvr_mpi.prefill.exactness import Reference, Tensors
from kvr_mpi.prefill.one_prompt import Prefill, own_pool, prefill_alone, prefill_whole
from kvr_mpi.prefill.packed import run_row

# Tokens of the check before a job, and of each of its steps.
CHECKED_TOKENS, CHECKED_STEP = 12, 5
# Tokens and sinks of a cache that is small enough to drop tokens in this check.
CHECKED_CACHE, CHECKED_SINKS = 6, 2
# Length of a sequence whose memory does not grow.
NO_LIMIT = 1 << 62


def prefill_rolling(loaded: LoadedModel, ids: Sequence[int], rolling: Rolling, pool: Pool | None = None) -> Prefill:
    """Prefill a prompt on one rank; every step has the same shapes, except for a shorter last one.

    The model has to be prepared for chains (`prepare_model`). If memory runs out, the result has an error and no cache.

    Raises `ModelError` if a layer sees more than the cache holds, and there are no sinks.
    """
    check_rolling(loaded.shape, rolling, in_parts=loaded.attends_in_parts)
    found = prefill_alone(loaded, len(ids), lambda: _run_steps(loaded, ids, rolling, pool), rolling=rolling)
    if found.error is not None:
        found.error = (
            f"a prompt of {len(ids)} tokens: not enough memory for a {rolling.name} ({found.error}); lower "
            f"cache.tokens or parallel.chunk_tokens, or the memory for other prompts (parallel.memory_gib)"
        )
    return found


@torch.inference_mode()
def _run_steps(
    loaded: LoadedModel, ids: Sequence[int], rolling: Rolling, pool: Pool | None = None
) -> tuple[SequenceKV, torch.Tensor]:
    sequence, logits = SequenceKV(loaded, pool or own_pool(loaded), NO_LIMIT, rolling=rolling), torch.empty(0)
    try:
        for first, last in cut_range(0, len(ids), rolling.step_tokens):
            row = Row([sequence], [last - first], reads="all" if last == len(ids) else "nothing")
            with contextlib.suppress(UnreadError):
                logits = run_row(loaded, row, ids[first:last], keep=torch.tensor([last - first - 1]))[0]
            row.advance()
    except BaseException:
        sequence.release()
        raise
    return sequence, logits


def prove_rolling(loaded: LoadedModel, rolling: Rolling) -> None:
    """Check that a rolling cache holds what a model sees, and verify its logits on a few tokens.

    A rolling cache that holds all tokens has to give the logits of a whole cache. A rolling cache that drops tokens has
    to give the same logits in steps of one token as in steps of several.

    Raises `ModelError` if it does not, or the model does not support rolling caches.
    """
    check_rolling(loaded.shape, rolling, in_parts=loaded.attends_in_parts)
    name = loaded.shape.architecture
    if kinds := depends_on_length(loaded.model):
        raise ModelError(
            f"{name}: its rotary embedding ({kinds}) changes beyond some length, which needs all keys of the prompt "
            f"again, but a rolling cache has dropped some"
        )
    tokens = min(CHECKED_TOKENS, loaded.shape.max_tokens or CHECKED_TOKENS)
    whole = replace(rolling, cache_tokens=max(rolling.cache_tokens, tokens), step_tokens=CHECKED_STEP)
    drops = Rolling(CHECKED_CACHE, CHECKED_STEP, CHECKED_SINKS)
    names = "the logits of a rolling cache that holds all", f"the logits in steps of {CHECKED_STEP} instead of 1"

    def expected(ids: Sequence[int]) -> Tensors:
        one_by_one = _run_steps(loaded, ids, replace(drops, step_tokens=1))[1]
        logits = prefill_whole(loaded, ids).logits
        assert logits is not None, "of the only rank"
        return dict(zip(names, (logits.cpu(), one_by_one.cpu()), strict=True))

    def run(ids: Sequence[int]) -> Tensors:
        return dict(zip(names, (_run_steps(loaded, ids, tried)[1].cpu() for tried in (whole, drops)), strict=True))

    if why := Reference(loaded, tokens, expected).why_not(run, "the expected ones"):
        raise ModelError(f"{name} does not run a few tokens at a time: on {tokens} tokens {why}")
