"""Attention over sequences of several lengths in one call, on GPUs: documents in a row, heads of their own, pages.

Each is a call of flash attention's variable-length form, which is told of the sequences by tensors on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvr_mpi.kv.attention import PartialAttention
from kvr_mpi.model.attention_hook import AttentionParams


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """Where the keys of some documents lie in pages; all int32 on the device.

    pages : of each document (documents, pages of the longest).
    counts : keys that each has (documents,).
    edges : where each one's query begins, and the last one's ends (documents + 1,).
    """

    pages: torch.Tensor
    counts: torch.Tensor
    edges: torch.Tensor


def attend_documents(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    edges: torch.Tensor,
    longest: int,
    window: int | None,
) -> PartialAttention:
    """Attend causally within each of the documents that lie one after the other in a row, at once, on a GPU.

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


def attend_heads(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    begins: torch.Tensor,
    counts: torch.Tensor,
    longest: int,
) -> PartialAttention:
    """Attend from one token with heads that hold keys of their own, at once, on a GPU.

    Parameters
    ----------
    query : Tensor
        (kv_heads, group, head_dim).
    keys, values : Tensor
        Of all heads, one after the other (rows, dim).
    begins : Tensor
        Where each head's rows begin, and where the last one's end (kv_heads + 1,), int32 on the device.
    counts : Tensor
        Rows of each head that are filled, from where they begin (kv_heads,), int32.
    longest : int
        Most rows that any has filled.

    Returns
    -------
    PartialAttention
        Of (1, kv_heads * group, 1, value_dim).
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    kv_heads, group, _ = query.shape
    single = torch.arange(kv_heads + 1, dtype=torch.int32, device=query.device)  # a query for each sequence
    out, lse = varlen_attn(
        query,
        keys.unsqueeze(1),
        values.unsqueeze(1),
        single,
        begins,
        1,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=params.scale,
        enable_gqa=True,
        seqused_k=counts,
    )
    # The log-sum-exp is (group, kv_heads): heads of a sequence, then all queries.
    return PartialAttention(out.reshape(1, kv_heads * group, 1, -1), lse.t().reshape(1, -1, 1).float())


def attend_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    table: PageTable,
    longest: int,
    window: int | None,
) -> PartialAttention:
    """Attend from one token of each of several documents whose keys lie in pages, at once, on a GPU.

    Parameters
    ----------
    query : Tensor
        (documents, heads, head_dim).
    keys, values : Tensor
        All pages (pages, tokens, kv_heads, head_dim).
    table : PageTable
    longest : int
        Most keys that any document has.
    window : int or None
        See only the last `window` keys, one's own included.

    Returns
    -------
    PartialAttention
        Of (1, heads, documents, value_dim).
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    out, lse = varlen_attn(
        query,
        keys,
        values,
        table.edges,
        table.edges,  # of the keys it is only asked to be there: pages and counts say where they are
        1,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=params.scale,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        enable_gqa=True,
        seqused_k=table.counts,
        block_table=table.pages,
    )
    return PartialAttention(out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0).float())
