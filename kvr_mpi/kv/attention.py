"""Exact attention in parts: each part has its log-sum-exp, and two parts can be merged.

A rank attends to its own slice and to the prefix it received, and merges both. No slice x prefix mask is ever
built. Shapes are transformers': queries (1, heads, queries, head_dim), keys (1, kv_heads, keys, head_dim),
with heads a multiple of kv_heads (grouped-query attention).

The merge: with o_j = softmax(s_j) v_j over disjoint keys and l_j = logsumexp(s_j), the softmax over both is
o = (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2) = o1 + (o2 - o1) sigmoid(l2 - l1), and l = log(e^l1 + e^l2).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvr_mpi.kv.flex import NotCompiledError, attend_flex, suits_flex
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import cut_range
from kvr_mpi.transport import Transport
from kvr_mpi.transport.collectives import all_gather

# Widest heads that flash attention supports.
FLASH_HEAD_DIM = 256
# Newer flash attention, which torch activates by name: its package, by the major compute capability.
NEW_FLASH = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute")}
# Largest score block the portable path makes, in elements (256 MiB in float32).
MAX_SCORES = 1 << 26
# Queries that share one band of keys under a sliding window.
WINDOW_BLOCK = 256
# Queries and keys that FlexAttention is tested with, and its tolerance, which allows for rounding to bfloat16.
TRIAL = (300, 700)
TRIAL_ERROR = 2e-2


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention over some of the keys: normalised output and log-sum-exp of its scores.

    ``out`` (1, heads, queries, value_dim) has the model's dtype when it comes from a kernel, and is float32 after a
    merge. ``lse`` (1, heads, queries) is float32.
    """

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of_nothing(cls, sizes: Sequence[int], device: torch.device) -> PartialAttention:
        """Return attention over no key (1, heads, queries, value_dim), float32; it has no weight in a merge."""
        out = torch.zeros(*sizes, device=device)
        return cls(out, torch.full_like(out[..., 0], float("-inf")))

    @staticmethod
    def join(parts: Sequence[PartialAttention]) -> PartialAttention:
        """Concatenate the queries of several parts."""
        if len(parts) == 1:
            return parts[0]
        return PartialAttention(torch.cat([each.out for each in parts], 2), torch.cat([each.lse for each in parts], 2))

    def cut(self, first: int, last: int) -> PartialAttention:
        """Return some of the queries, as views."""
        return PartialAttention(self.out[:, :, first:last], self.lse[:, :, first:last])

    def pad(self, before: int) -> PartialAttention:
        """Add queries that have attended to no key before the others."""
        out = torch.nn.functional.pad(self.out, (0, 0, before, 0))
        return PartialAttention(out, torch.nn.functional.pad(self.lse, (before, 0), value=float("-inf")))

    def merge(self, other: PartialAttention) -> PartialAttention:
        """Merge with attention from the same queries over other keys, in float32."""
        weight = torch.sigmoid(other.lse - self.lse).unsqueeze(-1)
        out = torch.lerp(self.out.float(), other.out.float(), weight)
        return PartialAttention(out, torch.logaddexp(self.lse, other.lse))

    def finish(self, params: AttentionParams) -> torch.Tensor:
        """Return the output (1, heads, queries, value_dim) after all keys are merged.

        A sink, one learned score per head, adds to the softmax denominator but has no value.
        """
        if params.sinks is None:
            return self.out
        return self.out * torch.sigmoid(self.lse - params.sinks.float().view(1, -1, 1)).unsqueeze(-1)


def gather_parts(part: PartialAttention, ranks: Transport) -> list[torch.Tensor]:
    """Gather the parts of all ranks on every rank, with the log-sum-exp as one more element, for `merge_gathered`.

    Every rank calls this. The log-sum-exp of a query is -inf on a rank without keys for it; one rank must have some.
    """
    return all_gather(ranks, torch.cat([part.out, part.lse.unsqueeze(-1)], -1).contiguous())


def merge_gathered(gathered: list[torch.Tensor]) -> PartialAttention:
    """Merge the result of `gather_parts` in a fixed order, so that all ranks get the same bits."""
    parts = torch.stack(gathered)
    outs, lses = parts[..., :-1], parts[..., -1]
    return PartialAttention((outs * lses.softmax(0).unsqueeze(-1)).sum(0), lses.logsumexp(0))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    *,
    causal: bool = False,
    window: int | None = None,
) -> PartialAttention:
    """Attend to all keys or, if `causal`, to those up to the query's own, or to the last `window` of them.

    The last query is aligned with the last key.
    """
    if params.expand is not None:
        if keys.shape[1] < query.shape[1]:  # cached latents; new tokens come expanded
            keys, values = params.expand(keys, values)
        dim = values.shape[-1]
        values = torch.nn.functional.pad(values, (0, max(0, keys.shape[-1] - dim)))  # kernels take one dimension
        part = attend(query, keys, values, replace(params, expand=None), causal=causal, window=window)
        return PartialAttention(part.out[..., :dim], part.lse)
    if params.kernel is not None and params.is_plain and params.kernel.takes(query, keys, values):
        return PartialAttention(*params.kernel.attend(query, keys, values, params.scale, causal=causal, window=window))
    before = keys.shape[2] - query.shape[2]
    if window is not None:
        if takes_flash(query, values, params):
            return _attend_flash(query, keys, values, params, window=window, causal=True)
        return _attend_bent(query, keys, values, params, offset=before, window=window)
    if causal and before:
        part = attend(query, keys[:, :, before:], values[:, :, before:], params, causal=True)
        return part.merge(attend(query, keys[:, :, :before], values[:, :, :before], params))
    heads, queries = query.shape[1:3]
    causal = causal and queries > 1
    if params.is_plain and keys.shape[-1] == values.shape[-1]:
        if query.device.type in ("cpu", "meta"):  # meta: only shapes matter
            if queries == 1:  # decoding: with a group's heads as queries, keys are read once per group
                query = query.view(1, keys.shape[1], -1, query.shape[-1])
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, keys, values, 0.0, causal, attn_mask=None, scale=params.scale
            )
            return PartialAttention(out.reshape(1, heads, queries, -1), lse.float().reshape(1, heads, queries))
        if takes_flash(query, values, params):
            return _attend_flash(query, keys, values, params, window=None, causal=causal)
    return _attend_bent(query, keys, values, params, offset=0 if causal else None, window=None)


def takes_flash(query: torch.Tensor, values: torch.Tensor, params: AttentionParams) -> bool:
    """Whether flash attention on GPUs supports these tensors."""
    head_dim = query.shape[-1]
    is_plain = params.is_plain and head_dim == values.shape[-1]
    if not (is_plain and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)):
        return False
    return head_dim % 8 == 0 and head_dim <= FLASH_HEAD_DIM and _has_flash(query.device)


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether a GPU supports flash attention (Ampere or newer)."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def why_no_new_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    """Activate FlashAttention 3 or 4 if it is installed and agrees with torch's kernel; return why not, or None."""
    import torch.nn.attention as torchs

    name, package = NEW_FLASH.get(torch.cuda.get_device_capability(device)[0], ("", ""))
    if not name:
        return "there is none for this GPU"
    if not _is_installed(package):
        return f"the package {package} is not installed"

    def outputs() -> list[PartialAttention]:
        how: Any = ({"window": None, "causal": False}, {"window": 100, "causal": True})
        parts = [_attend_flash(query, keys, values, params, **each) for each in how]
        parts.append(_attend_flash(query, keys[:, :, :256], values[:, :, :256], params, window=None, causal=True))
        return [*parts, _attend_in_pages(query, keys, values, params)]

    def trial() -> Iterator[tuple[PartialAttention, PartialAttention]]:
        torchs.activate_flash_attention_impl(name)
        yield from zip(outputs(), before, strict=True)

    query, keys, values, params = _trial(device, dtype)
    before = outputs()
    why = _why_they_differ(trial())
    if why is not None:
        torchs.restore_flash_attention_impl(_raise_warn=False)
    return why


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _attend_in_pages(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
) -> PartialAttention:
    """Attend from one token each of two sequences in pages of 256 rows, as decode steps do (`_trial`)."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    edges, used = (torch.tensor(each, dtype=torch.int32, device=query.device) for each in ([0, 1, 2], [700, 256]))
    table = torch.tensor([[2, 0, 1], [1, 0, 0]], dtype=torch.int32, device=query.device)
    its_keys, its_values = (each[0, 0].reshape(-1, 256, 1, each.shape[-1]) for each in (keys, values))
    group = query[0, :4, :2].transpose(0, 1).contiguous()
    options: Any = {"return_aux": AuxRequest(lse=True), "scale": params.scale, "enable_gqa": True}
    out, lse = varlen_attn(
        group, its_keys, its_values, edges, edges, 1, 768, **options, seqused_k=used, block_table=table
    )
    return PartialAttention(out, lse.float())


def _trial(
    device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionParams]:
    """Draw queries, and keys and values for them and for earlier tokens."""
    draw = torch.Generator(device).manual_seed(0)
    query, keys, values = (
        torch.randn(1, count, heads, 128, generator=draw, dtype=dtype, device=device).transpose(1, 2)
        for count, heads in ((256, 8), (768, 2), (768, 2))
    )
    return query, keys, values, AttentionParams(128**-0.5)


def _why_they_differ(trial: Iterator[tuple[PartialAttention, PartialAttention]]) -> str | None:
    """Compare a kernel's results with the reference; return how they differ, or why it failed; None if they agree.

    The pairs are computed one after the other.
    """
    try:
        for mine, truth in trial:
            for name, one, other in (("outputs", mine.out, truth.out), ("log-sum-exp", mine.lse, truth.lse)):
                if not torch.allclose(one.float(), other.float(), atol=TRIAL_ERROR, rtol=TRIAL_ERROR):
                    return f"its {name} differ by up to {float((one.float() - other.float()).abs().max()):.1e}"
    except Exception as error:  # whatever a compiler or another package raises
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def name_attention(device: torch.device) -> str:
    """Name the attention kernels that a GPU uses for 16-bit tensors."""
    if not _has_flash(device):
        return "FlexAttention, plain"
    if why_no_new_flash(device, torch.bfloat16) is None:
        version = NEW_FLASH[torch.cuda.get_device_capability(device)[0]][0].removeprefix("FA")
        return f"FlashAttention {version}, FlexAttention, plain"
    return "flash, FlexAttention, plain"


def _attend_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    *,
    window: int | None,
    causal: bool,
) -> PartialAttention:
    """Run flash attention on a GPU; it reads token-major buffers without a copy.

    ``scaled_dot_product_attention`` calls the same operation. Unlike ``varlen_attn`` it takes lengths from shapes, so
    no table of lengths is copied to the GPU, which would wait for all queued work. The last query is aligned with the
    last key.
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
    return PartialAttention(out.transpose(1, 2), lse.float())


def _attend_bent(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    *,
    offset: int | None,
    window: int | None,
) -> PartialAttention:
    """Attend where flash attention is not supported: with FlexAttention if it passes its test, else portably.

    `offset` and `window` are those of `_attend_blocks`.
    """
    if suits_flex(query, values):
        dims = query.shape[-1], values.shape[-1]
        if why_no_flex(query.device, query.dtype, query.shape[1], keys.shape[1], dims, params.softcap) is None:
            how: Any = {"scale": params.scale, "softcap": params.softcap, "offset": offset, "window": window}
            with contextlib.suppress(NotCompiledError):
                return PartialAttention(*attend_flex(query, keys, values, **how))
    return _attend_blocks(query, keys, values, params, offset=offset, window=window)


@functools.cache
def why_no_flex(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dims: tuple[int, int], softcap: float | None
) -> str | None:
    """Compare FlexAttention with the portable code for such a layer; return why it is not used, or None if it is.

    dims : head dimensions of keys and of values.
    """
    draw = torch.Generator(device).manual_seed(0)
    shapes = (heads, TRIAL[0], dims[0]), (kv_heads, TRIAL[1], dims[0]), (kv_heads, TRIAL[1], dims[1])
    query, keys, values = (torch.randn(1, *each, generator=draw, dtype=dtype, device=device) for each in shapes)
    params = AttentionParams(dims[0] ** -0.5, softcap)

    def trial() -> Iterator[tuple[PartialAttention, PartialAttention]]:
        after = TRIAL[1] - TRIAL[0]
        for offset, window in ((None, None), (after, None), (after, TRIAL[0] // 2)):
            how: Any = {"offset": offset, "window": window}
            mine = PartialAttention(*attend_flex(query, keys, values, scale=params.scale, softcap=softcap, **how))
            yield mine, _attend_blocks(query, keys, values, params, **how)

    return _why_they_differ(trial())


def _attend_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    *,
    offset: int | None,
    window: int | None,
) -> PartialAttention:
    """Attend on any device, in blocks of queries to keep the scores small.

    offset : query i is aligned with key ``offset + i`` and sees no later key; None: every query sees every key.
    window : with an offset: see only the last `window` keys.
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
        high = length if offset is None else offset + last
        folded = query[0, :, first:last].reshape(kv_heads, -1, query.shape[-1])  # a group's heads become queries
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


def attend_range(
    query: torch.Tensor,
    bounds: tuple[int, int],
    rows: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
    seen: Visibility,
    params: AttentionParams,
) -> PartialAttention:
    """Attend from a range of tokens to those they see, all of which this rank holds.

    query : queries of the tokens (1, heads, tokens, head_dim).
    rows : returns keys and values of a range of tokens, each (1, kv_heads, tokens, head_dim).
    """
    parts = list[PartialAttention]()
    for first, last in cut_range(*bounds, seen.chunk):
        some = query[:, :, first - bounds[0] : last - bounds[0]]
        keys, values = rows(seen.first_key(first), last)
        if last - first == 1:
            parts.append(attend(some, keys, values, params))
        else:
            window = None if seen.sees_all(last) else seen.window
            parts.append(attend(some, keys, values, params, causal=True, window=window))
    return PartialAttention.join(parts)
