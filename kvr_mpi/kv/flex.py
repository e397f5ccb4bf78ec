"""FlexAttention on GPUs, for scores with soft caps or biases and for heads wider than flash attention supports.

torch compiles it for a score modification and a block mask (Dong et al., 2024); it returns the log-sum-exp, too.
Uncompiled it also runs on CPUs, but computes all scores at once: use that only in tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._triton import has_triton

# Queries and keys of a block, which is computed or skipped as a whole.
BLOCK = 128
# Narrowest heads that tl.dot supports.
LEAST_HEAD_DIM = 16
# Not the kernel for few queries, which requires a power of two as the number of heads in a group.
KERNEL = {"BACKEND": "TRITON"}
# Bytes of shared memory that torch's default blocks need for heads of up to 256, compiled for Ampere and Hopper, and
# that blocks of 64 need for heads of up to 512 (torch's default blocks would need 262,144).
OWN_BYTES, WIDE_BYTES = 151_552, 139_264

# Limit of compiled variants (heads, mask, soft cap); torch's default of 8 is enough for two models only.
KINDS = 64

Bend = Callable[..., torch.Tensor]


class NotCompiledError(Exception):
    """torch could not compile FlexAttention for this layer, or has reached its limit of compiled variants."""


def suits_flex(query: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether FlexAttention may be faster than the portable code: on a GPU, with a compiler, for many queries.

    float32 and few queries use matrix products instead: torch would compile another variant for a mask of one block.
    """
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or query.shape[2] <= BLOCK:
        return False
    return min(query.shape[-1], values.shape[-1]) >= LEAST_HEAD_DIM and compiles(query.device)


@functools.cache
def compiles(device: torch.device) -> bool:
    """Whether torch can compile kernels for this GPU (Ampere or newer; AMD's have other numbers, all above)."""
    return has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


def attend_flex(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    offset: int | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from (1, heads, queries, head_dim) to (1, kv_heads, keys, head_dim).

    softcap : scores are soft-capped to this magnitude (tanh).
    offset : query i is aligned with key ``offset + i`` and sees no later key; None: every query sees every key.
    window : with an offset: see only the last `window` keys.

    Returns the output (1, heads, queries, value_dim) in the query's dtype, and the log-sum-exp (1, heads, queries),
    float32.
    Raises `NotCompiledError` if torch fails to compile this variant, or has reached its limit of variants.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    device = query.device
    out, aux = _function(device.type)(
        query,
        keys,
        values,
        score_mod=None if softcap is None else _bend(softcap, device),
        block_mask=None if offset is None else visible_blocks(query.shape[2], keys.shape[2], offset, window, device),
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
        return_aux=AuxRequest(lse=True),
        kernel_options=_options(device, max(query.shape[-1], values.shape[-1])),
    )
    return out, aux.lse


@functools.cache
def _function(device_type: str) -> Any:
    """Return FlexAttention, compiled for dynamic lengths on a GPU; uncompiled, it would hold all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return _compiled(flex_attention) if device_type == "cuda" else flex_attention


@functools.cache
def _options(device: torch.device, head_dim: int) -> dict[str, Any]:
    """Choose block sizes that fit into a multiprocessor's shared memory: torch's defaults, or smaller ones."""
    if device.type != "cuda" or head_dim <= 64:
        return KERNEL
    about: Any = torch.cuda.get_device_properties(device)
    # torch on ROCm has no such property: there, a block may have all of it.
    room = getattr(about, "shared_memory_per_block_optin", None) or about.shared_memory_per_block
    if head_dim <= 256 and room >= OWN_BYTES:
        return KERNEL
    side = 32 if head_dim > 256 and room < WIDE_BYTES else 64  # 101,376 bytes on graphics cards
    return KERNEL | {"BLOCK_M": side, "BLOCK_N": side, "num_stages": 1}


def _compiled(function: Any, backend: Any = "inductor") -> Any:
    import torch._dynamo.config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    compiled: Any = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
    compiled = torch._dynamo.config.patch(recompile_limit=KINDS)(compiled)
    refused: set[Any] = set()  # variants that failed: each new try takes seconds, in every layer

    def run(*given: Any, **how: Any) -> Any:
        kind = *((each.shape[1::2], each.dtype) for each in given), *(name for name in how if how[name] is None)
        if kind in refused:
            raise NotCompiledError
        try:
            return compiled(*given, **how)
        except FailOnRecompileLimitHit as error:
            raise NotCompiledError(str(error)) from error
        except TorchDynamoException as error:
            refused.add(kind)
            raise NotCompiledError(str(error)) from error

    return run


@functools.cache
def _bend(softcap: float, device: torch.device) -> Bend:
    """Make the score modification; its parameter is a tensor, since compiled code specialises on Python numbers."""
    most = torch.full((), softcap, device=device)

    def bend(score: torch.Tensor, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return torch.tanh(score / most) * most

    return bend


@functools.lru_cache(maxsize=8)
def visible_blocks(queries: int, keys: int, offset: int, window: int | None, device: torch.device) -> Any:
    """Return which blocks of keys each block of queries sees, fully or partly, without a mask of queries x keys.

    The `BlockMask` is for one batch and head. All layers of a prompt use the same one, so the last few are cached.
    """
    from torch.nn.attention.flex_attention import BlockMask

    last = torch.arange(offset, offset + queries, device=device)  # last key that each query sees
    first = torch.zeros_like(last) if window is None else (last - (window - 1)).clamp(min=0)

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= first[query]) & (key <= last[query])

    tops = torch.arange(0, queries, BLOCK, device=device)
    bottoms = (tops + (BLOCK - 1)).clamp(max=queries - 1)
    lows = torch.arange(0, keys, BLOCK, device=device)
    highs = lows + (BLOCK - 1)
    # Both ends of the visible range ascend: a block's first query sees its first key, and its last query its last key.
    touched = (highs >= first[tops, None]) & (lows <= last[bottoms, None])
    whole = (lows >= first[bottoms, None]) & (highs <= last[tops, None])
    return BlockMask.from_kv_blocks(
        *_table(touched & whole.logical_not()),
        *_table(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(queries, keys),
        compute_q_blocks=False,
    )


def _table(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert a mask (query blocks, key blocks) to each row's count of set blocks, and indices with set ones first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]
