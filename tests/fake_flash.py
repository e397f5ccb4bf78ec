"""A GPU's attention kernels on a CPU: what they require of their arguments, and what they document that they compute.

Requirements are restated from the sources of torch 2.13 (flash attention's dense and variable-length forms); no GPU has
confirmed them.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

PAGE_MULTIPLE = 256
DENSE, VARLEN = torch.ops.aten._flash_attention_forward.default, varlen._varlen_attn._opoverload
HALF = (torch.float16, torch.bfloat16)
DEFAULTS = {"dropout_p": 0.0, "is_causal": False}  # which torch leaves out


class KernelError(Exception):
    """What the kernel would have refused."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise KernelError(what)


def arguments_of(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by name."""
    names = [each.name for each in func._schema.arguments]
    return DEFAULTS | dict(zip(names, args, strict=False)) | (kwargs or {})


def check_flash(func: Any, given: dict[str, Any]) -> None:
    """Restate what flash attention requires of its arguments (`arguments_of`).

    Queries, keys and values are (batch, tokens, heads, head_dim), of the variable-length form (tokens, heads, head_dim)
    and of pages (pages, tokens of a page, heads, head_dim); edges say where sequences begin (sequences + 1,).
    """
    query, keys, values = tensors = given["query"], given["key"], given["value"]
    head_dim, heads, kv_heads = query.shape[-1], query.shape[-2], keys.shape[-2]
    _require(all(each.device == query.device for each in tensors), "query, keys and values lie on the same GPU")
    _require(query.dtype in HALF and query.dtype == keys.dtype == values.dtype, f"fp16 or bf16, not {query.dtype}")
    _require(head_dim % 8 == 0 and head_dim <= 256, f"a head dimension of {head_dim}")
    _require(head_dim == keys.shape[-1] == values.shape[-1], "keys and values of one head dimension")
    _require(kv_heads == values.shape[-2] and heads % kv_heads == 0, f"{heads} heads over {kv_heads}")
    _require(all(each.stride(-1) == 1 for each in tensors), "a contiguous last dimension")
    if func is DENSE:
        _require(query.ndim == keys.ndim == values.ndim == 4, "batches")
        return
    used, table, sequences = given.get("seqused_k"), given.get("block_table"), given["cu_seq_q"].numel() - 1
    counts = {"cu_seq_q": sequences + 1, "cu_seq_k": sequences + 1, "seqused_k": sequences}
    for name, count in counts.items():
        if (vector := given.get(name)) is not None:
            _require(vector.dtype == torch.int32, f"{name}: int32, not {vector.dtype}")
            _require(vector.device == query.device, f"{name} on the GPU, not on {vector.device}")
            _require(vector.is_contiguous() and tuple(vector.shape) == (count,), f"{name}: {tuple(vector.shape)}")
    _require(query.ndim == 3 and keys.ndim == values.ndim == (3 if table is None else 4), "shapes")
    if table is not None:
        _require(table.dtype == torch.int32 and table.device == query.device, "a table of int32 on the GPU")
        _require(table.stride(-1) == 1 and table.shape[0] == sequences, "a row of the table for each sequence")
        _require(keys.shape[1] == values.shape[1] and keys.shape[1] % PAGE_MULTIPLE == 0, "pages of 256 tokens")
        _require(used is not None, "with pages it has to be said how many keys are used")


def attend_as(func: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    """Compute on a CPU what a kernel documents: the last query of a sequence stands at its last key."""
    if func is VARLEN:
        return *_attend_sequences(given), None
    rows = [given[name] for name in ("query", "key", "value")]
    left, right = (-1 if (each := given.get(f"window_size_{side}")) is None else each for side in ("left", "right"))
    out, lse = _attend(*(each[0] for each in rows), given["scale"], left, 0 if given["is_causal"] else right)
    return out.unsqueeze(0), lse.unsqueeze(0), None, None, None


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from (tokens, heads, head_dim); the log-sum-exp is (heads, tokens)."""
    group, before = query.shape[1] // keys.shape[1], len(keys) - len(query)
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    distance = torch.arange(len(query))[:, None] + before - torch.arange(len(keys))
    hidden = (distance > left) & (left >= 0) | (-distance > right) & (right >= 0)
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(query.dtype), scores.logsumexp(-1)


def _attend_sequences(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend within each sequence, whose keys lie one after the other, or in pages."""
    of_queries, of_keys = given["cu_seq_q"].tolist(), given["cu_seq_k"].tolist()
    table, used, outs, lses = given.get("block_table"), given.get("seqused_k"), [], []
    for at, (first, last) in enumerate(itertools.pairwise(of_queries)):
        length = of_keys[at + 1] - of_keys[at] if used is None else int(used[at])
        assert length <= given["max_k"] and last - first <= given["max_q"]
        if table is None:
            rows = [each[of_keys[at] : of_keys[at] + length] for each in (given["key"], given["value"])]
        else:
            rows = [each[table[at].long()].flatten(0, 1)[:length] for each in (given["key"], given["value"])]
        out, lse = _attend(given["query"][first:last], *rows, given["scale"], *given["window_size"])
        outs, lses = [*outs, out], [*lses, lse]
    return torch.cat(outs), torch.cat(lses, dim=1)


class FlashReference(TorchDispatchMode):
    """Has tensors of a CPU take flash attention, in any dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (DENSE, VARLEN):
            return attend_as(func, arguments_of(func, args, kwargs))
        return func(*args, **(kwargs or {}))
