"""Steps for one GPU: FlexAttention, ragged heads, rolling caches."""

from __future__ import annotations

from typing import Any

import torch
from gpu_correctness import ALLOWED, SMALL, error_of, truth_of
from gpu_machine import random_model
from gpu_steps import Absent, Figures, Given

from benchmarks.kept import keep_only
from kvr_mpi.kv.attention import attend, why_no_flex
from kvr_mpi.kv.flex import suits_flex
from kvr_mpi.kv.pool import PAGE_ROWS, Pool
from kvr_mpi.kv.rolling import Rolling
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.attention_hook import AttentionParams, prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import allowed_error, error_share
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.packed import decode_packed, prefill_packed
from kvr_mpi.prefill.streaming import prefill_rolling
from kvr_mpi.transport.local import LocalTransport

LENGTHS = (700, 64, 1500, 300, 90)
STEPS = 24


def _prompts(given: Given, loaded: LoadedModel) -> list[list[int]]:
    return [loaded.shape.sample_ids(length // (8 if given.is_small else 1), 7, 3) for length in LENGTHS]


def bent_scores_are_exact(given: Given) -> Figures:
    """FlexAttention, compiled, against float64: soft caps, wide heads, windows."""
    device = torch.device(given.device)
    draw, found = torch.Generator(device).manual_seed(0), dict[str, Any]()
    queries, length = (200, 500) if given.is_small else (1000, 3000)
    for softcap, dim in ((50.0, 128), (50.0, 256), (None, 512), (20.0, 64)):
        query = torch.randn(1, 8, queries, dim, generator=draw, device=device, dtype=torch.bfloat16)
        keys, values = torch.randn(2, 1, 4, length, dim, generator=draw, device=device, dtype=torch.bfloat16)
        params, name = AttentionParams(dim**-0.5, softcap), f"soft cap {softcap}, head_dim {dim}"
        if not suits_flex(query, values):
            raise Absent("no compiler of kernels (triton) for this GPU")
        why = why_no_flex(device, query.dtype, 8, 4, (dim, dim), softcap)
        found[name] = "flex"
        assert why is None, f"{name}: FlexAttention is not used: {why}"
        before = length - queries
        for part, first, window in (
            (attend(query, keys, values, params), None, None),
            (attend(query, keys[:, :, before:], values[:, :, before:], params, causal=True), 0, None),
            (attend(query, keys, values, params, causal=True, window=256), before, 256),
        ):
            start = before if first == 0 else 0
            truth = truth_of(query, keys[:, :, start:], values[:, :, start:], params, first, window)
            error = error_of(part, truth)
            assert error <= ALLOWED[torch.bfloat16], f"{name}: {error:.1e}"
            found[f"{name}, worst error"] = max(error, found.get(f"{name}, worst error", 0.0))
    return found


@torch.inference_mode()
def ragged_heads_are_exact(given: Given) -> Figures:
    """Heads with tokens of their own, as compression leaves them: a layer against float64, a model against itself."""
    device, worst = torch.device(given.device), 0.0
    draw = torch.Generator(device).manual_seed(0)
    for dim, kept in ((64, (700, 31, 1500, 1500)), (128, (5, 9, 9, 2)), (256, (1, 1, 1, 1))):
        shape, origin = LayerShape(4, dim, dim), 2000
        params, like = AttentionParams(dim**-0.5), random_model(given, **SMALL)
        pool = Pool([shape], torch.bfloat16, device, 8 * PAGE_ROWS)
        sequence = SequenceKV(like, pool, origin + 3, shapes=[shape], length=origin)
        for span in sequence.reserve(0, kept):
            for rows in (span.keys, span.values):
                rows.copy_(torch.randn(rows.shape, generator=draw, device=device))
        row = Row([sequence])
        row.begin_on_device(torch.tensor(row.begin(), device=device))
        fresh = torch.randn(2, 1, 4, 1, dim, generator=draw, device=device, dtype=torch.bfloat16)
        row.layers[0].update(fresh[0], fresh[1])
        query = torch.randn(1, 16, 1, dim, generator=draw, device=device, dtype=torch.bfloat16)
        found = row.layers[0].attend(query, fresh[0], fresh[1], params)
        row.advance()
        for head in range(4):
            (pair,) = sequence.head_pieces(0, head)
            keys, values = (rows[None, None] for rows in pair)
            group = slice(4 * head, 4 * head + 4)
            out, _ = truth_of(query[:, group], keys, values, params, None, None)
            error = float((found[:, group].double() - out).abs().max() / out.abs().max())
            assert error <= ALLOWED[torch.bfloat16], f"head_dim {dim}, {kept[head]} tokens: {error:.1e}"
            worst = max(worst, error)
    loaded = random_model(given, **SMALL)
    prepare_model(loaded.model, chain=True)
    pool = Pool(loaded.shape.layers, loaded.dtype, device, 64 * PAGE_ROWS)
    mine, alone = (
        [each.cache for each in prefill_packed(loaded, _prompts(given, loaded), reserve_tokens=STEPS, pool=own)]
        for own in (pool, None)
    )
    for cache in mine:  # of heads that keep all their tokens nothing may change
        every = torch.arange(cache.length, device=device)
        keep_only(cache, [[every] * layer.num_kv_heads for layer in loaded.shape.layers], STEPS)
    ragged, whole, most = Row(mine), Row(alone), 0.0
    for at in range(STEPS):
        tokens = [(11 * at + place) % 500 for place in range(len(mine))]
        logits = (decode_packed(loaded, cache, tokens) for cache in (ragged, whole))
        most = max(most, error_share(*logits))
    assert most <= allowed_error(loaded.dtype), most
    return {"worst error of a layer": worst, "worst error of a model": most}


@torch.inference_mode()
def rolling_caches_are_exact(given: Given) -> Figures:
    """A model with windows by a rolling cache against a whole cache."""
    tokens, window = (300, 64) if given.is_small else (6000, 1024)
    loaded = random_model(given, kind="mistral", sliding_window=window, **SMALL)
    prepare_model(loaded.model, chain=True)
    ids, rolling = loaded.shape.sample_ids(tokens, 7, 3), Rolling(window, window // 4)
    truth = prefill_kvr(loaded, ids, Partition((0, tokens)), LocalTransport()).logits
    assert truth is not None
    error = error_share(prefill_rolling(loaded, ids, rolling).logits, truth)
    assert error <= allowed_error(loaded.dtype), f"{error:.1e}"
    return {"tokens": tokens, "tokens held": rolling.rows, "error": error}
