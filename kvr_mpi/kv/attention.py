"""Exact attention in parts: blocks with their log-sum-exp, and the merge of two of them.

A rank attends to its own slice and to the prefix it was sent, and merges. No mask of slice x prefix is ever
made. Shapes are transformers': queries (1, heads, queries, head_dim), keys (1, kv_heads, keys, head_dim),
with heads a multiple of kv_heads (grouped-query attention).

The merge: with o_j = softmax(s_j) v_j over disjoint keys and l_j = logsumexp(s_j), the softmax over both is
o = (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2) = o1 + (o2 - o1) sigmoid(l2 - l1), and l = log(e^l1 + e^l2).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.transport import Transport
from kvr_mpi.transport.gather import all_gather

# Widest head that flash attention takes.
FLASH_HEAD_DIM = 256
# Largest score block the portable path makes, in elements (256 MiB in float32).
MAX_SCORES = 1 << 26
# Queries that share one band of keys under a sliding window.
WINDOW_BLOCK = 256


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


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention over some of the keys: normalised output and log-sum-exp of its scores.

    ``out`` is float32 (1, heads, queries, value_dim), ``lse`` float32 (1, heads, queries).
    """

    out: torch.Tensor
    lse: torch.Tensor

    def merge(self, other: PartialAttention) -> PartialAttention:
        """Join with attention over other keys."""
        weight = torch.sigmoid(other.lse - self.lse).unsqueeze(-1)
        return PartialAttention(torch.lerp(self.out, other.out, weight), torch.logaddexp(self.lse, other.lse))

    def join(self, after: PartialAttention) -> PartialAttention:
        """Put the queries of another part after these."""
        return PartialAttention(torch.cat([self.out, after.out], dim=2), torch.cat([self.lse, after.lse], dim=2))

    def cut(self, first: int, last: int) -> PartialAttention:
        """Give the part of some of the queries, as views."""
        return PartialAttention(self.out[:, :, first:last], self.lse[:, :, first:last])

    def merge_after(self, at: int, other: PartialAttention) -> None:
        """Join the queries from `at` on with their attention over other keys, in place."""
        after = PartialAttention(self.out[:, :, at:], self.lse[:, :, at:])
        after.out.lerp_(other.out, torch.sigmoid(other.lse - after.lse).unsqueeze(-1))
        torch.logaddexp(after.lse, other.lse, out=after.lse)

    def finish(self, params: AttentionParams) -> torch.Tensor:
        """Return the output (1, heads, queries, value_dim), when all keys are in.

        One learned score per head, a sink, takes its share of the softmax and gives nothing.
        """
        if params.sinks is None:
            return self.out
        return self.out * torch.sigmoid(self.lse - params.sinks.float().view(1, -1, 1)).unsqueeze(-1)


def merge_over_ranks(part: PartialAttention, ranks: Transport) -> PartialAttention:
    """Join attention to this rank's keys with that to the others', in one order, so that all of them get the same bits.

    Every rank calls this. Where a rank has no key for a query its log-sum-exp is -inf; one rank at least has some.
    """
    return part if ranks.size == 1 else merge_gathered(gather_parts(part, ranks))


def gather_parts(part: PartialAttention, ranks: Transport) -> list[torch.Tensor]:
    """Give every rank each rank's part, with its log-sum-exp as one element more, for `merge_gathered`."""
    return all_gather(ranks, torch.cat([part.out, part.lse.unsqueeze(-1)], -1).contiguous())


def merge_gathered(gathered: list[torch.Tensor]) -> PartialAttention:
    """Join what `gather_parts` gave."""
    parts = torch.stack(gathered)
    if len(parts) == 1:
        return PartialAttention(parts[0, ..., :-1], parts[0, ..., -1])
    outs, lses = parts[..., :-1], parts[..., -1]
    most = lses.amax(0)
    weights = torch.exp(lses - most)
    total = weights.sum(0)
    return PartialAttention((outs * weights.unsqueeze(-1)).sum(0) / total.unsqueeze(-1), most + total.log())


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, *, causal: bool = False
) -> PartialAttention:
    """Attend to all keys, or (`causal`, as many queries as keys) to those not after the query."""
    if params.is_plain and keys.shape[-1] == values.shape[-1]:
        if query.device.type in ("cpu", "meta"):  # meta: only shapes are asked for
            heads, queries = query.shape[1:3]
            if queries == 1:  # decoding: the group's heads as queries read the keys once instead of once each
                query = query.view(1, keys.shape[1], -1, query.shape[-1])
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, keys, values, 0.0, causal, attn_mask=None, scale=params.scale
            )
            return PartialAttention(out.float().reshape(1, heads, queries, -1), lse.float().reshape(1, heads, queries))
        if takes_flash(query, values, params):
            return _attend_flash(query, keys, values, params, window=None, causal=causal)
    return _attend_blocks(query, keys, values, params, offset=0 if causal else None, window=None)


def attend_window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, window: int
) -> PartialAttention:
    """Attend to the last `window` keys up to each query; the last query stands at the last key."""
    if takes_flash(query, values, params):
        return _attend_flash(query, keys, values, params, window=window, causal=True)
    return _attend_blocks(query, keys, values, params, offset=keys.shape[2] - query.shape[2], window=window)


def attend_masked(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, offset: int
) -> PartialAttention:
    """Attend to all keys, and mask those after each query; the first query stands at key `offset`.

    The whole rectangle is computed, as the paper's TSP does it: for a baseline, not for use.
    """
    if params.is_plain and keys.shape[-1] == values.shape[-1] and query.device.type in ("cpu", "meta"):
        after = torch.arange(keys.shape[2], device=query.device) > torch.arange(
            offset, offset + query.shape[2], device=query.device
        ).unsqueeze(1)
        mask = torch.zeros(after.shape, dtype=query.dtype, device=query.device).masked_fill_(after, float("-inf"))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=params.scale
        )
        return PartialAttention(out.float(), lse.float())
    return _attend_blocks(query, keys, values, params, offset=offset, window=None, dense=True)


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
    return PartialAttention(out.transpose(0, 1).unsqueeze(0).float(), lse.view(1, *query.shape[1:3]).float())


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
    return PartialAttention(out.reshape(1, kv_heads * group, 1, -1).float(), lse.t().reshape(1, -1, 1).float())


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
    return PartialAttention(out.transpose(0, 1).unsqueeze(0).float(), lse.unsqueeze(0).float())


def takes_flash(query: torch.Tensor, values: torch.Tensor, params: AttentionParams) -> bool:
    """Whether the flash attention of GPUs can do this."""
    head_dim = query.shape[-1]
    is_plain = params.is_plain and head_dim == values.shape[-1]
    if not (is_plain and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)):
        return False
    return head_dim % 8 == 0 and head_dim <= FLASH_HEAD_DIM and _has_flash(query.device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether a GPU is new enough for flash attention (Ampere)."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _attend_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    *,
    window: int | None,
    causal: bool,
) -> PartialAttention:
    """Flash attention on a GPU, which takes token-major tensors and so reads our buffers as they lie.

    The operation that ``scaled_dot_product_attention`` ends in. Unlike ``varlen_attn`` it takes lengths from shapes:
    no table of them is copied to the GPU, which would wait for all that is queued there. The last query stands at
    the last key.
    """
    left, right = (None if window is None else window - 1), (0 if causal and window is not None else None)
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        None,
        None,
        query.shape[2],
        keys.shape[2],
        0.0,
        causal and window is None,
        False,
        scale=params.scale,
        window_size_left=left,
        window_size_right=right,
    )
    return PartialAttention(out.transpose(1, 2).float(), lse.float())


def _attend_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    *,
    offset: int | None,
    window: int | None,
    dense: bool = False,
) -> PartialAttention:
    """Attend on any device, in blocks of queries so that the scores stay small.

    Parameters
    ----------
    offset : int or None
        Query i stands at key ``offset + i`` and sees nothing after it; None: every query sees every key.
    window : int or None
        With an offset: see only the last `window` keys.
    dense : bool
        Compute the scores of keys that no query of a block sees, too.
    """
    _, heads, queries, _ = query.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    step = max(1, MAX_SCORES // (heads * length))
    if window is not None:
        step = min(step, WINDOW_BLOCK)
    outs, lses = [], []
    for first in range(0, queries, step):
        last = min(first + step, queries)
        low = 0 if window is None or offset is None else max(0, offset + first - window + 1)
        high = length if offset is None or dense else offset + last
        folded = query[0, :, first:last].reshape(kv_heads, -1, query.shape[-1])  # the group joins the queries
        score = torch.matmul(folded.float(), keys[0, :, low:high].float().transpose(-1, -2)) * params.scale
        if params.softcap is not None:
            score = torch.tanh(score / params.softcap) * params.softcap
        score = score.view(heads, last - first, high - low)
        if offset is not None:
            after = (
                torch.arange(first, last, device=query.device)[:, None]
                + offset
                - torch.arange(low, high, device=query.device)
            )
            seen = after >= 0 if window is None else (after >= 0) & (after < window)
            score = score.masked_fill(~seen, float("-inf"))
        lse = torch.logsumexp(score, dim=-1)
        weights = torch.exp(score - lse.unsqueeze(-1)).view(kv_heads, -1, high - low)
        out = torch.matmul(weights, values[0, :, low:high].float())
        outs.append(out.view(heads, last - first, -1))
        lses.append(lse)
    return PartialAttention(torch.cat(outs, dim=1).unsqueeze(0), torch.cat(lses, dim=1).unsqueeze(0))
