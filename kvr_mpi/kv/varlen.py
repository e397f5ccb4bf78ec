"""Attention over sequences of different lengths in one call on GPUs: packed documents, and KV heads in pages.

Each is a call of flash attention's variable-length form, which is told of the sequences by tensors on the device.
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
        Where each begins, and where the last ends (documents + 1,), int32 on the device.
    longest : int
        Tokens of the longest.
    window : int or None
        See only the last `window` keys, one's own included.
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
    # The log-sum-exp comes as (heads, queries), whatever varlen_attn's own documentation says.
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
        Of the query heads of each KV head (units, group, head_dim).
    keys, values : Tensor
        All pages (pages, rows, 1, head_dim).
    pages : Tensor
        Of each unit (units, pages of the longest), int32 on the device.
    counts : Tensor
        Rows that each has (units,), int32 on the device.
    edges : Tensor
        The numbers from 0 to units, int32 on the device: where each unit's query begins.
    longest : int
        Most rows that any has.
    window : int or None
        See only the last `window` rows, the token's own included.

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
        edges,  # of the keys it is only asked to be there: pages and counts say where they are
        1,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=params.scale,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        enable_gqa=True,
        seqused_k=counts,
        block_table=pages,
    )
    return out, lse.t().float()  # it comes as (group, units)
