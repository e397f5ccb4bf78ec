"""Steps for one GPU: captured steps of decoding, FlexAttention, and parts of many segments."""

from __future__ import annotations

import functools
from typing import Any

import torch
from gpu_correctness import ALLOWED, SMALL
from gpu_machine import random_model
from gpu_steps import Absent, Figures, Given

from kvr_mpi.decode.graphs import StepGraphs, why_not_captured
from kvr_mpi.kv import attention
from kvr_mpi.kv.attention import AttentionParams, PartialAttention, attend, attend_window, why_no_flex
from kvr_mpi.kv.flex import suits_flex
from kvr_mpi.kv.packed_row import PackedCache
from kvr_mpi.kv.paged import PagedArena
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.packed import decode_packed, prefill_packed
from kvr_mpi.prefill.self_check import allowed_error, error_share

GPU = torch.device("cuda", 0)
LENGTHS = (700, 64, 1500, 300, 90)
STEPS, PARTS = 24, 8


def _arena(loaded: Any, pages: int) -> PagedArena:
    return PagedArena(loaded.shape.layers, loaded.dtype, GPU, extent_pages=pages, has_scrap=True)


@torch.inference_mode()
def graphs_are_exact(given: Given) -> Figures:
    """Logits of captured steps against those of steps as they are, while documents leave: in one extent, in several."""
    loaded = random_model(GPU, **SMALL)
    prepare_model(loaded.model, chain=True)
    why = why_not_captured(loaded, _arena(loaded, 2))
    assert why is None, why
    found: Figures = {}
    for pages in (64, 8):
        told: list[str] = []
        graphs, worst = StepGraphs(loaded, told.append, patience=1), 0.0
        prompts = [loaded.shape.sample_ids(length, 7, 3) for length in LENGTHS]
        mine, alone = (
            [each.cache for each in prefill_packed(loaded, prompts, reserve_tokens=STEPS, arena=arena)]
            for arena in (_arena(loaded, pages), None)
        )
        for at in range(STEPS):
            if at in (8, 16):
                mine, alone = mine[1:], alone[1:]
            tokens = [(11 * at + place) % 1000 for place in range(len(mine))]
            ones = [1] * len(mine)
            eager = functools.partial(decode_packed, loaded, PackedCache(mine, ones), tokens)
            logits = graphs.step(mine, tokens, eager)
            truth = decode_packed(loaded, PackedCache(alone, ones), tokens)
            worst = max(worst, error_share(logits, truth))
        assert not told, told
        assert graphs.replayed >= STEPS // 2, graphs.replayed
        assert worst <= allowed_error(loaded.dtype), worst
        found |= {
            f"captured, {pages} pages": graphs.captured,
            f"replayed, {pages} pages": graphs.replayed,
            f"worst error, {pages} pages": worst,
        }
    return found


def bent_scores_are_exact(given: Given) -> Figures:
    """FlexAttention, compiled, against the portable way: soft caps, wide heads, windows."""
    draw, found = torch.Generator(GPU).manual_seed(0), dict[str, Any]()
    for softcap, dim in ((50.0, 128), (50.0, 256), (None, 512), (20.0, 64)):
        query = torch.randn(1, 8, 1000, dim, generator=draw, device=GPU, dtype=torch.bfloat16)
        keys, values = torch.randn(2, 1, 4, 3000, dim, generator=draw, device=GPU, dtype=torch.bfloat16)
        params, name = AttentionParams(dim**-0.5, softcap), f"soft cap {softcap}, head_dim {dim}"
        if not suits_flex(query, values):
            raise Absent("no compiler of kernels (triton) for this GPU")
        why = why_no_flex(GPU, query.dtype, 8, 4, (dim, dim), softcap)
        found[name] = why or "flex"
        for part, how in (
            (attend(query, keys, values, params), {"offset": None, "window": None}),
            (attend_window(query, keys, values, params, 256), {"offset": 2000, "window": 256}),
        ):
            truth = attention._attend_blocks(query, keys, values, params, **how)
            error = float((part.out.float() - truth.out).abs().max() / truth.out.abs().max())
            assert error <= ALLOWED[torch.bfloat16], f"{name}: {error:.1e}"
            found[f"{name}, worst error"] = max(error, found.get(f"{name}, worst error", 0.0))
    return found


def parts_lose_little(given: Given) -> Figures:
    """Eight parts in bfloat16, merged in float32, against one pass, both against float64."""
    draw, params = torch.Generator(GPU).manual_seed(0), AttentionParams(128**-0.5)
    query = torch.randn(1, 8, 512, 128, generator=draw, device=GPU, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 1, 2, 4096, 128, generator=draw, device=GPU, dtype=torch.bfloat16)
    wide = [each.double().repeat_interleave(4, 1) for each in (keys, values)]
    truth = (query.double() @ wide[0].transpose(-1, -2) * params.scale).softmax(-1) @ wide[1]
    cuts = [slice(at, at + 4096 // PARTS) for at in range(0, 4096, 4096 // PARTS)]
    parts = [attend(query, keys[:, :, cut], values[:, :, cut], params) for cut in cuts]
    assert all(part.out.dtype == torch.bfloat16 and part.lse.dtype == torch.float32 for part in parts)
    whole, merged = attend(query, keys, values, params), functools.reduce(PartialAttention.merge, parts)
    errors = [float((part.out.double() - truth).abs().max()) for part in (whole, merged)]
    assert errors[1] <= 2 * errors[0], errors
    return {"error of one pass": errors[0], f"error of {PARTS} parts": errors[1]}
