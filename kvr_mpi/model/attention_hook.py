"""Routes a model's attention to our cache, without changing the model.

Two fast methods, both with public APIs: architectures with a pluggable attention function get ours, which finds the
cache among the keyword arguments that they pass on. Architectures that call ``scaled_dot_product_attention`` directly
(Falcon, StableLM, ...) run under a torch function mode that intercepts this call. Otherwise the model's own attention
runs over the keys and values that the cache returns (``whole``).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from kvr_mpi.errors import ModelError
from kvr_mpi.model.cpu_attention import CpuAttention
from kvr_mpi.model.final_states import final_states
from kvr_mpi.model.kernels import ATTENTION_SLOT, use_kernels
from kvr_mpi.model.layer_chunks import cut_layers
from kvr_mpi.model.masks import check_mask, request_mask
from kvr_mpi.model.rope import embed_whole_lengths
from kvr_mpi.model.running import ChunkLengths, running
from kvr_mpi.model.shape import CACHE_ARGUMENTS, EXPAND, LayerShape

ATTENTION = "kvr"


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer turns query-key products into weights.

    scale : factor of the products.
    softcap : bound of the scores, by tanh (Gemma 2).
    sinks : one learned score per head (heads,) that takes part in the softmax but has no value (gpt-oss).
    kernel : attention kernel that is faster than torch's for some shapes.
    expand : makes the keys and values of all heads from cached latents (1, 1, tokens, dim), if a layer keeps these.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    kernel: CpuAttention | None = None
    expand: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are just scaled products with cached keys, as kernels compute them; sinks are added later."""
        return self.softcap is None and self.expand is None


class AttendingLayer(Protocol):
    """A cache layer between its update and its attention."""

    layer_idx: int
    shape: LayerShape

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from (1, heads, tokens, head_dim) to all earlier tokens; returns (1, heads, tokens, value_dim)."""


class HookedCache(Protocol):
    """The part of a cache that the hook uses."""

    in_parts: bool  # whether our attention runs; otherwise the model's own, over all keys and values
    current: AttendingLayer | None  # the layer that has been updated but has not attended yet

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are being processed, not answer tokens."""

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Return each document's number of tokens in this call and its length after it (`running`)."""


class _SdpaHook(TorchFunctionMode):
    """Redirects scaled_dot_product_attention to the cache, for models that call it directly (Falcon, ...)."""

    def __init__(self, cache: HookedCache, kernel: CpuAttention | None) -> None:
        super().__init__()
        self.cache, self.kernel = cache, kernel

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None and attn_mask.numel() != 1:
            raise ModelError("it adds its own mask or bias to attention")
        if self.cache.current is None:
            raise ModelError("it attends without having updated the cache")
        params = AttentionParams(query.shape[-1] ** -0.5 if scale is None else scale, kernel=self.kernel)
        return self.cache.current.attend(query, key, value, params)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv_chain: HookedCache | None = None,
    kv_kernel: CpuAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the cache in the model's keyword arguments; registered as an attention function of transformers."""
    if kv_chain is None:
        raise ModelError("it does not pass keyword arguments on to its attention")
    layer = kv_chain.current
    if layer is None:
        raise ModelError("it attends without having updated the cache")
    if getattr(module, "layer_idx", layer.layer_idx) != layer.layer_idx:
        raise ModelError("it shares keys between layers")
    if position_bias is not None:
        raise ModelError("it adds a bias to attention")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModelError("its attention is not causal")
    if kv_chain.prefilling and not query.is_meta:  # masks on meta have no values
        check_mask(attention_mask, layer.shape.visibility, sliding_window)
    expand = getattr(module, EXPAND) if layer.shape.expanded_dim else None
    params = AttentionParams(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux, kv_kernel, expand)
    out = layer.attend(query, key, value, params)
    return out.transpose(1, 2), None


def prepare_model(model: Any, *, chain: bool, in_parts: bool = True) -> None:
    """Select the model's attention and kernels: ours for a chain, otherwise transformers' own.

    With `in_parts`, a chain replaces the model's attention, which otherwise runs over the whole prefix. Raises
    `ModelError` with the reason if it cannot be replaced.
    """
    use_kernels(model, chain)
    embed_whole_lengths(model)
    if not (chain and in_parts):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        return
    if not model._supports_attention_backend:
        _check_own_calls(model)
    cut_layers(model)
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, request_mask)
    model.set_attn_implementation(ATTENTION if model._supports_attention_backend else "sdpa")


def _check_own_calls(model: Any) -> None:
    """Refuse models whose direct attention calls may have their own masks."""
    if not model._supports_sdpa:
        raise ModelError("it only has its own attention")
    config = model.config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size", "attention_window_size"):
        if getattr(config, name, None) is not None:
            raise ModelError(f"it calls attention itself, with its own masks ({name})")


def run_model(
    model: Any,
    ids: torch.Tensor,
    cache: HookedCache | DynamicCache,
    *,
    positions: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    chunk_lengths: ChunkLengths | None = None,
    reads: Literal["logits", "states"] = "logits",
) -> torch.Tensor:
    """Run tokens (1, tokens) through the model, after those in its cache; return logits (rows, vocab_size), float32.

    cache : ours; or transformers' own, for a model that is not prepared for chains.
    positions : position of each token in its document (1, tokens); by default, the cache or the model counts.
    keep : indices of the tokens whose logits are returned (rows,); by default, the last one.
    chunk_lengths : the tokens of each chunk, for each layer (`layer_chunks`).
    reads : states: return the final hidden states of all tokens (tokens, hidden) instead, and compute no logits.
    """
    tokens, parameters = ids.shape[1], inspect.signature(model.forward).parameters
    argument, cuts = next(name for name in CACHE_ARGUMENTS if name in parameters), "logits_to_keep" in parameters
    options: dict[str, Any] = {"input_ids": ids, argument: cache, "use_cache": True}
    if positions is not None:
        options["position_ids"] = positions
    if cuts:
        options["logits_to_keep"] = 1 if keep is None else keep
    hook: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if isinstance(cache, DynamicCache):
        before = 0
        with contextlib.suppress(ValueError):  # it has only states, and such models do not depend on the length
            before = int(cache.get_seq_length())
        lengths = [(tokens, before + tokens)]
    else:
        lengths, kernel = cache.whole_lengths(tokens), vars(model).get(ATTENTION_SLOT)
        if cache.in_parts and model.config._attn_implementation == ATTENTION:
            options |= {"kv_chain": cache, "kv_kernel": kernel}
        elif cache.in_parts:  # with this dummy mask, which the hook ignores, the model makes none
            options["attention_mask"] = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=ids.device)
            hook = _SdpaHook(cache, kernel)
    with running(lengths, chunk_lengths), hook:
        if reads == "states":
            return final_states(model, lambda: model(**options))
        logits = model(**options).logits[0]
    read: torch.Tensor = logits[-1:] if keep is None else logits if cuts else logits[keep]
    return read.float()
