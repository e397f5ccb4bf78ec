"""Attention over sequences of different lengths in one call on GPUs: packed documents, and KV heads in pages.

Both functions call flash attention's variable-length kernel, which reads sequence lengths from device tensors.
"""

from __future__ import annotations

import torch

from kvr_mpi.kv.attention import PartialAttention
from kvr_mpi.model.attention_hook import AttentionParams


def attend_documents(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    edges: torch.Tensor,
    longest: int,
    window: int | None,
) -> PartialAttention:
    """Attend causally within each document of a packed row, in one call on a GPU.

    Parameters
    ----------
    edges : Tensor
        Cumulative lengths of the documents (documents + 1,), int32 on the device.
    longest : int
        Tokens of the longest document.
    window : int or None
        See only the last `window` keys, including the query's own.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    out, lse = varlen_attn(
        query[0].transpose(0, 1),
        keys[0].transpose(0, 1),
        values[0].transpose(0, 1),
        edges,
        edges,
        longest,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=params.scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    # The log-sum-exp is (heads, queries); varlen_attn's own documentation is wrong.
    return PartialAttention(out.transpose(0, 1).unsqueeze(0), lse.view(1, *query.shape[1:3]).float())


def attend_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    pages: torch.Tensor,
    counts: torch.Tensor,
    edges: torch.Tensor,
    longest: int,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one token to each of several paged KV heads of any documents, in one call on a GPU.

    Parameters
    ----------
    query : Tensor
        Query heads of each unit, which is a KV head (units, group, head_dim).
    keys, values : Tensor
        All pages (pages, rows, 1, head_dim).
    pages : Tensor
        Block table (units, pages of the longest unit), int32 on the device.
    counts : Tensor
        Rows of each unit (units,), int32 on the device.
    edges : Tensor
        The numbers from 0 to units, int32 on the device: where each unit's query begins.
    longest : int
        Largest number of rows of a unit.
    window : int or None
        See only the last `window` rows, including the token's own.

    Returns
    -------
    Tensor, Tensor
        Output (units, group, head_dim) and log-sum-exp (units, group), float32.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    out, lse = varlen_attn(
        query,
        keys,
        values,
        edges,
        edges,  # required but not read for keys, which pages and counts locate
        1,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=params.scale,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        enable_gqa=True,
        seqused_k=counts,
        block_table=pages,
    )
    return out, lse.t().float()  # varlen_attn returns (group, units)
